"""`interface_of` against JAX: small loops and branches are run by hand, trip by trip, by the
positions that the interface gives, and must compute what JAX computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sbp.trace.build import trace
from sbp.trace.evaluate import evaluate
from sbp.trace.graph import Constant, Graph, Node
from sbp.trace.regions import amount, bodies_of, interface_of, trips_of

X = jnp.arange(12.0).reshape(4, 3) / 7
Y = jnp.arange(8.0).reshape(4, 2) - 3


def _two_of_each(a: Any, b: Any, p: Any, q: Any, xs: Any, ys: Any) -> Any:
    """Constants `a`, `b`; carries of different shapes, swapped roles; two stacked results."""

    def step(carry: Any, x: Any) -> Any:
        (u, v), (row, pair) = carry, x
        return (u * a + row, v + pair.sum() - b), (u - row, v * b)

    return lax.scan(step, (p, q), (xs, ys))


def _reverse(p: Any, xs: Any) -> Any:
    return lax.scan(lambda c, x: (c * 0.5 + x, c), p, xs, reverse=True)


def _carry_only(a: Any, p: Any) -> Any:
    return lax.scan(lambda c, _: (c * a + 1, None), p, None, length=5)[0]


def _stacks_only(a: Any, xs: Any) -> Any:
    return lax.scan(lambda c, x: (c, x + a), None, xs)[1]


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


def _while_without_constants(i: Any) -> Any:
    return lax.while_loop(lambda c: c < 20, lambda c: c * 2 + 1, i)


def _branches(k: Any, x: Any, y: Any) -> Any:
    return lax.switch(
        k,
        [lambda x, y: (x + y, x), lambda x, y: (x - y, y), lambda x, y: (x * y, x - 1)],
        x,
        y,
    )


def _predicated(flag: Any, x: Any) -> Any:
    return lax.cond(flag, lambda x: x * 3, lambda x: -x, x)


F = jnp.float32
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "two of each": (_two_of_each, (F(1.5), F(0.25), X[0], F(4), X, Y)),
    "reverse": (_reverse, (X[1], X)),
    "carry only": (_carry_only, (F(1.25), F(3))),
    "stacks only": (_stacks_only, (F(2), X)),
    "nested": (_nested, (F(0.5), X)),
    "while": (_while, (F(9), F(2), F(1.5), F(0), F(3))),
    "while without constants": (_while_without_constants, (jnp.int32(1),)),
    "branch 0": (_branches, (jnp.int32(0), F(2), F(5))),
    "branch 2": (_branches, (jnp.int32(2), F(2), F(5))),
    "true": (_predicated, (jnp.bool_(True), F(2))),
    "false": (_predicated, (jnp.bool_(False), F(2))),
}


def _by_positions(graph: Graph, args: Sequence[Any]) -> list[Any]:
    """Runs a graph; its loops and branches in Python, by nothing but positions of the interface."""
    env: dict[int, Any] = dict(zip(graph.inputs, args, strict=True))

    def read(operand: Any) -> Any:
        return operand.value if isinstance(operand, Constant) else env[operand]

    for node in graph.nodes:
        values = [read(o) for o in node.inputs]
        if node.regions:
            results = _run_node(node, values)
        else:
            one = Graph(
                inputs=tuple(range(-1, -1 - len(values), -1)),
                outputs=node.outputs,
                nodes=(_on(node, tuple(range(-1, -1 - len(values), -1))),),
                avals=graph.avals,
            )
            results = evaluate(one, values)
        env.update(zip(node.outputs, results, strict=True))
    return [read(o) for o in graph.outputs]


def _on(node: Node, inputs: tuple[int, ...]) -> Node:

    return dataclasses.replace(node, inputs=inputs)


def _run_node(node: Node, values: list[Any]) -> list[Any]:
    match node.op:
        case "scan":
            return _run_scan(node, values)
        case "while":
            return _run_while(node, values)
        case _:
            (chooses,) = [e for e in interface_of(node).entries if e.kind == "predicate"]
            return _leave(node, *_one_trip(node, int(values[chooses.operand]), values, {}, 0))


def _one_trip(
    node: Node, region: int, values: list[Any], carries: dict[int, Any], trip: int
) -> tuple[int, list[Any]]:
    """A region's outputs; what enters is placed input by input, in no particular order."""
    inputs: dict[int, Any] = {}
    for entry in reversed(interface_of(node).entries):
        for where, position in entry.inputs:
            if where == region:
                assert position not in inputs
                outside = values[entry.operand]
                inputs[position] = {
                    "constant": lambda v=outside: v,
                    "carry": lambda e=entry, v=outside: carries.get(e.operand, v),
                    "slice": lambda v=outside: v[trip],
                }[entry.kind]()
    body = node.regions[region]
    assert sorted(inputs) == list(range(len(body.inputs)))
    return region, _by_positions(body, [inputs[i] for i in range(len(body.inputs))])


