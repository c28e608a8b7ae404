"""What only `jax.vmap` makes: a `while` whose predicate depends on the mapped values, and
collectives over the mapped axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.trace.build import trace


def doubled(x: Any) -> Any:
    """Doubles until 10 is passed; the number of trips is the second result."""
    return lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] * 2, c[1] + 1), (x, 0))


def bounded(x: Any, bound: Any) -> Any:
    """Predicate and body read a value from outside of the loop, and the carry is a matrix."""
    return lax.while_loop(lambda c: jnp.sum(c) < bound, lambda c: c + bound * jnp.eye(2), x)


def drawn(key: Any) -> Any:
    """Draws until a number is above 0.5; the carry has a key."""
    draw = lambda c: (jax.random.split(c[0])[0], jax.random.uniform(c[0]))
    return lax.while_loop(lambda c: c[1] < 0.5, draw, (key, 0.0))[1]


X = np.arange(1, 9, dtype=np.float32)
KEYS = np.arange(8, dtype=np.uint32)

LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "trips": (jax.vmap(doubled), (X,)),
    "two batches": (jax.vmap(jax.vmap(doubled)), (X.reshape(8, 1) + X[:3],)),
    "values from outside": (jax.vmap(bounded), (np.ones((8, 2, 2), np.float32), 3 * X)),
    "one value from outside": (
        lambda x, b: jax.vmap(lambda y: bounded(y, b[0]))(x),
        (np.ones((8, 2, 2), np.float32) * X[:, None, None], 3 * X),
    ),
    "uneven": (lambda x: jax.vmap(doubled)(x[:7]), (X,)),
    "keys": (lambda seeds: jax.vmap(lambda s: drawn(jax.random.key(s)))(seeds), (KEYS,)),
    "in a scan": (
        lambda x: lax.scan(lambda c, _: (jax.vmap(doubled)(c)[0] / 3, None), x, length=3)[0],
        (X,),
    ),
}


@pytest.mark.parametrize("axes", [(2,), (8,), (2, 4)], ids=str)
@pytest.mark.parametrize("case", LOOPS)
def test_equals_one_device(case: str, axes: tuple[int, ...]) -> None:
    fn, args = LOOPS[case]
    mesh = jax.make_mesh(axes, ("x", "y")[: len(axes)])
    split = tuple(sbp.NdSbp({"x": sbp.S(0)}) for _ in args)
    for in_types in (None, split):
        found = sbp.jit(fn, mesh, in_types=in_types)(*args)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(fn)(*args))


def test_the_loop_keeps_the_line_and_has_one_predicate() -> None:
    graph, _ = trace(jax.vmap(doubled), [jax.ShapeDtypeStruct((8,), jnp.float32)])
    (loop,) = (n for n in graph.nodes if n.op == "while")
    assert loop.span is not None and loop.span.function == "doubled"
    cond, body = loop.regions
    assert [graph.avals[v].shape for v in cond.outputs if isinstance(v, int)] == [()]
    doubling = next(n for n in body.nodes if n.op == "mul")
    assert doubling.span is not None and doubling.span.file == __file__


def test_devices_agree_on_one_bit_a_trip() -> None:
    """With the batch split, nothing else is sent."""
    mesh = jax.make_mesh((8,), ("x",))
    f = sbp.jit(jax.vmap(doubled), mesh, in_types=("x:S(0)",), out_types=("x:S(0)", "x:S(0)"))
    plan = f.plan(jax.ShapeDtypeStruct((2**24,), jnp.float32))
    assert 0 < plan.cost.bytes_per_device < 1024


def over_batch(fn: Callable[..., Any], axis: str = "batch") -> Callable[..., Any]:
    return jax.vmap(fn, axis_name=axis)


ROWS = np.arange(7 * 8, dtype=np.float32).reshape(8, 7) / 8
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "sum": over_batch(lambda row: row - lax.psum(row, "batch")),
    "mean of scalars": over_batch(lambda row: row - lax.pmean(jnp.mean(row), "batch")),
    "several": over_batch(lambda row: lax.psum((row, row.sum(), 2), "batch")),
    "extremes": over_batch(lambda row: lax.pmax(row, "batch") - lax.pmin(row, "batch")),
    "a normalised gradient": jax.grad(
        lambda x: jnp.sum(over_batch(lambda row: row - lax.pmean(row, "batch"))(x) ** 3)
    ),
    "one of two": over_batch(over_batch(lambda x: x - lax.psum(x, "inner"), "inner")),
    "two": over_batch(over_batch(lambda x: x - lax.pmean(x, ("inner", "batch")), "inner")),
    "in a scan": lambda x: lax.scan(
        lambda c, _: (over_batch(lambda row: row - lax.pmean(row, "batch"))(c), None), x, length=2
    )[0],
}


@pytest.mark.parametrize("types", [None, "x:S(0)", "y:S(1)"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_over_the_mapped_axis(name: str, types: str | None) -> None:
    """Without a warning: the tests' settings make an error of one."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    x = jnp.asarray(ROWS if types != "y:S(1)" else ROWS[:, :4])
    found = sbp.jit(COLLECTIVES[name], mesh, in_types=(types,))(x)
    want = jax.jit(COLLECTIVES[name])(x)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    jax.tree.map(close, found, want)


def test_a_mean_over_the_mapped_axis_gathers_nothing() -> None:
    mesh = jax.make_mesh((8,), ("x",))
    norm = over_batch(lambda row: row - lax.pmean(row, "batch"))
    plan = sbp.jit(norm, mesh, "x:S(0)", "x:S(0)").plan(jnp.ones((64, 16)))
    assert plan.cost.bytes_per_device == 2 * 7 / 8 * 16 * 4
