"""Operations on shards for which no row fits: what the program shows of the reason.

Two operands split along different dims give each device one block of the one and one of the other.
An operand that every device cuts from the same place, or numbers from zero, does not belong to the
device's own shard. These are warnings. Where nothing of this is shown, a note says that the
operation takes the shards each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp.shardmap.distribution import Distribution, Doubt, DoubtKind, LocalValue
from sbp.shardmap.operators import joins, looks_up, slices_at
from sbp.shardmap.state import State
from sbp.signatures import traits_of
from sbp.trace.graph import Node
from sbp.types import B


def mismatch(
    state: State, node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution], axis: int
) -> Doubt:
    """The doubt about an operation on split operands that no row of its signature takes.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      given: their distributions on the mesh axis.
      axis: the mesh axis.
    """
    atoms = next((h.split,) for h in given if h.split)
    shown = None if joins(node) or looks_up(node) else _shown(state, node, ins, given, axis)
    if shown is not None:
        return Doubt(node, shown, "warning", axis=state.names[axis], atoms=atoms)
    kind = "with-whole" if any(h.split is None for h in given) else "each-shard"
    return Doubt(node, kind, axis=state.names[axis], atoms=atoms)


def _shown(
    state: State, node: Node, ins: Sequence[LocalValue], given: Sequence[Distribution], axis: int
) -> DoubtKind | None:
    """What the program shows of the reason; None for nothing."""
    whole = [i for i, h in enumerate(given) if B in h.atoms]
    if any(_same_block(state, node, i, state.sizes[axis]) for i in whole):
        return "same-block"
    if any(ins[i].numbered for i in whole):
        return "own-positions"
    split = [h.split for h in given if h.split]
    product = traits_of(node.op).contracts and len(split) > 1  # of rows and columns of others
    return "crossed" if product or len(set(split)) > 1 else None


def _same_block(state: State, node: Node, operand: int, n: int) -> bool:
    """Whether an operand is one of `n` blocks of a whole value, the same block on all devices."""
    at = state.maker(node.inputs[operand])
    while at is not None and (traits_of(at.op).carries or traits_of(at.op).elementwise):
        ranked = [o for o in at.inputs if state.graph.aval(o).shape]
        at = state.maker(ranked[0]) if len(ranked) == 1 else None
    if at is None or not traits_of(at.op).moves:
        return False
    whole, *places = at.inputs
    if places and not slices_at(at):
        return False
    before = state.graph.aval(whole).shape
    after = state.graph.avals[at.outputs[0]].shape
    if len(before) != len(after):
        return False
    cut = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    return len(cut) == 1 and cut[0][0] == n * cut[0][1]
