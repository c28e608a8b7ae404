"""Live bytes -> a picture: what a device has in memory over program order, by class, with its peak
and its limit."""

from __future__ import annotations

from collections.abc import Sequence

from sbp.errors import bytes_text
from sbp.plan.ir import Loop
from sbp.plan.program import Program
from sbp.plan.traffic import Phase
from sbp.report.flow_picture import COSTLY, PARTIAL, SPLIT, WHOLE
from sbp.report.live_bytes import CLASSES, HeldTensor, LiveBytes, MemoryClass, live_bytes
from sbp.report.parts import Column, Paragraph, Picture, Table, TableRow
from sbp.report.svg import CELL, Board, Ink, Point
from sbp.report.timeline_picture import draw_phases
from sbp.report.wording import counted, times_text
from sbp.source.reader import shortened
from sbp.trace.regions import LOOPS

SHOWN_HELD = 12
"""Tensors that the table of the peak shows; the others are folded."""

COLORS: dict[MemoryClass, str] = {
    "weights": SPLIT,
    "optimiser": "#8b5cf6",
    "other arguments": WHOLE,
    "results": "#14b8a6",
    "copies of weights": "#0ea5e9",
    "activations": PARTIAL,
    "gradients": "#ec4899",
    "temporaries": "#84cc16",
    "gaps": WHOLE,
}

MIN_SHARE = 0.001
"""Share of the limit from which it is told with a digit."""

DRAWN_LIMIT = 2.0
"""Times the peak up to which the line of the limit is in the picture."""

_NAME, _PLOT, _TALL, _TOP, _KEY = 84.0, 660.0, 180.0, 22.0, 18.0
_KEYS = 3
"""Classes of the key in a row."""


def memory_picture(program: Program) -> Picture:
    """What a device has in memory over program order.

    Arguments:
      program: the plan.
    """
    found = live_bytes(program)
    caption = _caption(program, found)
    if not found.peak.total:
        nothing = Paragraph(text="it holds nothing")
        return Picture(caption=caption, svg=Board(1, 1).svg(caption), instead=(nothing,))
    tables = (_class_table(found), _held_table(found.held))
    return Picture(caption=caption, svg=_drawing(found).svg(caption), instead=tables)


def _caption(program: Program, found: LiveBytes) -> str:
    peak, name = found.peak, program.mesh.hardware.name
    text = f"memory of one device over program order: at most {bytes_text(peak.total)}"
    if peak.what:
        text += ", in the update" if peak.phase == "update" else f", in the {peak.phase} pass"
        text += f", {peak.what} of {peak.where}" if peak.where else f", {peak.what}"
    share, limit = peak.total / found.limit, bytes_text(found.limit)
    text += f"; {share:.1%} of " if share >= MIN_SHARE else "; under 0.1% of "
    text += f"memory_limit, {limit}" if found.is_asked else f"the {limit} of hardware {name}"
    if found.host:
        text += f". {bytes_text(found.host)} of host memory are not in it"
    loops = any(isinstance(i, Loop) and i.node.op in LOOPS for i in program.block.instructions)
    return f"{text}. The body of a loop stands there once." if loops else f"{text}."


def _shows_limit(found: LiveBytes) -> bool:
    return found.limit <= DRAWN_LIMIT * found.peak.total


