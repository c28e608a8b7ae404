"""The table of rows: operators with equal parameters share their rows, and rules are evaluated once
for each kind of equation and mesh axis, however often the program repeats it.
`benchmarks/typing_speed.py` measures seconds."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from benchmarks.typing_speed import find_rows, traced
from sbp.infer.rows import RowTable
from sbp.signatures import Op, Row, Rule, rule_for
from sbp.trace.graph import Graph
from tests.infer.test_check import shape
from tests.infer.test_check import traced as request_of


def test_equal_operators_share_rows_and_others_do_not():
    program = lambda x, w: (x @ w, (x + 1.0) @ (w + 1.0), jnp.tanh(x @ w), x * w)
    request = request_of(program, [shape(16, 16)] * 2, AbstractMesh((4,), ("x",)), [None, None])
    graph, fresh = request.graph, lambda: RowTable(request.mesh)
    first, second, *_ = [n for n in graph.nodes if n.op == "dot_general"]
    (mul,), table = [n for n in graph.nodes if n.op == "mul"], fresh()
    assert first.params is not second.params
    assert table.rows_in(graph, first, {}) is table.rows_in(graph, second, {})
    # Two operators that have one dictionary of parameters are two.
    add = next(n for n in graph.nodes if n.op == "add")
    product = dataclasses.replace(mul, params=add.params)
    table.rows_in(graph, dataclasses.replace(add, inputs=mul.inputs), {})
    assert table.rows_in(graph, product, {}) == fresh().rows_in(graph, mul, {})


# ---- evaluations of rules ------------------------------------------------------------------------


def evaluations(monkeypatch: pytest.MonkeyPatch, graph: Graph, sizes: tuple[int, ...]) -> int:
    """How many times a rule is asked for rows."""
    asked: list[Op] = []

    def counted(name: str) -> Rule | None:
        found = rule_for(name)
        if found is None:
            return None

        def ask(op: Op) -> Sequence[Row]:
            asked.append(op)
            return found.rows(op)

        return dataclasses.replace(found, rows=ask)

    with monkeypatch.context() as patched:
        patched.setattr("sbp.infer.rows.rule_for", counted)
        find_rows(graph, sizes)
    return len(asked)


def nodes(graph: Graph) -> int:
    return sum(1 for _ in graph.walk())


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_layers_that_are_alike_share_their_rows(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    few, many = traced(alike=True, layers=3), traced(alike=True, layers=16)
    assert nodes(many) > 2000
    found = evaluations(monkeypatch, many, sizes)
    assert 0 < found < nodes(many)
    assert found == evaluations(monkeypatch, few, sizes)


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
def test_layers_of_their_own_widths_ask_less_often_than_they_have_nodes(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    graph = traced(alike=False)
    assert 0 < evaluations(monkeypatch, graph, sizes) < nodes(graph)
