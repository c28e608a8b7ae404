"""Random bodies of a `shard_map`: the checker rejects the wrong ones and accepts the right ones. A
body is right if it computes the same result on n devices and on one.

On one device every collective is the identity, so the body on an axis of size 1 with whole operands
gives the wanted result. The lanes of a `vmap` stand for the devices, so the test uses no code of
the checker.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as PS

import sbp
from tests.slices import sliced

AXIS, N = "m", 4
SHAPES = {"x": (8, 16), "w": (16, 12), "y": (8, 12), "b": (12,), "s": ()}

UNARY = {
    "tanh": lambda x: jnp.tanh(0.05 * x),
    "twice": lambda x: 2.5 * x,
    "neg": lambda x: -x,
    "square": lambda x: x * x,
    "exp": lambda x: jnp.exp(0.02 * x),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "transpose": lambda x: x.T,
    "psum": lambda x: jax.lax.psum(x, AXIS),
    "pmean": lambda x: jax.lax.pmean(x, AXIS),
    "pmax": lambda x: jax.lax.pmax(x, AXIS),
}
ALONG = {
    "sum_along": lambda x, d: x.sum(d),
    "mean_along": lambda x, d: x.mean(d),
    "max_along": lambda x, d: x.max(d, keepdims=True),
    "softmax": lambda x, d: x * jax.nn.softmax(0.1 * x, d),
    "cumsum": lambda x, d: jnp.cumsum(x, d),
    "normed": lambda x, d: x / jnp.sqrt(1.0 + (x * x).sum(d, keepdims=True)),
    "gather": lambda x, d: jax.lax.all_gather(x, AXIS, axis=d, tiled=True),
    "scatter": lambda x, d: jax.lax.psum_scatter(x, AXIS, scatter_dimension=d, tiled=True),
}
"""Operations that show what they are given: nothing saturates, and nothing drops an operand."""

BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 0.7 * y,
    "mul": lambda x, y: x * y,
    "max": lambda x, y: jnp.maximum(x, y) + 0.1 * x + 0.2 * y,
    "matmul": lambda x, y: x @ y,
    "div": lambda x, y: x / (2.0 + jnp.abs(y)),
}


@dataclass(frozen=True)
class Body:
    """A body: steps (operation, operands, dim), each with one result; the last one is returned."""

    specs: dict[str, Any]
    steps: tuple[tuple[str, tuple[int, ...], int], ...]

    def __call__(self, *args: Any) -> Any:
        pool = list(args)
        for op, operands, dim in self.steps:
            pool.append(apply(op, [pool[i] for i in operands], dim))
        return pool[-1]


def apply(op, values, dim):
    if op in ALONG:
        return ALONG[op](values[0], dim)
    return UNARY[op](values[0]) if op in UNARY else BINARY[op](*values)


def local_shape(shape, spec, n):
    return tuple(
        size // n if d < len(spec) and spec[d] == AXIS else size for d, size in enumerate(shape)
    )


def draw_body(seed: int) -> Body | None:
    """A body whose steps fit, on one device and on several; None when the draw came to nothing."""
    rng = np.random.default_rng(seed)
    specs = {name: draw_spec(rng, shape) for name, shape in SHAPES.items()}
    shapes = {
        n: [
            jax.ShapeDtypeStruct(local_shape(s, specs[k], n), jnp.float64)
            for k, s in SHAPES.items()
        ]
        for n in (1, N)
    }
    steps, wanted = [], int(rng.integers(2, 8))
    for _ in range(60):
        if len(steps) == wanted:
            break
        step = draw_step(rng, shapes[N])
        try:
            made = {n: traced(step, shapes[n], n) for n in (1, N)}
        except (TypeError, ValueError, AssertionError):  # JAX refuses shapes in each of these ways
            continue
        if not fits(made[1].shape, made[N].shape):
            continue
        for n in (1, N):
            shapes[n].append(made[n])
        steps.append(step)
    return Body(specs, used(steps, len(SHAPES))) if steps else None


def draw_spec(rng, shape):
    dim = int(rng.integers(-1, len(shape)))
    return PS() if dim < 0 else PS(*(AXIS if d == dim else None for d in range(len(shape))))


def draw_step(rng, shapes):
    pool = len(shapes)
    late = lambda: (
        int(rng.integers(max(0, pool - 3), pool))
        if rng.random() < 0.7
        else int(rng.integers(0, pool))
    )
    kind = rng.random()
    if kind < 0.35:
        i = late()
        return (
            str(rng.choice(list(BINARY))),
            (i, int(rng.choice([k for k in range(pool) if k != i]))),
            0,
        )
    i = late()
    if kind < 0.65 and shapes[i].shape:
        return str(rng.choice(list(ALONG))), (i,), int(rng.integers(0, len(shapes[i].shape)))
    return str(rng.choice(list(UNARY))), (i,), 0


def traced(step, shapes, n):
    op, operands, dim = step
    lanes = [jax.ShapeDtypeStruct((n, *shapes[i].shape), jnp.float64) for i in operands]
    out = jax.eval_shape(jax.vmap(lambda *v: apply(op, v, dim), axis_name=AXIS), *lanes)
    return jax.ShapeDtypeStruct(out.shape[1:], out.dtype)


def fits(one, several):
    """Whether a device's part is the whole, or a block of it along one dim."""
    if len(one) != len(several):
        return False
    unequal = [(a, b) for a, b in zip(one, several, strict=True) if a != b]
    return all(b > 1 for b in several) and (
        not unequal or (len(unequal) == 1 and unequal[0][0] == N * unequal[0][1])
    )


