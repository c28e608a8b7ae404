"""Schedule -> a picture: a lane for a device's own work and one for the links of each mesh axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sbp.plan.program import Program
from sbp.plan.traffic import PHASES, Phase
from sbp.report.flow_picture import COSTLY, PARTIAL, SPLIT, WHOLE
from sbp.report.parts import Column, Paragraph, Picture, Table, TableRow
from sbp.report.schedule import (
    OWN_LANE,
    Cause,
    Interval,
    LoopInterval,
    Schedule,
    cause_of,
    causes,
    lane_seconds,
    line_of,
    schedule,
)
from sbp.report.svg import CELL, Board, Ink
from sbp.report.wording import counted, seconds_text
from sbp.source.reader import shortened

SHOWN_WAITS = 12
"""Rows of the table of what takes longest; the others are folded."""

SHOWN_DEPTH = 3
"""Loops inside each other that have a line of their own."""

_NAME, _PLOT, _LANE, _BAND, _LOOP, _TOP, _TICKS, _KEY = (
    84.0,
    660.0,
    30.0,
    18.0,
    18.0,
    4.0,
    24.0,
    18.0,
)
_SEEN = 2.0
"""Pixels from which an interval has a box of its own; shorter ones share the boxes of columns."""

_SHADES = 4


def timeline_picture(program: Program) -> Picture:
    """The modelled step in time.

    Arguments:
      program: the plan.
    """
    found = schedule(program)
    caption = _caption(program, found)
    if not found.seconds:
        nothing = Paragraph(text="no operation of it has a modelled time")
        return Picture(caption=caption, svg=Board(1, 1).svg(caption), instead=(nothing,))
    board = _Drawing(program, found).board()
    tables = (_lanes_table(program, found), _causes_table(program, found))
    return Picture(caption=caption, svg=board.svg(caption), instead=tables)


def _caption(program: Program, found: Schedule) -> str:
    text = f"the modelled step in time: {seconds_text(found.seconds)}"
    links = sum(i.waited for i in found.intervals if i.axes)
    beside = sum(i.seconds - i.waited for i in found.intervals)
    if links:
        text += f", {links / found.seconds:.0%} of it waiting for collectives"
    text += ". All is the critical path"
    text += f", but {seconds_text(beside)} of exchanges beside products" if beside else ""
    text += "; compilers may overlap more"
    most = _longest(found)
    if most is not None:
        share = f"{most.seconds / found.seconds:.0%}"
        axes = ", ".join(program.mesh.names[k] for k in most.axes)
        text += f". The longest collective, {share}: {most.what} over {axes} for {_of(most)}"
    if any(loop.assumed for loop in found.loops):
        text += ". How often a while loop runs is assumed"
    if found.branches:
        text += ". Each branch of a conditional has an equal part of a run"
    if found.by_hand:
        regions = counted(found.by_hand, "region")
        text += f". {regions} written by hand: only the time of reading and writing is modelled"
    return f"{text}. Hardware {program.mesh.hardware.name}; nothing was measured."


def _longest(found: Schedule) -> Cause | None:
    """The collective that the step waits for longest."""
    return next((c for c in causes(found) if c.axes), None)


def _of(cause: Cause) -> str:
    place = cause.where or cause.text
    return f"the gradient of {place}" if cause.phase == "backward" else place


def draw_phases(board: Board, ends: Iterable[tuple[Phase, float, float]], top: float) -> None:
    """Draws the passes along the top of a picture, with their names where these have room.

    Arguments:
      board: what is drawn on.
      ends: what stands in the picture from left to right: its pass, and where it begins and ends.
      top: the height of their upper edge.
    """
    joined: list[tuple[Phase, float, float]] = []
    for phase, left, right in ends:
        if joined and joined[-1][0] == phase:
            joined[-1] = (phase, joined[-1][1], max(right, joined[-1][2]))
        else:
            joined.append((phase, left, right))
    for phase, left, right in joined:
        if right - left < 1:
            continue
        shade = Ink(opacity=0.08 * (1 + PHASES.index(phase)), width=0)
        board.rect((left, top), (right - left, _BAND - 4), shade, title=phase)
        if right - left > CELL * (len(phase) + 1):
            board.text(((left + right) / 2, top + 11), phase, anchor="middle", title=phase)


class _Drawing:
    """The drawing of a schedule.

    Arguments:
      program: the plan.
      found: its schedule.
    """

    def __init__(self, program: Program, found: Schedule) -> None:
        self.program, self.found = program, found
        used = sorted({k for i in found.intervals for k in i.axes})
        self.lanes: list[int | None] = [None, *used]
        self.depth = min(SHOWN_DEPTH, max((loop.depth + 1 for loop in found.loops), default=0))
        most = _longest(found)
        self.longest = most and most._replace(runs=0.0, seconds=0.0)

    def board(self) -> Board:
        """The drawing."""
        lanes = _TOP + _BAND + _LANE * len(self.lanes)
        board = Board(_NAME + _PLOT + 4, lanes + _LOOP * self.depth + _TICKS + _KEY)
        own = [i for i in self.found.intervals if i.waited]
        ends: list[tuple[Phase, float, float]] = [
            (i.phase, self._x(i.start), self._x(i.start + i.seconds)) for i in own
        ]
        draw_phases(board, ends, _TOP)
        for number, lane in enumerate(self.lanes):
            top = _TOP + _BAND + _LANE * number
            name = OWN_LANE if lane is None else self.program.mesh.names[lane]
            room = int((_NAME - 8) / CELL)
            board.text((4, top + 19), shortened(name, room), Ink(bold=True), title=name)
            board.line([(_NAME, top + _LANE), (_NAME + _PLOT, top + _LANE)], Ink(width=0.3))
            self._lane(board, lane, top)
        for loop in self.found.loops:
            if loop.depth < self.depth:
                self._loop(board, loop, lanes + _LOOP * loop.depth)
        below = lanes + _LOOP * self.depth
        self._ticks(board, below)
        self._key(board, below + _TICKS)
        return board

    def _color(self, interval: Interval) -> str:
        if interval.axes:
            return (
                COSTLY if self.longest and cause_of(interval)[:5] == self.longest[:5] else PARTIAL
            )
        return SPLIT if interval.bound == "compute" else WHOLE

    def _x(self, seconds: float) -> float:
        return _NAME + _PLOT * seconds / self.found.seconds

    def _lane(self, board: Board, lane: int | None, top: float) -> None:
        own = [i for i in self.found.intervals if (lane in i.axes if i.axes else lane is None)]
        small = list[Interval]()
        for one in own:
            left, right = self._x(one.start), self._x(one.start + one.seconds)
            if right - left < _SEEN:
                small.append(one)
                continue
            color = self._color(one)
            size = (right - left, _LANE - 6)
            ink = Ink(color=color, opacity=0.35, width=0.5, dashed=one.waited < one.seconds)
            text, where = line_of(one)
            told = f"{one.what}, {one.phase}: {seconds_text(one.seconds)}. {text} {where}".strip()
            if one.waited < one.seconds:
                told += f". {seconds_text(one.seconds - one.waited)} of it beside the work"
            board.rect((left, top + 3), size, ink, title=told)
            if right - left > CELL * (len(one.what) + 1):
                board.text(((left + right) / 2, top + 19), one.what, anchor="middle", title=told)
        self._columns(board, small, top)

    def _columns(self, board: Board, small: Sequence[Interval], top: float) -> None:
        """Short intervals: the share of each column of pixels that they fill."""
        filled: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for one in small:
            left, right = self._x(one.start) - _NAME, self._x(one.start + one.seconds) - _NAME
            first, last = int(left), int(right)
            for column in range(first, last + 1):
                share = min(right, column + 1) - max(left, column)
                filled[self._color(one)][column] += max(0.0, share)
        for color, shares in filled.items():
            shades = {c: min(_SHADES, round(_SHADES * s + 0.4)) for c, s in shares.items()}
            start = None
            for column in sorted(shades):
                if start is None:
                    start = column
                if shades.get(column + 1) != shades[column]:
                    width, shade = column + 1 - start, shades[column]
                    if shade:
                        ink = Ink(color=color, opacity=0.35 * shade / _SHADES, width=0)
                        size = (float(width), _LANE - 6)
                        board.rect((_NAME + start, top + 3), size, ink, title="short operations")
                    start = None

    def _loop(self, board: Board, loop: LoopInterval, top: float) -> None:
        left, right = self._x(loop.start), self._x(loop.start + loop.seconds)
        if right - left < _SEEN:
            return
        assumed = " (assumed)" if loop.assumed else ""
        each = ", in each of the runs around it" if loop.depth else ""
        label = f"all {loop.trips} runs{assumed} of {loop.node.name}{each}"
        told = f"{label}: {seconds_text(loop.seconds)}"
        corners = [(left, top + 2), (left, top + 6), (right, top + 6), (right, top + 2)]
        board.line(corners, Ink(width=0.8), title=told)
        if right - left > CELL * len(label):
            board.text(((left + right) / 2, top + 17), label, anchor="middle", title=told)

    def _ticks(self, board: Board, top: float) -> None:
        for part in range(5):
            x = _NAME + _PLOT * part / 4
            board.line([(x, top), (x, top + 4)], Ink(width=0.8))
            anchor = "start" if part == 0 else "end" if part == 4 else "middle"
            text = seconds_text(self.found.seconds * part / 4) if part else "0"
            board.text((x, top + 17), text, anchor=anchor)

    def _key(self, board: Board, top: float) -> None:
        """What the colours mean."""
        links = any(i.axes for i in self.found.intervals)
        beside = any(i.waited < i.seconds for i in self.found.intervals)
        said = [(SPLIT, "bound by products", False), (WHOLE, "by memory", False)]
        said += [(PARTIAL, "collectives", False)] * links
        said += [(COSTLY, "the longest", False)] * (self.longest is not None)
        said += [(PARTIAL, "beside products", True)] * beside
        x = _NAME
        for color, text, dashed in said:
            ink = Ink(color=color, opacity=0.35, width=0.5, dashed=dashed)
            board.rect((x, top + 4), (11, 11), ink)
            board.text((x + 16, top + 14), text)
            x += 16 + CELL * (len(text) + 3)


def _lanes_table(program: Program, found: Schedule) -> Table:
    sums = lane_seconds(program, found)
    shown: list[Phase] = [p for p in PHASES if any(row[p] for row in sums.values())]
    columns = (
        Column(heading="lane", wraps=True),
        *(Column(heading=p, right=True, wraps=True) for p in (*shown, "sum")),
    )

    def cell(seconds: float) -> str:
        return seconds_text(seconds) if seconds else "-"

    rows = tuple(
        TableRow(cells=(lane, *(cell(row[p]) for p in shown), cell(sum(row.values()))))
        for lane, row in sums.items()
    )
    return Table(columns=columns, rows=rows)


def _causes_table(program: Program, found: Schedule) -> Table:
    columns = (
        Column(heading="longest", wraps=True),
        Column(heading="line", wraps=True),
        Column(heading="pass", wraps=True),
        Column(heading="runs", right=True),
        Column(heading="modelled", right=True, wraps=True),
        Column(heading="share", right=True),
    )
    rows = tuple(
        TableRow(
            cells=(
                " ".join([one.what, *(program.mesh.names[k] for k in one.axes)]),
                one.where or one.text,
                one.phase,
                f"{one.runs:g}",
                seconds_text(one.seconds),
                f"{one.seconds / found.seconds:.1%}",
            )
        )
        for one in causes(found)
    )
    rest = rows[SHOWN_WAITS:]
    return Table(
        columns=columns,
        rows=rows[:SHOWN_WAITS],
        folded=rest,
        rest=f"and {counted(len(rest), 'shorter one')}" if rest else "",
    )
