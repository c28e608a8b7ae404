"""Rules are evaluated once for each kind of equation and mesh axis, however often the program
repeats it. `benchmarks/typing_speed.py` measures seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from benchmarks.typing_speed import find_rows, traced
from sbp.infer import rows
from sbp.signatures import Op, Row, Rule, rule_for
from sbp.trace.graph import Graph


def evaluations(monkeypatch: pytest.MonkeyPatch, graph: Graph, sizes: tuple[int, ...]) -> int:
    """How many times a rule is asked for rows."""
    count = 0

    def counted(name: str) -> Rule | None:
        found = rule_for(name)
        if found is None:
            return None

        def ask(op: Op) -> Sequence[Row]:
            nonlocal count
            count += 1
            return found.rows(op)

        return dataclasses.replace(found, rows=ask)

    with monkeypatch.context() as patched:
        patched.setattr(rows, "rule_for", counted)
        find_rows(graph, sizes)
    return count


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
