"""The monoids under which each value of a program can be partial without a conversion to
partial."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from sbp.annotations import Pin
from sbp.infer.flow import Edge, Flow
from sbp.infer.rows import EMPTY, PartialRow, RowTable, worth_having
from sbp.signatures.region import REGION_OPS
from sbp.trace.graph import Node
from sbp.types import Unreduced


def native_partials(
    flow: Flow,
    table: RowTable,
    seeds: Mapping[int, frozenset[str]],
    rounding: Container[int] = (),
) -> Mapping[int, frozenset[str]]:
    """For each value, the monoids under which some row yields it partial, or a partial value
    reaches it. It is the least fixpoint over the edges.

    Arguments:
      flow: the program's decisions and edges.
      table: the rows.
      seeds: for each input that is pinned partial, its monoids.
      rounding: the ids of casts that may round the parts of a sum.
    """
    graph, native = flow.graph, dict(seeds)
    positions = {n: k for k, n in enumerate(table.mesh.sizes) if n > 1}
    if not positions:
        return native
    into = flow.into()
    readers: dict[int, set[int]] = defaultdict(set)
    for edge in flow.edges:
        if isinstance(edge.operand, int) and edge.kind != "output":
            readers[edge.operand].add(edge.end.variable)
    every, waiting = range(len(table.mesh.sizes)), list(range(len(flow.decisions)))
    queued = set(waiting)
    while waiting:
        number = heapq.heappop(waiting)
        queued.discard(number)
        decision, given = flow.decisions[number], [_native_of(native, e) for e in into[number]]
        if decision.kind == "row":
            assert decision.node is not None
            node = decision.node
            ins = [graph.aval(o) for o in node.inputs]
            outs = [graph.avals[o] for o in node.outputs]
            axes = every if node.op in REGION_OPS else positions.values()
            rows = (
                row
                for k in axes
                for row in table.partial_rows(node, ins, outs, k, node.id in rounding)
            )
            found = _native_of_rows(node, rows, given)
        else:
            found = {v: _pinned_partial(decision.node).union(*given) for v in decision.makes}
        for value, monoids in found.items():
            old = native.get(value, EMPTY)
            if not monoids <= old:
                native[value] = old | monoids
                for reader in readers[value] - queued:
                    queued.add(reader)
                    heapq.heappush(waiting, reader)
    return native


def _native_of(native: Mapping[int, frozenset[str]], edge: Edge) -> frozenset[str]:
    """The monoids of the value that an edge reads. An output whose type is tied to an input does
    not make the input partial, so it has none."""
    if isinstance(edge.operand, int) and edge.kind != "output":
        return native.get(edge.operand, EMPTY)
    return EMPTY


def _pinned_partial(node: Node | None) -> frozenset[str]:
    """The monoids under which an annotation pins its value partial."""
    pin: Pin | None = node.params.get("pin") if node is not None else None
    if pin is None:
        return EMPTY
    return frozenset(a.monoid for a in pin.type.values() if isinstance(a, Unreduced))


def _native_of_rows(
    node: Node, rows: Iterable[PartialRow], given: Sequence[frozenset[str]]
) -> dict[int, frozenset[str]]:
    """For each result of a node, the monoids under which rows yield it partial.

    Arguments:
      node: the node.
      rows: its rows with a partial result, of all mesh axes.
      given: for each operand, the monoids under which it can be partial.
    """
    found: dict[int, frozenset[str]] = defaultdict(frozenset)
    for row in rows:
        if worth_having(row.ins, tuple(given)):
            for result, monoid in row.yields:
                found[node.outputs[result]] |= monoid
    return found