def _drawing(found: LiveBytes) -> Board:
    classes: list[MemoryClass] = [c for c in CLASSES if any(m.bytes.get(c) for m in found.moments)]
    peak = found.peak
    shows_limit = _shows_limit(found)
    most = 1.1 * (max(found.limit, peak.total) if shows_limit else peak.total)
    rows = -(-len(classes) // _KEYS)
    board = Board(_NAME + _PLOT + 4, _TOP + _TALL + 14 + _KEY * rows)
    wide, bottom = _PLOT / len(found.moments), _TOP + _TALL

    def y(bytes_: float) -> float:
        return bottom - _TALL * bytes_ / most

    ends: list[tuple[Phase, float, float]] = [
        (moment.phase, _NAME + wide * n, _NAME + wide * (n + 1))
        for n, moment in enumerate(found.moments)
    ]
    draw_phases(board, ends, 2)
    below = [0.0] * len(found.moments)
    for kind in classes:
        above = [b + m.bytes.get(kind, 0.0) for b, m in zip(below, found.moments, strict=True)]
        upper, lower = _steps(list(map(y, above)), wide), _steps(list(map(y, below)), wide)
        board.area([*upper, *reversed(lower)], _ink(kind), title=_told(found, kind))
        below = above
    for bytes_ in (0.0, peak.total / 2, peak.total):
        board.line([(_NAME - 4, y(bytes_)), (_NAME, y(bytes_))], Ink(width=0.8))
        told = bytes_text(bytes_) if bytes_ else "0"
        board.text((_NAME - 8, y(bytes_) + 4), told, anchor="end")
    board.line([(_NAME, _TOP), (_NAME, bottom), (_NAME + _PLOT, bottom)], Ink(width=0.8))
    at = _NAME + wide * (found.moments.index(peak) + 0.5)
    board.line([(at, y(peak.total)), (at, bottom)], Ink(dashed=True), title="the fullest moment")
    told = f"limit {bytes_text(found.limit)}"
    if shows_limit:
        corners = [(_NAME, y(found.limit)), (_NAME + _PLOT, y(found.limit))]
        board.line(corners, Ink(color=COSTLY, dashed=True, width=1.5), title=told)
    above = y(found.limit) - 4 if shows_limit else _TOP + 11
    board.text((_NAME + _PLOT, above), told if shows_limit else f"{told}, above", anchor="end")
    board.text((4, bottom + 22), "at the peak")
    _key(board, found, classes, bottom + 12)
    return board


def _ink(kind: MemoryClass) -> Ink:
    return Ink(color=COLORS[kind], opacity=0.2 if kind == "gaps" else 0.45, width=0)


def _told(found: LiveBytes, kind: MemoryClass) -> str:
    return f"{kind}: {bytes_text(found.peak.bytes.get(kind, 0.0))} at the peak"


def _steps(heights: Sequence[float], wide: float) -> list[Point]:
    """The corners of a line of steps from left to right."""
    found: list[Point] = []
    for n, height in enumerate(heights):
        ends = (_NAME + wide * n, height), (_NAME + wide * (n + 1), height)
        if found and found[-1][1] == height:
            found[-1] = ends[1]
        else:
            found.extend(ends)
    return found


def _key(board: Board, found: LiveBytes, classes: Sequence[MemoryClass], top: float) -> None:
    """The colours of the classes, with their bytes at the peak."""
    for number, kind in enumerate(classes):
        left = _NAME + _PLOT / _KEYS * (number % _KEYS)
        y = top + _KEY * (number // _KEYS)
        board.rect((left, y), (11, 11), _ink(kind))
        told = f"{kind} {bytes_text(found.peak.bytes.get(kind, 0.0))}"
        room = int((_PLOT / _KEYS - 20) / CELL)
        board.text((left + 16, y + 10), shortened(told, room), title=_told(found, kind))


def _class_table(found: LiveBytes) -> Table:
    peak = found.peak
    columns = (
        Column(heading="class", wraps=True),
        Column(heading="at the peak", right=True),
        Column(heading="share", right=True),
    )
    rows = tuple(
        TableRow(cells=(kind, bytes_text(size), f"{size / peak.total:.1%}"))
        for kind, size in peak.bytes.items()
        if size
    )
    return Table(columns=columns, rows=rows)


def _held_table(held: Sequence[HeldTensor]) -> Table:
    columns = (
        Column(heading="alive at the peak", wraps=True),
        Column(heading="class", wraps=True),
        Column(heading="shape", wraps=True),
        Column(heading="type", wraps=True),
        Column(heading="line", wraps=True),
        Column(heading="per device", right=True),
    )
    rows = tuple(
        TableRow(
            cells=(
                times_text(one.name, one.count),
                one.kind,
                one.shape,
                repr(one.type),
                one.where,
                bytes_text(one.bytes),
            )
        )
        for one in held
    )
    rest = rows[SHOWN_HELD:]
    size = bytes_text(sum(one.bytes for one in held[SHOWN_HELD:]))
    return Table(
        columns=columns,
        rows=rows[:SHOWN_HELD],
        folded=rest,
        rest=f"and {counted(len(rest), 'smaller one')}: {size}" if rest else "",
    )
