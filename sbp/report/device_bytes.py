"""Program -> bytes of one device: what it has in memory, moment by moment and by class, and what it
sends by mesh axis, phase and place."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from sbp.errors import bytes_text, counted
from sbp.plan.ir import Loop, Register, blocks
from sbp.plan.memory import DeviceMemory, Moment, stored_values
from sbp.plan.program import PHASES, Phase, Program
from sbp.report.facts import (
    InputClass,
    InputUses,
    Tensor,
    alike,
    counted_bytes,
    tensor,
    times_text,
)
from sbp.report.flows import MOMENTS, ProgramFlows, branches_text, place_name, traffic
from sbp.report.parts import (
    CELL,
    COSTLY,
    PARTIAL,
    SHOWN_ROWS,
    SPLIT,
    WHOLE,
    Board,
    Ink,
    Picture,
    Plain,
    Point,
    Table,
    draw_phases,
    picture,
    sentences,
    table,
    table_of,
)
from sbp.source.reader import shorten
from sbp.trace.graph import LOOPS, Node

MemoryClass = (
    InputClass
    | Literal["results", "copies of weights", "activations", "gradients", "temporaries", "gaps"]
)
"""The use of bytes in memory.

* `weights`, `optimiser`, `other arguments`: arguments, by their class in `InputUses`;
* `results`: results that do not take the buffer of a donated argument;
* `copies of weights`: weights that were gathered, cast or rearranged;
* `activations`: values that the forward pass makes and a later pass needs;
* `gradients`: values that the backward pass makes and the update needs;
* `temporaries`: all other values that operations make, and memory that they need while they run;
* `gaps`: memory that is lost between values of the last four classes.
"""
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
"""The classes in their order, with their colours."""

_BETWEEN: dict[tuple[Phase | None, Phase | None], MemoryClass] = {
    ("forward", "backward"): "activations",
    ("forward", "update"): "activations",
    ("backward", "update"): "gradients",
}
"""The class of what one pass makes and another one needs last."""

COLUMNS = 165
"""Moments that a picture shows. Of several that it shows as one, the fullest is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveMoment:
    """What a device has while one instruction runs.

    Attributes:
      phase: the pass that it belongs to.
      node: the operation; None for a result that is an argument.
      bytes: by class.
    """

    phase: Phase
    node: Node | None
    bytes: dict[MemoryClass, float]

    @property
    def total(self) -> float:
        """Bytes of all classes."""
        return sum(self.bytes.values())


