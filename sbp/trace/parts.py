"""Slices of values and copies of scalars, one after the other along a dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.trace.slices import Cut


@dataclass(frozen=True, slots=True)
class Slice:
    """Neighbouring elements of a value along a dim; of a scalar, copies.

    Arguments:
      source: the value.
      start: the first element.
      size: number of elements.
      is_cut: whether an operation of the program cut it out of a longer value.
    """

    source: Operand
    start: Any
    size: Any
    is_cut: bool = False


def within(parts: Sequence[Slice], cut: Cut) -> list[Slice]:
    """What a cut takes of each of some parts that lie one after the other."""
    slices, at = [], 0
    for part in parts:
        low, high = max(cut[0] - at, 0), min(cut[1] - at, part.size)
        if low < high:
            is_cut = part.is_cut or high - low < part.size
            slices.append(Slice(part.source, part.start + low, high - low, is_cut))
        at += part.size
    return slices


@dataclass(frozen=True, slots=True)
class PaddedSlice:
    """A slice between copies of a scalar.

    Arguments:
      dim: the dim.
      low: copies before the slice.
      body: the slice.
      high: copies after it.
      value: the scalar.
    """

    dim: int
    low: Any
    body: Slice
    high: Any
    value: Operand


def summed(pads: Sequence[PaddedSlice]) -> tuple[int, list[Slice]]:
    """The slices of a pad, or of the sum of two pads with zeros; none where the slices of the two
    overlap."""
    first, last = pads[0], pads[-1]
    if len(pads) == 2:
        if first.dim != last.dim:
            return first.dim, []
        if not at_most(first.low + first.body.size, last.low):
            first, last = last, first
        if not at_most(first.low + first.body.size, last.low):
            return first.dim, []

    def copies(size: Any) -> Slice:
        return Slice(first.value, 0, size)

    between = [copies(last.low - first.low - first.body.size), last.body] if len(pads) == 2 else []
    slices = [copies(first.low), first.body, *between, copies(last.high)]
    return first.dim, [s for s in slices if s.size != 0]


def is_zero(operand: Operand) -> bool:
    """Whether an operand is the constant zero."""
    return isinstance(operand, Constant) and not np.any(np.asarray(operand.value))


def plain(size: Any) -> Any:
    """A NumPy integer as a Python integer; a symbolic size unchanged."""
    return int(size) if isinstance(size, np.integer) else size


def at_most(a: Any, b: Any) -> bool:
    """Whether a <= b; False where symbolic sizes do not say."""
    try:
        return bool(a <= b)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def is_most(size: Any, of: Any) -> bool:
    """Whether a size is all of another one but 1, or more than half of it; for symbolic sizes also,
    whether it is all but a number."""
    left = of - size
    return (isinstance(left, int) and not isinstance(of, int)) or (
        at_most(left, 1) or at_most(left + 1, size)
    )


def with_single_pads(graph: Graph, inspected: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which a pad of several dims is several pads of one dim, if only slices read it, or
    sums that only slices read.

    Arguments:
      graph: the graph, without the nodes of its regions.
      inspected: values whose types the program asks for.
      ids: unused numbers of nodes.
    """
    others = {*inspected, *(o for o in graph.outputs if isinstance(o, int))}
    sliced: set[Operand] = set()
    for node in reversed(graph.nodes):
        is_sum = (
            node.op == "add_any" and node.outputs[0] in sliced and node.outputs[0] not in others
        )
        readers = sliced if is_sum or node.op in ("slice", "split") else others
        readers.update(o for o in node.inputs if isinstance(o, int))
    nodes: list[Node] = []
    for node in graph.nodes:
        is_sliced = node.op == "pad" and node.outputs[0] in sliced and node.outputs[0] not in others
        nodes += _single_pads(graph, node, ids) if is_sliced else [node]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _single_pads(graph: Graph, pad: Node, ids: Iterator[int]) -> list[Node]:
    """A pad as pads of one dim each, in the order of the dims."""
    config = [tuple(c) for c in pad.params["padding_config"]]
    dims = [d for d, c in enumerate(config) if c != (0, 0, 0)]
    nodes: list[Node] = []
    x, shape = pad.inputs[0], list(graph.aval(pad.inputs[0]).shape)
    for d in dims:
        (value,), number = pad.outputs, pad.id
        shape[d] = graph.avals[value].shape[d]
        if d != dims[-1]:
            value, number = max(graph.avals) + 1, next(ids)
            graph.avals[value] = graph.avals[pad.outputs[0]].update(shape=tuple(shape))
        own = tuple(c if e == d else (0, 0, 0) for e, c in enumerate(config))
        fields = {"inputs": (x, pad.inputs[1]), "outputs": (value,), "id": number}
        nodes.append(dataclasses.replace(pad, params={"padding_config": own}, **fields))
        x = value
    return nodes or [pad]
