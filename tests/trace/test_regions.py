"""What enters and leaves the regions of loops and branches, which compute what JAX computes."""

from __future__ import annotations

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
