"""What enters and leaves the regions of loops and branches, which compute what JAX computes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Graph, Node
from sbp.trace.regions import amount, bodies_of, interface_of, trips_of

X = jnp.arange(12.0).reshape(4, 3) / 7
Y = jnp.arange(8.0).reshape(4, 2) - 3


def _two_of_each(a: Any, b: Any, p: Any, q: Any, xs: Any, ys: Any) -> Any:
    """Constants `a`, `b`; carries of different shapes, swapped roles; two stacked results."""

    def step(carry: Any, x: Any) -> Any:
        (u, v), (row, pair) = carry, x
        return (u * a + row, v + pair.sum() - b), (u - row, v * b)

    return lax.scan(step, (p, q), (xs, ys))


def _nested(a: Any, xs: Any) -> Any:
    def outer(c: Any, row: Any) -> Any:
        inner, ys = lax.scan(lambda d, x: (d + x * a, d), c, row)
        return inner, ys

    return lax.scan(outer, jnp.float32(2), xs)


def _while(limit: Any, add: Any, scale: Any, i: Any, x: Any) -> Any:
    """One constant of the predicate, two of the body, two carries."""
    return lax.while_loop(
        lambda c: c[0] < limit, lambda c: (c[0] + add, c[1] * scale - c[0]), (i, x)
    )


def _branches(k: Any, x: Any, y: Any) -> Any:
    return lax.switch(
        k,
        [lambda x, y: (x + y, x), lambda x, y: (x - y, y), lambda x, y: (x * y, x - 1)],
        x,
        y,
    )


F = jnp.float32
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two of each": (_two_of_each, (F(1.5), F(0.25), X[0], F(4), X, Y)),
    "reverse": (
        lambda p, xs: lax.scan(lambda c, x: (c * 0.5 + x, c), p, xs, reverse=True),
        (X[1], X),
    ),
    "carry only": (
        lambda a, p: lax.scan(lambda c, _: (c * a + 1, None), p, None, length=5)[0],
        (F(1.25), F(3)),
    ),
    "stacks only": (lambda a, xs: lax.scan(lambda c, x: (c, x + a), None, xs)[1], (F(2), X)),
    "nested": (_nested, (F(0.5), X)),
    "while": (_while, (F(9), F(2), F(1.5), F(0), F(3))),
    "while without constants": (
        lambda i: lax.while_loop(lambda c: c < 20, lambda c: c * 2 + 1, i),
        (jnp.int32(1),),
    ),
    "branch 0": (_branches, (jnp.int32(0), F(2), F(5))),
    "branch 2": (_branches, (jnp.int32(2), F(2), F(5))),
    "true": (
        lambda flag, x: lax.cond(flag, lambda x: x * 3, lambda x: -x, x),
        (jnp.bool_(True), F(2)),
    ),
    "false": (
        lambda flag, x: lax.cond(flag, lambda x: x * 3, lambda x: -x, x),
        (jnp.bool_(False), F(2)),
    ),
}


def graph_of(name: str) -> Graph:
    fn, args = PROGRAMS[name]
    return trace(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])[0]


def node_of(name: str) -> Node:
    """The loop or branch of a program."""
    return next(n for n in graph_of(name).nodes if n.regions)


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_and_branches_compute_what_jax_computes(name: str) -> None:
    """Evaluated, and planned and run on two devices."""
    fn, args = PROGRAMS[name]
    planned = sbp.jit(fn, sbp.make_mesh((2,), ("x",)))
    for found in (evaluate(graph_of(name), args), jax.tree.leaves(planned(*args))):
        for a, b in zip(found, jax.tree.leaves(fn(*args)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operand_input_output_and_result_is_named_once(name: str) -> None:
    for node in graph_of(name).walk():
        interface = interface_of(node)
        if not node.regions:
            assert not interface.entries and not interface.exits and not interface.fed
            assert bodies_of(node, 0) == []
            continue
        assert [e.operand for e in interface.entries] == list(range(len(node.inputs)))
        for number, region in enumerate(node.regions):
            assert len(interface.fed[number]) == len(region.inputs)
            for position, entry in enumerate(interface.fed[number]):
                assert (number, position) in entry.inputs
                assert (region, position) in bodies_of(node, entry.operand)
            assert [e.output for e in interface.leaving(number)] == list(range(len(region.outputs)))
        assert {e.result for e in interface.exits} - {-1} == set(range(len(node.outputs)))
        for result in range(len(node.outputs)):
            assert interface.exit_to(result).result == result


def test_numbers_count_within_a_kind_and_carries_return_to_their_entry() -> None:
    interface = interface_of(node_of("while"))
    assert [(e.kind, e.number, e.decides) for e in interface.entries] == [
        ("constant", 0, True),
        ("constant", 1, False),
        ("constant", 2, False),
        ("carry", 0, False),
        ("carry", 1, False),
    ]
    assert [e.kind for e in interface.exits] == ["predicate", "carry", "carry"]
    for left in interface.leaving(1):
        assert left.entry is interface.entering("carry")[left.number]
        assert left.entered(0) == 1 + left.number
        assert left.entered(1) == 2 + left.number


def test_an_amount_is_the_sum_over_trips_or_the_most_of_any_branch() -> None:
    assert amount(node_of("reverse"), [3.0]) == 4 * 3
    assert amount(node_of("while"), [1.0, 2.0]) == trips_of(node_of("while")) * 3
    assert amount(node_of("branch 0"), [1.0, 5.0, 2.0]) == 5


# ---- batched -------------------------------------------------------------------------------------
# What only `jax.vmap` makes: a `while` whose predicate depends on the mapped values, and
# collectives over the mapped axis.


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


VALUES = np.arange(1, 9, dtype=np.float32)
KEYS = np.arange(8, dtype=np.uint32)

LOOPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "trips": (jax.vmap(doubled), (VALUES,)),
    "two batches": (jax.vmap(jax.vmap(doubled)), (VALUES.reshape(8, 1) + VALUES[:3],)),
    "values from outside": (jax.vmap(bounded), (np.ones((8, 2, 2), np.float32), 3 * VALUES)),
    "one value from outside": (
        lambda x, b: jax.vmap(lambda y: bounded(y, b[0]))(x),
        (np.ones((8, 2, 2), np.float32) * VALUES[:, None, None], 3 * VALUES),
    ),
    "uneven": (lambda x: jax.vmap(doubled)(x[:7]), (VALUES,)),
    "keys": (lambda seeds: jax.vmap(lambda s: drawn(jax.random.key(s)))(seeds), (KEYS,)),
    "in a scan": (
        lambda x: lax.scan(lambda c, _: (jax.vmap(doubled)(c)[0] / 3, None), x, length=3)[0],
        (VALUES,),
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