class LiveBytes:
    """What a device has in its own memory as a program runs.

    Arguments:
      program: the plan.

    Attributes:
      moments: in program order; the body of a loop stands there once.
      peak: the fullest moment.
      held: arguments and temporaries that are alive at the peak, the largest first, with how many
        there are of each: those of several layers are one. The name of a temporary is the user's,
        or that of the operation that makes it.
      limit: bytes that a device may have.
      last: the pass of the last instruction that needs each register.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.names = program, program.graph.input_names
        self.device, self.uses = DeviceMemory(program.typing, in_host=False), InputUses(program)
        self.last: dict[Register, Phase] = {
            register: self.uses.phases.place(block.instructions[at])[1]
            for block in blocks(program.block)
            for _, last, _ in [stored_values(block, self.device)]
            for register, at in last.items()
        }
        self.kind = functools.cache(self._kind)
        self.fixed: dict[MemoryClass, float] = dict.fromkeys(COLORS, 0.0)
        for number, register in enumerate(program.block.inputs):
            self.fixed[self.uses.class_of(number)] += self.device.size(register)
        self.fixed["results"] = self.device.results(program.block)
        sizes = [moment.bytes for moment in self.device.moments(program.block)]
        total, count = len(sizes), min(len(sizes), COLUMNS)
        shown = {
            max(range(total * n // count, total * (n + 1) // count), key=lambda i: sizes[i])
            for n in range(count)
        }
        most = max(range(len(sizes)), key=lambda i: sizes[i], default=-1)
        self.moments, temporaries = list[LiveMoment](), list[Tensor]()
        for number, moment in enumerate(self.device.moments(program.block)):
            if number in shown:
                self.moments.append(self._moment(moment))
            if number == most:
                temporaries += self._temporaries(moment)
        # A program without moments returns its arguments.
        nothing = LiveMoment(phase=PHASES[0], node=None, bytes=self.fixed)
        self.moments, asked = self.moments or [nothing], program.request.memory_limit
        arguments = (
            self._tensor(register, self.uses.class_of(number), self.names[number])
            for number, register in enumerate(program.block.inputs)
            if self.device.size(register)
        )
        self.held = sorted(alike([*arguments, *temporaries]), key=lambda one: -counted_bytes([one]))
        self.limit = program.mesh.hardware.hbm_bytes if asked is None else asked
        self.peak = max(self.moments, key=lambda m: m.total)

    def _kind(self, register: Register) -> MemoryClass:
        root = self.uses.root(register.value)
        if root is not None and self.uses.class_of(root) == "weights":
            return "copies of weights"
        maker = self.uses.names.maker(register.value)
        made = self.uses.phases.of[maker.id] if maker else None
        return _BETWEEN.get((made, self.last.get(register)), "temporaries")

    def _moment(self, moment: Moment) -> LiveMoment:
        """All that is in memory, by class."""
        found = dict(self.fixed)
        for sizes in moment.live:
            for register, size in sizes.items():
                found[self.kind(register)] += size
        found["temporaries"] += moment.scratch
        found["gaps"] += self.device.gaps(moment.bytes)
        node, phase = self.uses.phases.place(moment.instruction)
        return LiveMoment(
            phase=phase,
            node=node,
            bytes={kind: found[kind] for kind in COLORS if found[kind]},
        )

    def _temporaries(self, moment: Moment) -> Iterator[Tensor]:
        """What else is alive at a moment."""
        names = self.uses.names
        for register in moment.registers():
            maker, root = names.maker(register.value), self.uses.root(register.value)
            other = self.names[root] if root is not None else maker.name if maker else "in a loop"
            name = names.value(register.value) or other
            yield self._tensor(register, self.kind(register), name, maker)

    def _tensor(
        self, register: Register, kind: MemoryClass, name: str, maker: Node | None = None
    ) -> Tensor:
        return replace(
            tensor(self.program, register, name),
            kind=kind,
            where=place_name(maker).where if maker else "",
            bytes_per_device=self.device.size(register),
        )


# ---- picture of memory --------------------------------------------------------------------------
# Live bytes over program order, with the peak and the limit.


MIN_SHARE = 0.001
"""Share of the limit from which it is shown with a digit."""

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
    found = LiveBytes(program)
    caption = _caption(program, found)
    if not found.peak.total:
        return picture(caption, None, "it holds nothing")
    classes = table_of(
        ((kind, size) for kind, size in found.peak.bytes.items() if size),
        {
            "class": lambda one: one[0],
            ">at the peak": lambda one: bytes_text(one[1]),
            ">share": lambda one: f"{one[1] / found.peak.total:.1%}",
        },
    )
    held = table_of(
        found.held,
        {
            "alive at the peak": lambda one: times_text(one[0].name, one[1]),
            "class": lambda one: one[0].kind,
            "shape": lambda one: one[0].shape,
            "type": lambda one: repr(one[0].type),
            "line": lambda one: one[0].where,
            ">per device": lambda one: bytes_text(counted_bytes([one])),
        },
        shown=SHOWN_ROWS,
        rest=lambda left: (
            f"and {counted(len(left), 'smaller one')}: {bytes_text(counted_bytes(left))}"
        ),
    )
    return picture(caption, _drawing(found), classes, held)


def _caption(program: Program, found: LiveBytes) -> str:
    peak, at, hardware = found.peak, "", program.mesh.hardware.name
    if peak.node is not None:
        phase = "the update" if peak.phase == "update" else f"the {peak.phase} pass"
        where = place_name(peak.node).where
        at = f", at {peak.node.name}" + (f" of {where}" if where else "") + f" in {phase}"
    share, limit = peak.total / found.limit, bytes_text(found.limit)
    part = f"{share:.1%} of" if share >= MIN_SHARE else "under 0.1% of"
    of_hardware = program.request.memory_limit is None
    whole = f"the {limit} of {hardware}" if of_hardware else f"memory_limit, {limit}"
    most, host = bytes_text(peak.total), program.cost.host_memory_bytes
    return sentences(
        {
            f"memory of one device over program order: at most {most}{at}; this is {part}"
            f" {whole}.": True,
            f"This does not count {bytes_text(host)} of host memory.": host,
            "The picture shows the body of a loop once.": any(
                isinstance(i, Loop) and i.node.op in LOOPS for i in program.block.instructions
            ),
        }
    )


def _drawing(found: LiveBytes) -> Board:
    peak = found.peak
    at_peak: dict[MemoryClass, str] = {
        kind: bytes_text(peak.bytes.get(kind, 0.0))
        for kind in COLORS
        if any(moment.bytes.get(kind) for moment in found.moments)
    }
    shows_limit = found.limit <= DRAWN_LIMIT * peak.total
    most = 1.1 * (max(found.limit, peak.total) if shows_limit else peak.total)
    board = Board(_NAME + _PLOT + 4, _TOP + _TALL + 14 + _KEY * -(-len(at_peak) // _KEYS))
    wide, bottom = _PLOT / len(found.moments), _TOP + _TALL

    def y(bytes_: float) -> float:
        return bottom - _TALL * bytes_ / most

    draw_phases(
        board,
        (
            (moment.phase, _NAME + wide * n, _NAME + wide * (n + 1))
            for n, moment in enumerate(found.moments)
        ),
        2,
    )
    below = [0.0] * len(found.moments)
    for kind, text in at_peak.items():
        above = [b + m.bytes.get(kind, 0.0) for b, m in zip(below, found.moments, strict=True)]
        upper, lower = (list(_steps(map(y, edge), wide)) for edge in (above, below))
        board.area([*upper, *reversed(lower)], _ink(kind), title=f"{kind}: {text} at the peak")
        below = above
    for bytes_ in (0.0, peak.total / 2, peak.total):
        board.line([(_NAME - 4, y(bytes_)), (_NAME, y(bytes_))], Ink(width=0.8))
        board.text((_NAME - 8, y(bytes_) + 4), bytes_text(bytes_) if bytes_ else "0", anchor="end")
    board.line([(_NAME, _TOP), (_NAME, bottom), (_NAME + _PLOT, bottom)], Ink(width=0.8))
    at = _NAME + wide * (found.moments.index(peak) + 0.5)
    board.line([(at, y(peak.total)), (at, bottom)], Ink(dashed=True), title="the fullest moment")
    text, right, top = f"limit {bytes_text(found.limit)}", _NAME + _PLOT, y(found.limit)
    if shows_limit:
        ink = Ink(color=COSTLY, dashed=True, width=1.5)
        board.line([(_NAME, top), (right, top)], ink, title=text)
        board.text((right, top - 4), text, anchor="end")
    else:
        board.text((right, _TOP + 11), f"{text}, above", anchor="end")
    board.text((4, bottom + 22), "at the peak")
    for number, (kind, text) in enumerate(at_peak.items()):
        row, column = divmod(number, _KEYS)
        board.key(
            (_NAME + _PLOT / _KEYS * column, bottom + 12 + _KEY * row),
            _ink(kind),
            shorten(f"{kind} {text}", int((_PLOT / _KEYS - 31) / CELL)),
            title=f"{kind}: {text} at the peak",
        )
    return board


def _ink(kind: MemoryClass) -> Ink:
    return Ink(color=COLORS[kind], opacity=0.2 if kind == "gaps" else 0.45, width=0)


def _steps(heights: Iterable[float], wide: float) -> Iterator[Point]:
    """The corners of a line of steps from left to right."""
    for height, level in groupby(enumerate(heights), key=lambda at: at[1]):
        numbers = [n for n, _ in level]
        yield from ((_NAME + wide * n, height) for n in (numbers[0], numbers[-1] + 1))


# ---- what is sent -------------------------------------------------------------------------------
# Tables of bytes, for one plan or for two side by side.


MOST_PLACES = 16
"""Rows of places; the others are added up in one more row."""


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
    every = [flows.sums(lambda stop: stop.text) for flows in found]
    most = {
        place: max(sum(b for (_, p), b in sums.items() if p == place) for sums in every)
        for sums in every
        for _, place in sums
    }
    places = sorted(most, key=lambda place: (-most[place], place))
    rest = counted(len(places) - MOST_PLACES, "other place")
    named = {place: rest if n >= MOST_PLACES else place for n, place in enumerate(places)}
    return (
        Matrix(
            corner="mesh axes",
            rows=tuple(axes),
            columns=tuple(m for m in MOMENTS if any(m == sent for s in by_moment for _, sent in s)),
            plans=by_moment,
        ),
        Matrix(
            corner="scope" if all(t.grouping == "scope" for t in found) else "function",
            rows=tuple(dict.fromkeys(named.values())),
            columns=tuple(axes),
            plans=tuple(
                {(p, a): b for (a, p), b in flows.sums(lambda stop: named[stop.text]).items()}
                for flows in found
            ),
        ),
    )


def traffic_parts(program: Program, other: Program | None = None) -> tuple[Plain, ...]:
    """The bytes that one device sends per call, by mesh axes, phase and place.

    Arguments:
      program: the plan.
      other: a plan beside it.
    """
    programs = (program,) if other is None else (program, other)
    found = tuple(map(traffic, programs))
    if len({t.grouping for t in found}) > 1:
        found = tuple(ProgramFlows(p, "function") for p in programs)
    this, *others = (bytes_text(t.bytes) for t in found)
    plans = ("This plan: ", "The other plan: ")
    beside = [f" by this plan, {other} by the other (this / other in tables)" for other in others]
    caption = sentences(
        {
            f"bytes that one device sends per call, by mesh axis: {this} in"
            f" all{''.join(beside)}.": True,
            f"`{MOMENTS[-1]}`: conversions of results.": any(t.results.bytes for t in found),
            **{
                f"{plan}{text}": True
                for plan, t in zip(plans if others else ("",), found, strict=True)
                if (text := branches_text(t.bytes, t.called))
            },
        }
    )
    if not any(t.bytes for t in found):
        return (caption, "no device sends anything")
    return (caption, *map(_matrix_table, matrices(found)))


def _matrix_table(matrix: Matrix) -> Table:
    """Of two plans, both numbers in a cell."""
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
