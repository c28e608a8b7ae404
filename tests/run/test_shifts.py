"""Rolls, shifts and shifted pads along a split dim: one permute, on every mesh, in loops and in
gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from tests.hardware import SENDS_FREELY
from tests.run.test_collectives import assert_within_plan

NOTHING_ELSE = [
    sbp.forbid(kind) for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
]


def shifted(new: Any, x: Any) -> Any:
    return jnp.concatenate([new, x[:-1]])


def permutes(plan: sbp.Plan) -> list[float]:
    """The rounds of each operation of a plan that sends; all are permutes."""
    sent = [s for o, _ in plan.program.kernels() for _, s in o.sends]
    assert {s.kind for s in sent} <= {"permute"}
    return [s.rounds for s in sent]


def assert_runs(fn: Callable[..., Any], f: Any, *args: np.ndarray) -> None:
    for got, want in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("length", [1, 3])
def test_one_permute(n: int, length: int):
    """One stage per device, and several; the whole shard goes, or one element of it."""
    mesh = sbp.make_mesh((n,), ("x",))
    x = np.arange(n * length * 2, dtype=np.float32).reshape(n * length, 2)
    new = -np.ones((1, 2), np.float32)
    for fn, args, types in (
        (lambda x: jnp.roll(x, 1, 0), (x,), ("x:S(0)",)),
        (lambda x: jnp.roll(x, -1, 0), (x,), ("x:S(0)",)),
        (shifted, (new, x), ("B", "x:S(0)")),
        (lambda x: jnp.diff(x, axis=0, prepend=x[:1]), (x,), ("x:S(0)",)),
        (lambda x: lax.pad(x, np.float32(0), [(1, -1, 0), (0, 0, 0)]), (x,), ("x:S(0)",)),
    ):
        f = sbp.jit(
            fn,
            mesh,
            in_types=types,
            out_types="x:S(0)",
            hardware=SENDS_FREELY,
            budgets=NOTHING_ELSE,
        )
        plan = f.plan(*args)
        assert permutes(plan) == [1]
        assert plan.cost.bytes_per_device == 2 * 4
        assert_within_plan(plan, (n,))
        assert_runs(fn, f, *args)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_uneven_rolls(sizes: tuple[int, ...]):
    """Shards with padding, by a shift longer than a shard, along two dims."""
    names = ("x", "y")[: len(sizes)]
    split = " ".join(f"{name}:S({d})" for d, name in enumerate(names))
    mesh = sbp.make_mesh(sizes, names)

    def fn(x: Any) -> Any:
        x = sbp.annotate(x, split)
        rows = jnp.diff(x, axis=0, append=x[-1:] * 3)
        return sbp.annotate(jnp.roll(x, (5, -2), (0, 1)) + shifted(x[:1] * 2, x) + rows, split)

    x = np.arange(13 * 11, dtype=np.int32).reshape(13, 11)
    f = sbp.jit(fn, mesh, hardware=SENDS_FREELY)
    assert {"join_slices"} == {o.node.op for o, _ in f.plan(x).program.kernels()}
    np.testing.assert_array_equal(np.asarray(f(x)), np.asarray(fn(x)))


def pipeline(weights: Any, microbatches: Any) -> Any:
    """A pipeline as a buffer with one stage per device: each tick shifts it by one."""
    stages = weights.shape[0]
    buffer = jnp.zeros((stages, *microbatches.shape[1:]))

    def tick(state: Any, new: Any) -> tuple[Any, Any]:
        state = sbp.annotate(shifted(new[None], state), x=sbp.S(0))
        state = jnp.tanh(jnp.einsum("sbi,sij->sbj", state, weights))
        return state, state[-1]

    return jnp.mean(lax.scan(tick, buffer, microbatches)[1] ** 2)


def test_the_papers_pipeline():
    """Each tick shifts by one permute, forward and backward, under a budget that allows no other
    move of the buffer in a loop."""
    mesh = sbp.make_mesh((4,), ("x",))
    step = jax.value_and_grad(pipeline)
    rng = np.random.default_rng(0)
    weights, batches = rng.normal(size=(4, 6, 6)), rng.normal(size=(5, 3, 6))
    f = sbp.jit(
        step,
        mesh,
        in_types=("x:S(0)", "B"),
        out_types=("B", "x:S(0)"),
        hardware=SENDS_FREELY,
        budgets=[sbp.forbid(k, where="loop") for k in ("all_to_all", "all_gather")],
    )
    args = weights.astype(np.float32), batches.astype(np.float32)
    plan = f.plan(*args)
    shifts = [(o.node, times) for o, times in plan.program.kernels() if o.node.op == "join_slices"]
    assert permutes(plan) == [1, 1] and [times for _, times in shifts] == [5, 5]
    assert [node.backward for node, _ in shifts] == [False, True]
    assert_within_plan(plan, (4,))
    for got, want in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-6)


def stencil(x: Any) -> Any:
    """The sum of the four neighbours, zeros around."""
    p = jnp.pad(x, 1)
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]


def of_stencil(x: Any) -> Any:
    return jax.grad(lambda x: jnp.sum(stencil(x) ** 2))(x)


@pytest.mark.parametrize("fn", [stencil, of_stencil])
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_stencils(sizes: tuple[int, ...], fn: Callable[..., Any]):
    """Even and uneven; each neighbour receives one row or column."""
    mesh = sbp.make_mesh(sizes, ("x", "y", "z")[: len(sizes)])
    axes = dict(zip(mesh.axis_names, map(sbp.S, range(2)), strict=False))

    def split(x: Any) -> Any:
        return sbp.annotate(fn(sbp.annotate(x, **axes)), **axes)

    f = sbp.jit(split, mesh, hardware=SENDS_FREELY, budgets=NOTHING_ELSE[:1])
    for length in (16, 13):
        x = np.random.default_rng(length).normal(size=(length, length)).astype(np.float32)
        np.testing.assert_allclose(np.asarray(f(x)), np.asarray(fn(x)), rtol=1e-5, atol=1e-5)
    if sizes == (8,):
        g = sbp.jit(fn, mesh, in_types=("x:S(0)",), out_types="x:S(0)", hardware=SENDS_FREELY)
        rows = 2 if fn is stencil else 4
        plan = g.plan(jax.ShapeDtypeStruct((16, 16), np.float32))
        assert plan.cost.bytes_per_device == rows * 16 * 4