def used(steps, inputs):
    """The steps that the last one depends on."""
    needed, kept = {inputs + len(steps) - 1}, []
    for k in reversed(range(len(steps))):
        if inputs + k in needed:
            kept.append(k)
            needed |= set(steps[k][1])
    places = {k: inputs + i for i, k in enumerate(reversed(kept))}
    renamed = lambda i: i if i < inputs else places[i - inputs]
    return tuple(
        (steps[k][0], tuple(renamed(i) for i in steps[k][1]), steps[k][2]) for k in reversed(kept)
    )


def values():
    rng = np.random.default_rng(1)
    return [np.asarray(rng.standard_normal(s) + 0.3, np.float64) for s in SHAPES.values()]


def outcome(body: Body) -> tuple[np.ndarray, np.ndarray]:
    """What the body returns on one device, and on each of several."""
    whole = values()
    lanes = []
    for x, spec in zip(whole, body.specs.values(), strict=True):
        dims = [d for d, a in enumerate(spec) if a == AXIS]
        lanes.append(np.stack(np.split(x, N, dims[0])) if dims else np.stack([x] * N))
    run = jax.vmap(body, axis_name=AXIS)
    return np.asarray(run(*[x[None] for x in whole]))[0], np.asarray(run(*lanes))


def split_dim(one, several):
    """The dim along which parts are blocks of the whole; None when they are the whole."""
    return next((d for d, (a, b) in enumerate(zip(one, several, strict=True)) if a != b), None)


def is_right(body: Body) -> bool:
    """Whether several devices together have what one has."""
    one, several = outcome(body)
    dim = split_dim(one.shape, several.shape[1:])
    want = np.stack([one] * N) if dim is None else np.stack(np.split(one, N, dim))
    return bool(np.allclose(several, want, rtol=1e-4, atol=1e-5))


# ---- the checker on random bodies ---------------------------------------------------------------

pytestmark = pytest.mark.laws

SEEDS = sliced(range(120), 1 / 3)


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def checked(body):
    """The report on a body whose out_specs say what its shapes do."""
    one, several = outcome(body)
    dim = split_dim(one.shape, several.shape[1:])
    outs = PS() if dim is None else PS(*([None] * dim), AXIS)
    mesh = AbstractMesh((N,), (AXIS,), axis_types=(AxisType.Auto,))
    region = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(body.specs.values()), out_specs=outs, check_vma=False
    )
    return sbp.check_shard_map(
        region, *(jax.ShapeDtypeStruct(s, jnp.float64) for s in SHAPES.values()), mesh=mesh
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_verdict_is_right(seed):
    body = draw_body(seed)
    if body is None:
        pytest.skip("nothing that was drawn fits together")
    report, right = checked(body), is_right(body)
    assert report.ok == right, f"{body}\n{report.text()}"


def test_the_draws_are_of_both_kinds():
    bodies = [b for b in map(draw_body, SEEDS) if b is not None]
    right = sum(map(is_right, bodies))
    assert len(bodies) > 5 / 6 * len(SEEDS) and 1 / 6 < right / len(bodies) < 5 / 6
    assert np.mean([len(b.steps) for b in bodies]) > 2
