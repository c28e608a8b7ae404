"""Blocks that each device takes by its own index: slices of a whole value, blocks written into one,
and values that an exchange brought from other devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sbp.shardmap.distribution import (
    UNKNOWN,
    Distribution,
    Exchanged,
    Fault,
    LocalValue,
    faulty,
)
from sbp.shardmap.operators import slices_at, writes_at
from sbp.shardmap.positions import own_block
from sbp.shardmap.state import State
from sbp.signatures import traits_of
from sbp.trace.graph import Node
from sbp.types import B, P, Split


def own_blocks(
    state: State, node: Node, ins: Sequence[LocalValue], found: list[Distribution]
) -> list[Distribution]:
    """The distributions of a block that begins at the index of its device, or of a value with such
    a block in it.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      found: the distributions of its result by its rows.
    """
    places = slices_at(node)
    if not places:
        return _scattered(node, ins, found) if writes_at(node) else found
    starts = [ins[i] for i in places]
    block = node.outputs[0] if places.start == 1 else node.inputs[1]
    sizes = state.graph.aval(block).shape
    given = list(found)
    for k, h in enumerate(ins[0].per_axis):
        own = own_block(state, starts, sizes, k)
        if own is None:
            continue
        dim, under = own
        if places.start == 1:
            given[k] = _read(node, h, dim, under) or found[k]
        else:
            given[k] = _written(node, ins, k, dim) or found[k]
    return given


def _by_axis(ins: Sequence[LocalValue]) -> Iterator[tuple[Distribution, ...]]:
    return zip(*(v.per_axis for v in ins), strict=True)


def _scattered(
    node: Node, ins: Sequence[LocalValue], found: list[Distribution]
) -> list[Distribution]:
    """A whole value in which each device writes elements at places of its own."""
    return [
        replace(h, rewritten=Fault("rewritten", node, atoms=(where.split,)))
        if h.unknown and B in whole.atoms and where.split and not ins[0].zero
        else h
        for h, (whole, where, _) in zip(found, _by_axis(ins), strict=True)
    ]


def _read(node: Node, h: Distribution, dim: int, under: frozenset[int]) -> Distribution | None:
    """Each device's own block of a value. Of a partial value each device has its own part of the
    block, and none has the parts of the others."""
    if h.partial and h.tag != "owned":
        return faulty(Fault("own-block", node, h.made, dim, (h.partial,)))
    if h.rewritten:
        return Distribution(frozenset({Split(dim)}), under=under)
    return replace(h, atoms=frozenset({Split(dim)}), under=under) if B in h.atoms else None


def _written(node: Node, ins: Sequence[LocalValue], axis: int, dim: int) -> Distribution | None:
    """A value in which each device writes its own block. Written into zeros, the blocks add up to
    the whole; in any other value the devices lack the blocks of one another."""
    whole, update = ins[0].per_axis[axis], ins[1].per_axis[axis]
    if update.fault:
        return faulty(update.fault)
    if not (update.unknown or Split(dim) in update.atoms) or not (
        B in whole.atoms or whole.rewritten
    ):
        return None
    if ins[0].zero:
        parts = replace(update, atoms=frozenset({P}), made=node, under=None, tag="owned")
        return parts if update.atoms else None
    return replace(UNKNOWN, rewritten=Fault("rewritten", node, atoms=(Split(dim),)))


# ---- exchanges ----------------------------------------------------------------------------------


def with_origin(
    state: State, node: Node, ins: Sequence[LocalValue], found: list[Distribution], axis: int
) -> list[Distribution]:
    """The results of a local operation with the split operands of the region that they depend on.

    A product of a value that an exchange brought from other devices, and of a value that depends on
    the same operands and stayed, is a fault where types do not show that the two fit: the devices
    have not got back what they sent. So is a lookup in the one at indices that are the other.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      found: its results.
      axis: the mesh axis.
    """
    given = [v.per_axis[axis] for v in ins]
    found = _moved(node, given, found)
    sources = frozenset().union(*(h.sources for h in given))
    away = next((h.away for h in given if h.away), None)
    if not sources and away is None:
        return found
    traits = traits_of(node.op)
    picks = traits.moves and traits.indices == range(1, 2)
    if away is not None and (traits.multiplies or picks) and not node.backward:
        ranks = [len(state.graph.aval(o).shape) for o in node.inputs]
        stayed = any(
            rank and not h.away and h.sources & away.sources
            for h, rank in zip(given, ranks, strict=True)
        )
        if stayed and all(h.unknown for h in found):
            sent = next(i for i, h in enumerate(given) if h.away)
            return [faulty(Fault("not-returned", node, away.node, sent))] * len(found)
    return [replace(h, sources=sources, away=away) for h in found]


def _moved(
    node: Node, given: Sequence[Distribution], found: list[Distribution]
) -> list[Distribution]:
    """Moved elements of a value in which each device has rewritten its own block."""
    traits = traits_of(node.op)
    rewritten = next((h.rewritten for h in given if h.rewritten), None)
    if rewritten is None or not (traits.moves or traits.carries):
        return found
    return [replace(h, rewritten=rewritten) if h.unknown else h for h in found]


def exchanged(node: Node, before: Distribution, after: Distribution) -> Distribution:
    """The result of an exchange with what it depends on; a second exchange brings it back."""
    if before.away is not None:
        sources = before.sources | before.away.sources
        return replace(after, sources=sources, away=None)
    away = Exchanged(node, before.sources) if before.sources else None
    return replace(after, sources=frozenset(), away=away)
