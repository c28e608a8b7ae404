"""Divisions by hand whose number equals the count of a shard's own elements.

`(y - t) / y.size` and `x.T @ d / x.shape[0]` are traced with a number. Where it equals the local
count along a split dim, it may be that count, and then a sum over devices of what follows is as
many times too large as there are devices; or it is another number, and then it says nothing. The
program is analysed under both readings (`analyse`). It is right if it is right under one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sbp.shardmap.distribution import LocalValue
from sbp.shardmap.excess import close
from sbp.shardmap.operators import divides
from sbp.shardmap.state import Reading, State
from sbp.signatures import traits_of
from sbp.trace.collectives import SUMS, names_of
from sbp.trace.graph import Node
from sbp.types import B, P

LEAST = 3
"""The least number that is taken for a count of elements: halves and wholes are no evidence."""


def of_shard(
    state: State, node: Node, operand: LocalValue, divisor: float
) -> dict[int, int | None]:
    """The change of the excess by a division that the user wrote, if its number is read as a count
    of one shard's elements: +1 on the mesh axes that split the counted dims.

    Arguments:
      state: the region; `state.divisions.shards` gets the reading.
      node: the division.
      operand: what it divides.
      divisor: the number.
    """
    if not divides(node) or divisor < LEAST:
        return {}
    axes = _split_axes(state, node, operand, divisor) or _contracted(state, node, operand, divisor)
    if not axes or any(close(divisor, state.sizes[k]) for k in axes):
        return {}
    state.divisions.shards[node.id] = Reading(node, "elements", divisor)
    return dict.fromkeys(axes, 1) if node.id in state.divisions.counted else {}


def _split_axes(state: State, node: Node, operand: LocalValue, divisor: float) -> list[int]:
    """The mesh axes along which a split value is divided by the length of the split dim, or by the
    number of all its elements."""
    shape = state.graph.aval(node.inputs[0]).shape
    split = {k: h.split.dim for k, h in enumerate(operand.per_axis) if h.split and h.excess == 0}
    every = close(divisor, math.prod(shape))
    return [k for k, dim in split.items() if every or close(divisor, shape[dim])]


def _contracted(state: State, node: Node, operand: LocalValue, divisor: float) -> list[int]:
    """The mesh axes along which a product of matrices is divided by the length that one device
    contracts, or by one less."""
    at, over = state.maker(node.inputs[0]), set[int]()
    while at is not None and (at.op in SUMS or traits_of(at.op).carries):
        over |= set(state.axes_of(names_of(at)) if at.op in SUMS else ())
        at = state.maker(at.inputs[0])
    if at is None or not any(close(divisor, n) for n in _lengths(state, at)):
        return []
    return [
        k
        for k, h in enumerate(operand.per_axis)
        if h.made and h.excess == 0 and (B in h.atoms if k in over else h.partial == P)
    ]


def _lengths(state: State, node: Node) -> Iterator[float]:
    """The number of products that each element of a product of matrices adds up, and one less."""
    dims = node.params.get("dimension_numbers")
    if not traits_of(node.op).multiplies or not isinstance(dims, tuple):
        return
    shape = state.graph.aval(node.inputs[0]).shape
    ((contracted, _), _) = dims
    length = math.prod(shape[d] for d in contracted)
    yield from (length, length - 1)
