"""Program -> the dtypes in which its sums over devices are added, where the user chose any."""

from __future__ import annotations

from collections import defaultdict

from sbp.infer.accumulation import is_real
from sbp.infer.space import encode
from sbp.plan.program import Program
from sbp.plan.traffic import sends
from sbp.report.parts import Column, Paragraph, Section, Table, TableRow
from sbp.report.wording import bytes_text, counted, listed, node_text
from sbp.signatures import ROUNDED_PARTS
from sbp.types import Unreduced

SHOWN_CASTS = 4
"""Casts that round parts are named up to this number, and counted beyond it."""

_SUM = encode(Unreduced("sum"))


def precision(program: Program) -> tuple[Section, ...]:
    """The sums of a plan by the dtype in which they are added, and the casts before them.

    Arguments:
      program: the plan.

    Returns:
      A section; none where the user chose no `reduce_dtype`, and where no float is summed.
    """
    graph, sums = program.graph, program.typing.sums
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for send in sends(program):
        step, planned = send.step, send.planned
        # An all-gather of blocks that were exchanged and added belongs to the same sum.
        if step and planned and send.reduces and send.kind != "all_gather":
            dtype = graph.avals[planned.box.target.value].dtype
            if step.source[step.mesh_axes[0]] == _SUM and is_real(dtype):
                wide = step.wide if step.wide and step.wide.dim is not None else None
                entry = found[str(dtype), wide.dtype if wide else f"{dtype}, by the platform"]
                entry[0] += planned.trips
                entry[1] += step.bytes_sent * planned.trips
    if not sums or not found:
        return ()
    columns = (
        Column(heading="parts"),
        Column(heading="added in"),
        Column(heading="runs", right=True),
        Column(heading="per device", right=True),
    )
    rows = tuple(
        TableRow(cells=(parts, how, str(int(runs)), bytes_text(sent)))
        for (parts, how), (runs, sent) in sorted(found.items())
    )
    parts = (Table(columns=columns, rows=rows), *_rounded(program))
    return (Section(title="precision of sums over devices", parts=parts),)


def _rounded(program: Program) -> tuple[Paragraph, ...]:
    """The casts that round parts before they are summed."""
    casts = [
        node_text(node)
        for node in program.graph.walk()
        if ROUNDED_PARTS.name in program.typing.rows[node.id].kernels
    ]
    if not casts:
        return ()
    what = counted(len(casts), "cast")
    where = listed(casts, SHOWN_CASTS)
    return (Paragraph(text=f"{what} of parts before their sum (`reduce_dtype`): {where}"),)