def _leave(node: Node, region: int, outputs: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    for left in interface_of(node).exits:
        if left.region == region and left.result >= 0:
            results[left.result] = outputs[left.output]
    return [results[i] for i in range(len(node.outputs))]


def _run_scan(node: Node, values: list[Any]) -> list[Any]:
    interface, length = interface_of(node), int(node.params["length"])
    order = range(length - 1, -1, -1) if node.params["reverse"] else range(length)
    carries: dict[int, Any] = {}
    stacks: dict[int, dict[int, Any]] = {
        e.result: {} for e in interface.exits if e.kind == "stacked"
    }
    for trip in order:
        _, outputs = _one_trip(node, 0, values, carries, trip)
        for left in interface.exits:
            if left.kind == "carry":
                assert left.entry is not None
                carries[left.entry.operand] = outputs[left.output]
            else:
                stacks[left.result][trip] = outputs[left.output]
    results = {e.result: carries[e.operand] for e in interface.entries if e.kind == "carry"}
    results |= {r: jnp.stack([found[t] for t in range(length)]) for r, found in stacks.items()}
    return [results[i] for i in range(len(node.outputs))]


def _run_while(node: Node, values: list[Any]) -> list[Any]:
    interface = interface_of(node)
    (goes_on,) = [e for e in interface.exits if e.kind == "predicate"]
    carries: dict[int, Any] = {}
    while _one_trip(node, goes_on.region, values, carries, 0)[1][goes_on.output]:
        _, outputs = _one_trip(node, 1, values, carries, 0)
        for left in interface.leaving(1):
            assert left.entry is not None
            carries[left.entry.operand] = outputs[left.output]
    results = {
        e.result: carries.get(e.operand, values[e.operand])
        for e in interface.entries
        if e.kind == "carry"
    }
    return [results[i] for i in range(len(node.outputs))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_positions_compute_what_jax_computes(name: str) -> None:
    fn, args = PROGRAMS[name]
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    assert any(node.regions for node in graph.nodes)
    expected = jax.tree.leaves(fn(*args))
    for found in (_by_positions(graph, args), evaluate(graph, args)):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operand_input_output_and_result_is_named_once(name: str) -> None:
    fn, args = PROGRAMS[name]
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    for node in graph.walk():
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
    fn, args = PROGRAMS["while"]
    graph, _ = trace(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    (node,) = [n for n in graph.nodes if n.op == "while"]
    interface = interface_of(node)
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
    def node_of(name: str) -> Node:
        fn, args = PROGRAMS[name]
        graph, _ = trace(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
        return next(n for n in graph.nodes if n.regions)

    assert amount(node_of("reverse"), [3.0]) == 4 * 3
    assert amount(node_of("while"), [1.0, 2.0]) == trips_of(node_of("while")) * 3
    assert amount(node_of("branch 0"), [1.0, 5.0, 2.0]) == 5
