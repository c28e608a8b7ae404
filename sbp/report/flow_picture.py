"""Flows -> a picture: each of the user's lines with the type that it makes, its gradient beside it,
and the collectives where they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sbp.errors import SbpError, bytes_text, nearest
from sbp.plan.program import Program
from sbp.plan.traffic import Send
from sbp.report.flows import Grouping, ProgramFlows, Stop, ValueFlow, folded, merge
from sbp.report.parts import Column, Paragraph, Picture, Share, Table, TableRow
from sbp.report.svg import CELL, Board, Ink
from sbp.report.wording import branches_text, counted, listed
from sbp.source.reader import shortened
from sbp.types import NdSbp, Split, Unreduced

MOST_ROWS = 160
"""Rows of a picture; those that send least are left out, and it says so."""

SPLIT, WHOLE, PARTIAL, COSTLY = "#3b82f6", "#8a8f98", "#f59e0b", "#dc2626"

_GUTTER, _BOX, _SENT, _GRADIENT = 56.0, 300.0, 196.0, 130.0
_GRADIENT_AT = _GUTTER + _BOX + _SENT + _GUTTER
"""Where the boxes of the backward pass begin, in pixels."""

_ROW, _LINE = 38.0, 15.0
_TRACKS = 7


@dataclass(slots=True)
class _Spot:
    """A place: its stop in the forward pass or the update, and in the backward pass."""

    left: Stop | None = None
    right: Stop | None = None
    top: float = 0.0

    @property
    def stops(self) -> Iterator[Stop]:
        yield from (s for s in (self.left, self.right) if s is not None)

    @property
    def height(self) -> float:
        return _ROW + _LINE * max(0, max(len(s.sends) for s in self.stops) - 2)


@dataclass
class _Sheet:
    """What is drawn."""

    flows: ProgramFlows
    axis: str
    rows: list[_Spot] = field(default_factory=list[_Spot])
    left_out: int = 0
    update_from: int = 0

    def __post_init__(self) -> None:
        found: dict[tuple[str, bool], _Spot] = {}
        for stop in self.flows.stops:
            row = found.setdefault((stop.name, stop.phase == "update"), _Spot())
            if stop.phase == "backward":
                row.right = stop
            else:
                row.left = stop
        rows = [r for (_, update), r in found.items() if not update]
        rows += [r for (_, update), r in found.items() if update]
        if len(rows) > MOST_ROWS:
            kept = sorted(rows, key=lambda r: -sum(s.bytes for s in r.stops))[:MOST_ROWS]
            self.left_out = len(rows) - MOST_ROWS
            rows = [r for r in rows if any(r is k for k in kept)]
        updates = sum(r.left is not None and r.left.phase == "update" for r in rows)
        self.rows, self.update_from = rows, len(rows) - updates

    @property
    def gradient(self) -> bool:
        """Whether there is a backward pass."""
        return any(row.right is not None for row in self.rows)

    @property
    def width(self) -> float:
        return _GRADIENT_AT + _GRADIENT + _SENT

    @property
    def room(self) -> float:
        """Pixels for the collectives beside a box."""
        return (_SENT if self.gradient else self.width - _GUTTER - _BOX) - 20


def busiest_axis(program: Program, flows: ProgramFlows) -> str:
    """The mesh axis that most bytes are sent over; the first with several devices where none
    are."""
    names = [n for n, size in program.mesh.axes if size > 1] or list(program.mesh.names)
    every = [send for stop in (*flows.stops, flows.results) for send in stop.sends]
    sent = {n: sum(send.bytes for send in every if n in send.mesh_axes) for n in names}
    return max(names, key=lambda n: sent[n])


def program_picture(
    program: Program, axis: str | None = None, grouping: Grouping | None = None
) -> Picture:
    """The program as a picture.

    Arguments:
      program: the plan.
      axis: the mesh axis whose atoms colour it; None for the one that most bytes are sent over.
      grouping: what a place is; None to choose.

    Raises:
      SbpError: `unknown-axis` for an axis that the mesh has not.
    """
    if axis is not None and axis not in program.mesh.names:
        raise SbpError(
            f"no mesh axis {axis!r}{nearest(axis, program.mesh.names)}; the mesh has"
            f" {listed(program.mesh.names)}",
            code="unknown-axis",
        )
    sheet = _sheet(program, axis, grouping)
    return Picture(
        caption=_caption(sheet), svg=_drawing(sheet).svg(_costliest(sheet)), instead=_words(sheet)
    )


def brief_picture(program: Program) -> Picture:
    """The same for a page that has its words elsewhere: what costs most is said."""
    sheet = _sheet(program)
    said = _costliest(sheet)
    return Picture(caption=said, svg=_drawing(sheet).svg(said), instead=())


def _sheet(program: Program, axis: str | None = None, grouping: Grouping | None = None) -> _Sheet:
    flows = folded(program, grouping)
    return _Sheet(flows, axis or busiest_axis(program, flows))


def _caption(sheet: _Sheet) -> str:
    places = {"line": "source line", "function": "function", "scope": "scope"}
    text = (
        f"the program by {places[sheet.flows.grouping]}, coloured by the type on mesh axis"
        f" `{sheet.axis}`. Beside a box stand the collectives that convert what it reads or reduce"
        " gradients that it makes, with the bytes that one device sends per call. An arrow leads to"
        " a box from the largest value that it reads of its pass, and from each partial one; other"
        f" values have none. {_costliest(sheet)}"
    )
    if sheet.left_out:
        text += f" {counted(sheet.left_out, 'place')} that send least are left out."
    return text


def _costliest(sheet: _Sheet) -> str:
    stops = sheet.flows.costliest
    if not stops:
        return "No place sends anything."
    total = sum(stop.bytes for stop in stops)
    most, *others = merge(send for stop in stops for send in stop.sends)
    before = {"backward": "gradient of", "update": "update at"} if len(stops) == 1 else {}
    place = f"{before.get(stops[0].phase, 'line')} {stops[0].where}"
    what = f" by {most.kind} over {most.axes}"
    if others:
        what = f", {bytes_text(most.bytes)} of them{what}"
    branches = branches_text(sheet.flows.bytes, sheet.flows.called)
    return (
        f"Most bytes, {total / sheet.flows.bytes:.0%}, are sent for the"
        f" {place if stops[0].where else stops[0].text}:"
        f" {bytes_text(total)}{what}.{branches and ' '}{branches}"
    )


# ---- drawing ------------------------------------------------------------------------------------


_LEGEND: tuple[tuple[str, Ink, str], ...] = (
    ("S", Ink(color=SPLIT), "split"),
    ("B", Ink(color=WHOLE, opacity=0.18), "whole"),
    ("P", Ink(color=PARTIAL, opacity=0.35, dashed=True, width=2), "partial"),
    ("P", Ink(color=PARTIAL, opacity=0.7), "begins a partial value"),
    ("P→", Ink(width=0, opacity=0), "ends one"),
    ("×8", Ink(width=0, opacity=0), "runs 8 times"),
)


def _legend(board: Board) -> None:
    x = _GUTTER
    for sign, ink, meaning in _LEGEND:
        board.rect((x, 3), (22, 14), ink)
        board.text((x + 11, 14), sign, anchor="middle")
        board.text((x + 27, 14), meaning)
        x += 40 + CELL * len(meaning)


def _drawing(sheet: _Sheet) -> Board:
    top = 48.0
    for number, row in enumerate(sheet.rows):
        if number == sheet.update_from and number:
            top += 22
        row.top = top
        top += row.height + 10
    board = Board(sheet.width, top + 4 + _LINE * len(sheet.flows.results.sends))
    _legend(board)
    heads = [(_GUTTER, "forward")]
    if sheet.gradient:
        heads.append((_GRADIENT_AT, "backward"))
    for x, text in heads:
        board.text((x, 38), text, Ink(bold=True))
    if sheet.update_from < len(sheet.rows) and sheet.update_from:
        y = sheet.rows[sheet.update_from].top - 10
        board.text((_GUTTER, y), "update", Ink(bold=True))
    for row in sheet.rows:
        if row.left is not None:
            _box(board, sheet, row.left, (_GUTTER, row.top), _BOX)
            _sent(board, sheet, row.left, (_GUTTER + _BOX + 8, row.top))
        if row.right is not None:
            x = _GRADIENT_AT
            _box(board, sheet, row.right, (x, row.top), _GRADIENT, brief=row.left is not None)
            _sent(board, sheet, row.right, (x + _GRADIENT + 8, row.top))
    if sheet.flows.results.sends:
        board.text((_GUTTER, top + 13), "results", Ink(bold=True))
        _sent(board, sheet, sheet.flows.results, (_GUTTER + _BOX + 8, top))
    _arrows(board, sheet, "left")
    _arrows(board, sheet, "right")
    return board


def _ink(type_: NdSbp | None, axis: str, born: bool) -> Ink:
    atom = None if type_ is None else type_.get(axis)
    if isinstance(atom, Unreduced):
        return Ink(color=PARTIAL, opacity=0.35, dashed=True, width=2)
    if isinstance(atom, Split):
        return Ink(color=SPLIT)
    return Ink(color=WHOLE, opacity=0.18)


def _box(
    board: Board,
    sheet: _Sheet,
    stop: Stop,
    corner: tuple[float, float],
    width: float,
    *,
    brief: bool = False,
) -> None:
    x, y = corner
    told = f"{stop.where} {stop.text}: {counted(stop.operations, 'operation')}"
    board.rect(corner, (width, _ROW), _ink(stop.type, sheet.axis, stop.born), title=told)
    room = int((width - 10) / CELL)
    count = f" ×{stop.runs}" if stop.runs > 1 else ""
    kind = "" if stop.type is None else repr(stop.type)
    if stop.born:
        board.rect((x + width - 16, y + 3), (13, 14), Ink(color=PARTIAL, opacity=0.7))
        board.text((x + width - 9.5, y + 14), "P", Ink(bold=True), anchor="middle")
        room -= 2
    if brief:
        board.text((x + 6, y + 15), shortened(f"gradient{count}", room))
        board.text((x + 6, y + 30), shortened(kind, room))
    else:
        board.text((x + 6, y + 15), shortened(stop.text, room), title=stop.text)
        under = f"{stop.brief}{count}  {kind}"
        board.text((x + 6, y + 30), shortened(under, room))


def _sent(board: Board, sheet: _Sheet, stop: Stop, corner: tuple[float, float]) -> None:
    """The collectives of a place, each with a bar of its share."""
    x, y = corner
    total, is_most = sheet.flows.bytes, any(stop is one for one in sheet.flows.costliest)
    for number, send in enumerate(stop.sends):
        base = y + 13 + _LINE * number
        share = send.bytes / total if total else 0.0
        width = (_SENT - 20) * share
        color = COSTLY if is_most else WHOLE
        board.rect((x, base - 11), (max(width, 2), 13), Ink(color=color, opacity=0.3, width=0))
        board.text(
            (x + 4, base),
            shortened(_send_text(send), int(sheet.room / CELL)),
            Ink(color=COSTLY if is_most else "currentColor", bold=is_most),
            title=f"{send.change}, {counted(send.runs, 'run')}, {share:.0%}",
        )


def _send_text(send: Send) -> str:
    ends = "P→ " if send.reduces else ""
    return f"{ends}{bytes_text(send.bytes)} {send.kind} {send.axes}"


def _arrows(board: Board, sheet: _Sheet, side: str) -> None:
    """The largest flow into each box of a column, and partial ones."""
    place = {
        id(stop): number
        for number, row in enumerate(sheet.rows)
        for stop in row.stops
        if (stop is row.right) == (side == "right")
    }
    flows = [
        (place[id(sheet.flows.stops[f.source])], place[id(sheet.flows.stops[f.target])], f)
        for f in sheet.flows.flows
        if min(f.source, f.target) >= 0
        and id(sheet.flows.stops[f.source]) in place
        and id(sheet.flows.stops[f.target]) in place
    ]
    largest = {stop: max(f.size for _, s, f in flows if s == stop) for _, stop, _ in flows}
    shown = [(a, b, f) for a, b, f in flows if f.partial or f.size == largest[b]]
    edge = _GUTTER if side == "left" else _GRADIENT_AT
    taken: list[list[tuple[int, int]]] = [[] for _ in range(_TRACKS)]
    for start, stop, flow in sorted(shown, key=lambda item: abs(item[1] - item[0])):
        ink, told = _flow_ink(flow, sheet.axis), f"{flow.type!r}, {bytes_text(flow.size)} whole"
        first, last = sheet.rows[start].top, sheet.rows[stop].top
        if abs(stop - start) == 1:
            x, down = edge + 22, stop > start
            ends = (x, first + (_ROW if down else 0)), (x, last + (0 if down else _ROW))
            board.line(ends, ink, arrow=True, title=told)
            continue
        track = _free_track(taken, min(start, stop), max(start, stop))
        x, y0, y1 = edge - 8 - 7 * track, first + _ROW * 0.66, last + _ROW * 0.33
        board.line(((edge, y0), (x, y0), (x, y1), (edge, y1)), ink, arrow=True, title=told)


def _free_track(taken: list[list[tuple[int, int]]], low: int, high: int) -> int:
    """The innermost track beside the boxes on which nothing runs between two rows; the outermost
    where all are taken."""
    free = (n for n, runs in enumerate(taken) if all(b <= low or a >= high for a, b in runs))
    track = next(free, _TRACKS - 1)
    taken[track].append((low, high))
    return track


def _flow_ink(flow: ValueFlow, axis: str) -> Ink:
    atom = flow.type.get(axis)
    if isinstance(atom, Unreduced):
        return Ink(color=PARTIAL, width=2.5, dashed=True)
    return Ink(color=SPLIT if isinstance(atom, Split) else WHOLE, width=1.5)


# ---- words --------------------------------------------------------------------------------------


def _words(sheet: _Sheet) -> tuple[Table | Paragraph, ...]:
    """The places that send something or where values become partial."""
    told = [s for s in (*sheet.flows.stops, sheet.flows.results) if s.sends or s.born]
    if not told:
        return (Paragraph(text="no place sends anything, and no value is partial"),)
    columns = (
        Column(heading="place", wraps=True),
        Column(heading="pass"),
        Column(heading="times", right=True),
        Column(heading="makes", wraps=True),
        Column(heading="sends", wraps=True),
        Column(heading="share"),
    )
    rows = [
        TableRow(
            cells=(
                f"{s.where or s.text}",
                s.phase,
                str(s.runs),
                ("" if s.type is None else repr(s.type)) + (", begins P" if s.born else ""),
                "; ".join(map(_send_text, s.sends)),
                Share(fraction=s.bytes / sheet.flows.bytes if sheet.flows.bytes else 0.0),
            ),
            detail=s.text if s.where else "",
        )
        for s in sorted(told, key=lambda s: (s is sheet.flows.results, -s.bytes))
    ]
    shown, rest = rows[:_WORD_ROWS], rows[_WORD_ROWS:]
    return (
        Table(
            columns=columns,
            rows=tuple(shown),
            folded=tuple(rest),
            rest=f"and {counted(len(rest), 'more place')}" if rest else "",
        ),
    )


_WORD_ROWS = 16
