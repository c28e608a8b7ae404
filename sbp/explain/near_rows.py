"""The rows of a rule that come nearest to what arrives at a line."""

from __future__ import annotations

from collections.abc import Sequence

from sbp.errors import RuleRow
from sbp.explain.blame import BlamedFault
from sbp.explain.helps import Arriving
from sbp.explain.insertions import axis_rows
from sbp.infer.space import Code, encode
from sbp.trace.graph import Node

MAX_ROWS = 4
"""Rows of a rule that a diagnostic shows."""


def rule(fault: BlamedFault, node: Node) -> str:
    outs = [fault.names.value(v) or "result" for v in node.outputs]
    return f"{node.op} on one mesh axis ({', '.join(fault.names.shown(node))} -> {', '.join(outs)})"


def rows(fault: BlamedFault, node: Node, arriving: Arriving) -> tuple[RuleRow, ...]:
    """The rows nearest to what arrives: those that most operands of the sink fit, then those
    that a conversion brings about."""
    shown, n, made = (
        fault.names.shown(node),
        fault.request.mesh.sizes[fault.position],
        arriving.made,
    )
    conversions = fault.trials.system(fault.axis).conversions
    ends = {c.operand: c.convert for c in arriving.sink if c.convert}

    def fit(operand: int, wanted: Code) -> bool:
        """Whether an operand can be brought to what a row wants, under the policies and within
        the budgets of its reader."""
        end, aval = ends[operand], fault.request.graph.aval(node.inputs[operand])
        return any(conversions.allows(code, wanted, aval, end.rules) for code in made[operand])

    ranked: list[tuple[int, int, RuleRow]] = []
    for number, row in enumerate(axis_rows(fault.request, node, fault.position)):
        codes = {i: encode(row.ins[i]) for i in made}
        fits = [i for i in made if fit(i, codes[i])]
        rest = [i for i in made if i not in fits]
        if not rest:
            # none here: its dims are shorter than the axis is long, or a budget forbids what
            # its kernel sends
            continue
        remark, near = "", 0
        if fits:
            near = 2 * len(fits)
            remark = (
                f"{_sides(shown, fits)} {'fits' if len(fits) == 1 else 'fit'},"
                f" {_sides(shown, rest, fits)} "
            )
            remark += f"{'does' if len(rest) == 1 else 'do'} not"
        elif any(
            c > 0 and fault.request.graph.aval(node.inputs[i]).shape[c - 1] < n
            for i, c in codes.items()
        ):
            continue  # shorter than the axis
        elif all(encode(a) >= 0 for a in (*row.ins, *row.outs)):
            near, first = 1, rest[0]
            remark = f"after {_conversion(made[first][0], codes[first])}" if made[first] else ""
        row = RuleRow(
            inputs=tuple(map(repr, row.ins)), outputs=tuple(map(repr, row.outs)), remark=remark
        )
        ranked.append((-near, number, row))
    ranked.sort(key=lambda r: r[:2])
    near = [r for r in ranked if r[0] == ranked[0][0]]
    return tuple(r for _, _, r in near[:MAX_ROWS])


def _sides(shown: Sequence[str], operands: Sequence[int], beside: Sequence[int] = ()) -> str:
    """Operands by name; one value that stands on both sides by its side."""
    both = {shown[i] for i in operands} & {shown[i] for i in beside}
    if beside and both:
        return "the other side"
    return ", ".join(dict.fromkeys(shown[i] for i in operands))


def _conversion(source: Code, target: Code) -> str:
    """The collective that turns one atom into another."""
    if source < 0:
        return "an all-reduce" if target == 0 else "a reduce-scatter"
    return "an all-gather" if target == 0 else "an all-to-all"
