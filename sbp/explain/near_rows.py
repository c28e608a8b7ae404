"""The rows of a rule that come nearest to what arrives at a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbp.errors import RuleRow
from sbp.explain.blame import BlamedFault
from sbp.explain.frames import Frames
from sbp.explain.insertions import axis_rows
from sbp.explain.trials import Arriving
from sbp.infer.accumulation import allowing
from sbp.infer.space import Code, decode, encode
from sbp.trace.graph import Node
from sbp.types import P

_SUM = encode(P)


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRows:
    """The rows of a rule that come nearest to what arrives.

    Arguments:
      rows: the rows that are shown.
      unshown: the number of rows that come as near and are not shown.
    """

    rows: tuple[RuleRow, ...] = ()
    unshown: int = 0


def rule(fault: BlamedFault, node: Node) -> str:
    """The heading of a rule's rows: the operator with the names of its operands and results."""
    outs = [fault.names.value(v) or "result" for v in node.outputs]
    behind = ", dims of the batched arrays" if node.is_batched else ""
    operands = ", ".join(fault.names.shown(node))
    return f"{node.name} on one mesh axis ({operands} -> {', '.join(outs)}){behind}"


def near_rows(fault: BlamedFault, node: Node, arriving: Arriving) -> NearRows:
    """The rows nearest to what arrives: the rows that fit most operands; if no row fits any, the
    rows that a conversion reaches.

    Arguments:
      fault: the fault.
      node: where it shows.
      arriving: what arrives at the node's operands.
    """
    made = arriving.made
    conversions = fault.trials.system(fault.axis).conversions
    ends = {c.operand: c.convert for c in arriving.sink if c.convert}

    def fit(operand: int, wanted: Code) -> bool:
        """Whether the policies and the budgets of its reader let an operand be converted to what a
        row takes."""
        end, aval = ends[operand], fault.request.graph.aval(node.inputs[operand])
        return any(conversions.allows(code, wanted, aval, end.rules) for code in made[operand])

    ranked: list[tuple[int, int, RuleRow]] = []
    for number, row in enumerate(axis_rows(fault.request, node, fault.position)):
        codes = {i: encode(row.ins[i]) for i in made}
        fits = [i for i in made if fit(i, codes[i])]
        rest = [i for i in made if i not in fits]
        if not rest:
            # The row is impossible here: its dims are shorter than the mesh axis, or a budget
            # forbids what its kernel sends.
            continue
        remark, near = "", 0
        if fits:
            remark, near = _fit_text(fault.names.shown(node), fits, rest), 2 * len(fits)
        elif _is_short(fault, node, codes):
            continue
        elif all(encode(a) >= 0 for a in (*row.ins, *row.outs)):
            near, first = 1, rest[0]
            remark = f"after {_conversion(made[first][0], codes[first])}" if made[first] else ""
        ranked.append((-near, number, _shown_row(Frames(fault.names, node), row, remark)))
    dtype = allowing(fault.request.graph, node)
    if dtype and node.id not in fault.request.rounding and any(_SUM in c for c in made.values()):
        remark = f"only with reduce_dtype=jnp.{dtype}: the cast rounds each part"
        row = RuleRow(inputs=(repr(P),), outputs=(repr(P),), remark=remark)
        ranked.append((-1, len(ranked), row))
    ranked.sort(key=lambda r: r[:2])
    nearest = [row for near, _, row in ranked if near == ranked[0][0]]
    most = fault.trials.limits.rows
    return NearRows(rows=tuple(nearest[:most]), unshown=max(0, len(nearest) - most))


def _shown_row(frames: Frames, row: Any, remark: str) -> RuleRow:
    """A row in the dims of the user's line.

    Arguments:
      frames: the dims of the row's node.
      row: the row on one mesh axis.
      remark: how near it comes.
    """
    ins = (decode(frames.operand(i, encode(a))) for i, a in enumerate(row.ins))
    outs = (decode(frames.result(i, encode(a))) for i, a in enumerate(row.outs))
    return RuleRow(inputs=tuple(map(repr, ins)), outputs=tuple(map(repr, outs)), remark=remark)


def _is_short(fault: BlamedFault, node: Node, codes: Mapping[int, Code]) -> bool:
    """Whether a row splits a dim of an operand that is shorter than the mesh axis.

    Arguments:
      fault: the fault.
      node: the node of the row.
      codes: for each operand the code that the row takes.
    """
    n = fault.request.mesh.sizes[fault.position]
    return any(
        c > 0 and fault.request.graph.aval(node.inputs[i]).shape[c - 1] < n
        for i, c in codes.items()
    )


def _fit_text(shown: Sequence[str], fits: Sequence[int], rest: Sequence[int]) -> str:
    """Which operands fit a row and which do not.

    Arguments:
      shown: the names of the operands.
      fits: the operands that fit.
      rest: the operands that do not.
    """
    return (
        f"{_sides(shown, fits)} {'fits' if len(fits) == 1 else 'fit'},"
        f" {_sides(shown, rest, fits)} {'does' if len(rest) == 1 else 'do'} not"
    )


def _sides(shown: Sequence[str], operands: Sequence[int], beside: Sequence[int] = ()) -> str:
    """The names of some operands; "the other side" for a value that is also one of `beside`.

    Arguments:
      shown: the names of all operands.
      operands: the operands to name.
      beside: the operands that have been named.
    """
    both = {shown[i] for i in operands} & {shown[i] for i in beside}
    if beside and both:
        return "the other side"
    return ", ".join(dict.fromkeys(shown[i] for i in operands))


def _conversion(source: Code, target: Code) -> str:
    """The collective that turns one atom into another."""
    if source < 0:
        return "an all-reduce" if target == 0 else "a reduce-scatter"
    return "an all-gather" if target == 0 else "an all-to-all"
