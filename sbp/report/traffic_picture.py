"""Bytes by mesh axis, phase and place -> a picture: a matrix whose cells are darker the more they
send, for one plan or for two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp.errors import counted
from sbp.plan.program import Program
from sbp.report.flows import MOMENTS, ProgramFlows, program_flows, traffic
from sbp.report.parts import Picture, Table, table
from sbp.report.svg import COSTLY, SPLIT, Board, Ink, Point, picture
from sbp.report.wording import branches_text, bytes_text

MOST_PLACES = 16
"""Rows of places; the others are added up in one more row."""

_NAME, _CELL, _ROW, _GAP = 170.0, 78.0, 24.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Bytes of rows and columns.

    Attributes:
      corner: what the rows are.
      rows, columns: their names.
      plans: the bytes of each plan, by row and column; what sends nothing has no entry.
    """

    corner: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    plans: tuple[dict[tuple[str, str], float], ...]

    def sum_of(self, plan: int, row: str) -> float:
        """Bytes of a row."""
        return sum(b for (r, _), b in self.plans[plan].items() if r == row)


def matrices(found: Sequence[ProgramFlows]) -> tuple[Matrix, Matrix]:
    """The bytes of one plan, or of several with the same rows and columns: of mesh axes by phase,
    and of places by mesh axes.

    Arguments:
      found: the flows of each plan.
    """
    by_moment = tuple(flows.sums(lambda stop: stop.phase) for flows in found)
    axes = sorted({a for sums in by_moment for a, _ in sums}, key=lambda a: (a.count(","), a))
    sent = {m for sums in by_moment for _, m in sums}
    every = [flows.sums(lambda stop: stop.text) for flows in found]
    most = {
        place: max(sum(b for (_, p), b in sums.items() if p == place) for sums in every)
        for sums in every
        for _, place in sums
    }
    places = sorted(most, key=lambda place: (-most[place], place))
    others = places[MOST_PLACES:]
    named = {place: place for place in places}
    named |= dict.fromkeys(others, counted(len(others), "other place"))
    folded = [flows.sums(lambda stop: named[stop.text]) for flows in found]
    return (
        Matrix(
            corner="mesh axes",
            rows=tuple(axes),
            columns=tuple(m for m in MOMENTS if m in sent),
            plans=by_moment,
        ),
        Matrix(
            corner="scope" if all(t.grouping == "scope" for t in found) else "function",
            rows=tuple(dict.fromkeys(named.values())),
            columns=tuple(axes),
            plans=tuple({(p, a): b for (a, p), b in sums.items()} for sums in folded),
        ),
    )


def traffic_picture(program: Program, other: Program | None = None) -> Picture:
    """The bytes that one device sends per call, by mesh axes, phase and place.

    Arguments:
      program: the plan.
      other: a plan beside it, on the same scale.
    """
    programs = (program,) if other is None else (program, other)
    found = tuple(map(traffic, programs))
    if len({t.grouping for t in found}) > 1:
        found = tuple(program_flows(p, "function") for p in programs)
    caption = _caption(found)
    if not any(t.bytes for t in found):
        return picture(caption, None, "no device sends anything")
    both = matrices(found)
    return picture(caption, _drawing(both), *map(_table, both))


def _caption(found: Sequence[ProgramFlows]) -> str:
    this, *others = (bytes_text(t.bytes) for t in found)
    beside = [f" by this plan, {other} by the other (this / other in tables)" for other in others]
    returned = any(t.results.bytes for t in found)
    results = f". `{MOMENTS[-1]}`: conversions of results" if returned else ""
    text = (
        f"bytes that one device sends per call, by mesh axis: {this} in all{''.join(beside)}"
        f"{results}."
    )
    branches = {branches_text(t.bytes, t.called) for t in found}
    return " ".join([text, *sorted(branches - {""})])


def _drawing(both: tuple[Matrix, Matrix]) -> Board:
    plans = len(both[0].plans)
    block = _CELL * (max(len(m.columns) for m in both) + 1) + _GAP
    tall = sum(_ROW * (len(m.rows) + 1) + _GAP for m in both) + 20
    board = Board(_NAME + block * plans, tall)
    top = 20.0
    for plan, name in enumerate(("this plan", "the other plan") if plans > 1 else ()):
        board.text((_NAME + block * plan, 12), name, Ink(bold=True))
    for matrix in both:
        board.text((4, top + 16), matrix.corner, Ink(bold=True))
        for number, row in enumerate(matrix.rows, 1):
            board.label((4, top + _ROW * number + 16), row, _NAME - 10)
        for plan in range(plans):
            _cells(board, matrix, plan, (_NAME + block * plan, top))
        top += _ROW * (len(matrix.rows) + 1) + _GAP
    return board


def _cells(board: Board, matrix: Matrix, plan: int, corner: Point) -> None:
    """The cells of one plan: each with its bytes, darker the more it sends."""
    left, top = corner
    most = max((b for sums in matrix.plans for b in sums.values()), default=0.0)
    middles = [left + _CELL * (n + 0.5) for n in range(len(matrix.columns) + 1)]
    for x, column in zip(middles, (*matrix.columns, "sum"), strict=True):
        board.label((x, top + 16), column, _CELL - 6, Ink(bold=True), anchor="middle")
    for at, row in enumerate(matrix.rows, 1):
        y = top + _ROW * at
        for x, column in zip(middles, matrix.columns, strict=False):
            bytes_ = matrix.plans[plan].get((row, column), 0.0)
            is_most = bytes_ == most > 0
            color, width = (COSTLY, 2) if is_most else (SPLIT, 0)
            board.rect(
                (x - _CELL / 2 + 1, y + 1),
                (_CELL - 2, _ROW - 2),
                Ink(color=color, opacity=0.5 * bytes_ / most, width=width),
                title=f"{row}, {column}: {bytes_text(bytes_)}",
            )
            board.text((x, y + 16), _cell([bytes_]), Ink(bold=is_most), anchor="middle")
        board.text((middles[-1], y + 16), _cell([matrix.sum_of(plan, row)]), anchor="middle")


def _table(matrix: Matrix) -> Table:
    """The same in words; of two plans, both numbers in a cell."""
    return table(
        (matrix.corner, *(f">{c}" for c in (*matrix.columns, "sum"))),
        (
            (
                row,
                *(
                    _cell([sums.get((row, c), 0.0) for sums in matrix.plans])
                    for c in matrix.columns
                ),
                _cell([matrix.sum_of(plan, row) for plan in range(len(matrix.plans))]),
            )
            for row in matrix.rows
        ),
    )


def _cell(values: Sequence[float]) -> str:
    return " / ".join(bytes_text(v) if v else "-" for v in values)
