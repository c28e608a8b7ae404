"""Lookups of a device in its own shard, at places counted from the beginning of the shard: of those
that lie elsewhere it takes zero, so that the lookups of all devices add up.

With `here = ids - axis_index(axis) * n` and `mine = (0 <= here) & (here < n)`, the lookup
`where(mine, table[clip(here, 0, n - 1)], 0)` in a table whose rows are split is P(sum)
(Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp.shardmap.distribution import UNKNOWN, WHOLE, Distribution, LocalValue
from sbp.shardmap.operators import looks_up, selects
from sbp.signatures import traits_of
from sbp.trace.graph import Node
from sbp.types import B, P


def own_lookups(
    node: Node, ins: Sequence[LocalValue], found: Sequence[Distribution]
) -> list[Distribution]:
    """The distributions of an operation on places in a shard, or on what was found there.

    Arguments:
      node: the operation.
      ins: its operands.
      found: the distributions of its result by its rows.
    """
    return [
        _looked_up(node, ins, k) or h if h.unknown and (looks_up(node) or not h.doubt) else h
        for k, h in enumerate(found)
    ]


def _looked_up(node: Node, ins: Sequence[LocalValue], axis: int) -> Distribution | None:
    given, traits = [v.per_axis[axis] for v in ins], traits_of(node.op)
    places = [_is_place(v, axis) for v in ins]
    lookups = [h.tag == "looked-up" for h in given]
    if any(lookups):
        others = [v for v, is_lookup in zip(ins, lookups, strict=True) if not is_lookup]
        masked = (selects(node) and places[0]) or (traits.multiplies and any(places))
        rest = others[1:] if selects(node) else []
        if masked and all(v.zero for v in rest):
            made = next(h.made for h in given if h.tag == "looked-up")
            return replace(WHOLE, atoms=frozenset({P}), made=made, tag="owned")
        moved = traits.moves and lookups[0] and _are_whole(others, axis)
        return given[0] if moved or (traits.carries and lookups[0]) else None
    if not any(places):
        return None
    if traits.moves and traits.indices == range(1, 2) and len(ins) == 2 and given[0].split:
        return replace(UNKNOWN, tag="looked-up", made=node)
    others = [v for v, is_place in zip(ins, places, strict=True) if not is_place]
    follows = traits.elementwise or traits.moves or traits.carries
    return replace(UNKNOWN, tag="place") if follows and _are_whole(others, axis) else None


def _is_place(v: LocalValue, axis: int) -> bool:
    """Whether a value is a place in the device's own shard, or a test of one."""
    h = v.per_axis[axis]
    p = v.position
    indexed = p is not None and bool(p.axes[axis])
    counted = p is not None and p.term is not None  # less the places before the shard
    return (h.unknown and (h.tag == "place" or indexed)) or (indexed and counted)


def _are_whole(values: Sequence[LocalValue], axis: int) -> bool:
    return all(B in v.per_axis[axis].atoms for v in values)
