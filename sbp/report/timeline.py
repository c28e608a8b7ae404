"""Program -> its modelled time: when a device computes and when it waits for the links along each
mesh axis, a picture of it, and what limits the program."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sbp.errors import counted, seconds_text
from sbp.handwritten.emulation import atom_of
from sbp.infer.cost import exchanges, local_seconds
from sbp.plan.ir import Apply, Box, walk
from sbp.plan.program import PHASES, Phase, Phases, Program
from sbp.report import facts, flows
from sbp.report.parts import (
    COSTLY,
    PARTIAL,
    PHASE_HEIGHT,
    SHOWN_ROWS,
    SPLIT,
    WHOLE,
    Board,
    Ink,
    Picture,
    Section,
    Table,
    draw_phases,
    picture,
    sentences,
    table,
    table_of,
)
from sbp.report.wording import trips_text
from sbp.trace.collectives import SHARD_MAP, mesh_sizes
from sbp.trace.graph import (
    CONTROL_FLOW,
    LOOPS,
    Graph,
    Node,
    amount,
    group_by,
    trips_of,
)
from sbp.types import Split

# ---- schedule -----------------------------------------------------------------------------------


OWN_LANE = "compute"
"""The name of the lane of a device's own work, bound by products or by memory."""


class Interval(NamedTuple):
    """Time that one device spends on one thing. All runs of a loop's body are one interval.

    Attributes:
      what: the name of the collective or of the operation.
      start, seconds: its modelled start and length. The call begins at 0.
      waited: the part of `seconds` for which the step waits. The rest runs beside the step's work.
      bound: what the time is spent on: `compute`, `memory` (of the device or of its host), or
        `link` with the names of the mesh axes whose links are used.
      axes: names of these axes; empty for local work.
      node: the operation that the interval belongs to; for a conversion its reader. None for a
        result that is an argument.
      phase: forward, backward or update.
      runs: how often it runs per call. A branch of a `cond` runs a part of a time.
      flops: floating-point operations of a product on all devices together, in all its runs.
    """

    what: str
    start: float
    seconds: float
    waited: float
    bound: str
    axes: tuple[str, ...]
    node: Node | None
    phase: Phase
    runs: float
    flops: float = 0.0

    @property
    def lane(self) -> str:
        """The device's own lane, or that of the links."""
        return self.bound if self.axes else OWN_LANE

    @property
    def line(self) -> tuple[str, str]:
        """The text of its line, and where it stands."""
        place = flows.place_name(self.node) if self.node else flows.PlaceName("", "(results)")
        return place.text, place.where

    @property
    def cause(self) -> tuple[str, tuple[str, str], Phase, tuple[str, ...]]:
        """The key by which `causes` adds up intervals."""
        return self.what, self.line, self.phase, self.axes


class Schedule:
    """The schedule that the cost model gives a program: its instructions one after another, but for
    exchanges that run beside the products that use them.

    Arguments:
      program: the plan.

    Attributes:
      intervals: in program order; what runs beside an operation comes after it.
      seconds: from the first to the last; the sum of the seconds that the step waits for.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.seconds = program, 0.0
        phases, intervals = Phases(program.graph), list[Interval]()
        for instruction, _, regions, _ in walk(program.block):
            around = [node for node, _ in regions]
            intervals += self._instruction(instruction, *phases.place(instruction, around), around)
        self.intervals = tuple(intervals)

    def _instruction(
        self, instruction: Apply | Box, node: Node | None, phase: Phase, around: Sequence[Node]
    ) -> Iterator[Interval]:
        """What an instruction takes, in all its runs.

        Arguments:
          instruction: the operation or conversion.
          node, phase: the operation that it belongs to, and its pass.
          around: the loops and branches around it. A branch runs a part of a time.
        """
        shares = (trips_of(n) if n.op in LOOPS else 1 / len(n.regions) for n in around)
        here = Interval("", 0.0, 0.0, 0.0, "memory", (), node, phase, math.prod(shares, start=1.0))
        if isinstance(instruction, Box):
            yield from (
                self._next(
                    self._named(here, step.kind, step.mesh_axes if step.bytes_sent else ()),
                    step.seconds,
                )
                for step in instruction.steps
            )
        elif instruction.row.kernels:
            yield from self._apply(here, instruction)

    def _apply(self, here: Interval, done: Apply) -> Iterator[Interval]:
        graph, mesh, node, begin = self.program.graph, self.program.mesh, done.node, self.seconds
        found = [
            (self._named(here, kind, positions), before, beside)
            for positions, kind, before, beside in exchanges(graph, node, done.row, mesh)
        ]
        yield from (self._next(exchange, before) for exchange, before, _ in found if before)
        shares = self.program.typing.graph_request.memory_shares
        compute, memory = local_seconds(graph, node, done.row, mesh, shares)
        bound = "compute" if compute >= memory else "memory"
        flops = here.runs * _flops(graph, node)
        yield self._next(
            here._replace(what=node.name, bound=bound, flops=flops), max(compute, memory)
        )
        for exchange, _, beside in found:
            if beside:
                seconds = here.runs * beside
                late = max(0.0, begin + seconds - self.seconds)
                yield exchange._replace(start=begin, seconds=seconds, waited=late)
                self.seconds += late

    def _named(self, here: Interval, kind: str, positions: Sequence[int]) -> Interval:
        """A step of a conversion or of a kernel, over the mesh axes at some positions."""
        axes = tuple(self.program.mesh.names[k] for k in positions)
        bound = f"link {', '.join(axes)}" if axes else "memory"
        return here._replace(what=kind, axes=axes, bound=bound)

    def _next(self, here: Interval, seconds: float) -> Interval:
        """What runs now, and all that follows waits for."""
        start, taken = self.seconds, here.runs * seconds
        self.seconds += taken
        return here._replace(start=start, seconds=taken, waited=taken)


def _flops(graph: Graph, node: Node) -> float:
    """The floating-point operations of products in an operation. In a hand-written region, devices
    along axes that split no operand repeat them."""
    if node.op == SHARD_MAP:
        body, specs = node.params["body"], node.params["in_specs"]
        devices = math.prod(
            n
            for axis, n in mesh_sizes(node).items()
            if any(isinstance(atom_of(spec, axis), Split) for spec in specs)
        )
        return devices * sum(_flops(body, n) for n in body.nodes)
    inner = [sum(_flops(region, n) for n in region.nodes) for region in node.regions]
    return amount(node, inner) if inner else facts.flops_of(graph, node)


def lane_seconds(found: Schedule) -> dict[str, dict[Phase, float]]:
    """Modelled seconds that the step waits for, by lane and phase. A collective over several mesh
    axes has a lane of its own here.

    Arguments:
      found: the schedule of a program.
    """
    lanes = {OWN_LANE: []} | group_by(found.intervals, lambda one: one.lane)
    return {
        lane: {p: sum((i.waited for i in own if i.phase == p), 0.0) for p in PHASES}
        for lane, own in lanes.items()
    }


def trace_events(found: Schedule) -> list[dict[str, Any]]:
    """A schedule in the Trace Event Format of Chrome, which Perfetto opens: a track for each lane.
    Times are microseconds."""
    lanes = [OWN_LANE, *dict.fromkeys(one.lane for one in found.intervals if one.axes)]
    track = {"ph": "M", "pid": 0, "name": "thread_name"}
    return [
        *(track | {"tid": k, "args": {"name": lane}} for k, lane in enumerate(lanes)),
        *(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(one.lane),
                "name": f"{one.what} {where}",
                "ts": 1e6 * one.start,
                "dur": 1e6 * one.seconds,
                "args": {
                    "line": text,
                    "at": where,
                    "pass": one.phase,
                    "bound": one.bound,
                    "runs": one.runs,
                    "waited_us": 1e6 * one.waited,
                },
            }
            for one in found.intervals
            for text, where in [one.line]
        ),
    ]


def causes(found: Schedule) -> list[Interval]:
    """The operations and conversions that the step waits for, the longest first. Those of one
    line, pass, name and mesh axes are one, with the sums of their runs and seconds."""
    sums = (
        same[0]._replace(runs=sum(i.runs for i in same), waited=sum(i.waited for i in same))
        for same in group_by(found.intervals, lambda one: one.cause).values()
    )
    return sorted((c for c in sums if c.waited > 0), key=lambda c: -c.waited)


def _hardware(program: Program) -> str:
    return f"{program.mesh.hardware.name}{program.mesh.measured or '; nothing was measured'}"


# ---- picture ------------------------------------------------------------------------------------


_NAME, _PLOT, _LANE, _TOP, _TICKS, _KEY = 84.0, 660.0, 30.0, 4.0, 24.0, 18.0
_BAND = PHASE_HEIGHT + 4

_SEEN = 2.0
"""Pixels from which an interval has a box of its own; shorter ones share boxes of this width."""


def timeline_picture(program: Program) -> Picture:
    """The modelled step in time.

    Arguments:
      program: the plan.
    """
    found = Schedule(program)
    caption = _caption(program, found)
    if not found.seconds:
        return picture(caption, None, "no operation of it has a modelled time")
    return picture(
        caption,
        _drawing(program, found),
        _lanes_table(found),
        table_of(
            causes(found),
            {
                "longest": lambda one: " ".join([one.what, *one.axes]),
                "line": lambda one: one.line[1] or one.line[0],
                "pass": lambda one: one.phase,
                ">runs": lambda one: f"{one.runs:,.0f}",
                ">modelled": lambda one: seconds_text(one.waited),
                ">share": lambda one: f"{one.waited / found.seconds:.1%}",
            },
            shown=SHOWN_ROWS,
            rest=lambda left: f"and {counted(len(left), 'shorter one')}",
        ),
    )


def _caption(program: Program, found: Schedule) -> str:
    links, trips = sum(i.waited for i in found.intervals if i.axes), trips_text(program)
    beside = sum(i.seconds - i.waited for i in found.intervals)
    waiting = f", {links / found.seconds:.0%} of it spent waiting for collectives" if links else ""
    but = f" but {seconds_text(beside)} of exchanges with products" if beside else ""
    most, longest = _longest(found), ""
    if most:
        of = "the gradient of " if most.phase == "backward" else ""
        longest = (
            f"The longest collective takes {most.waited / found.seconds:.0%}: {most.what} over"
            f" {', '.join(most.axes)} for {of}{most.line[1] or most.line[0]}"
        )
    return sentences(
        {
            f"the modelled step over time: {seconds_text(found.seconds)}{waiting}.": True,
            f"sbp assumes no overlap{but}. A compiler may overlap more.": True,
            f"{longest}.": longest,
            f"{trips}.": trips,
            "sbp counts each branch of a conditional as equally likely.": any(
                n.op in CONTROL_FLOW - LOOPS for n in program.graph.walk()
            ),
            f"Hardware {_hardware(program)}.": True,
        }
    )


def _longest(found: Schedule) -> Interval | None:
    """The collective that the step waits for longest."""
    return next((c for c in causes(found) if c.axes), None)


def _drawing(program: Program, found: Schedule) -> Board:
    longest = _longest(found)
    used = {axis for i in found.intervals for axis in i.axes}
    rows = ["", *(name for name in program.mesh.names if name in used)]
    below = _TOP + _BAND + _LANE * len(rows)
    board = Board(_NAME + _PLOT + 4, below + _TICKS + _KEY)
    draw_phases(board, ((i.phase, *_ends(found, i)) for i in found.intervals if i.waited), _TOP)
    for number, lane in enumerate(rows):
        top = _TOP + _BAND + _LANE * number
        board.label((4, top + 19), lane or OWN_LANE, _NAME - 8, Ink(bold=True))
        board.line([(_NAME, top + _LANE), (_NAME + _PLOT, top + _LANE)], Ink(width=0.3))
        _lane(board, found, longest, lane, top)
    for part, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        x = _NAME + _PLOT * part / 4
        board.line([(x, below), (x, below + 4)], Ink(width=0.8))
        board.text(
            (x, below + 17),
            seconds_text(found.seconds * part / 4) if part else "0",
            anchor=anchor,
        )
    x, every = _NAME, found.intervals
    colors = {
        "bound by products": SPLIT,
        "by memory": WHOLE,
        "collectives": PARTIAL if any(i.axes for i in every) else "",
        "the longest": COSTLY if longest else "",
        "beside products": PARTIAL if any(i.waited < i.seconds for i in every) else "",
    }
    for text, color in colors.items():
        if color:
            ink = Ink(color=color, opacity=0.35, width=0.5, dashed=text == "beside products")
            x = board.key((x, below + _TICKS + 2), ink, text)
    return board


def _color(one: Interval, longest: Interval | None) -> str:
    if not one.axes:
        return SPLIT if one.bound == "compute" else WHOLE
    return COSTLY if longest is not None and one.cause == longest.cause else PARTIAL


def _ends(found: Schedule, one: Interval) -> tuple[float, float]:
    """The left and the right edge of a time."""
    pixels = _PLOT / found.seconds
    return _NAME + pixels * one.start, _NAME + pixels * (one.start + one.seconds)


def _lane(board: Board, found: Schedule, longest: Interval | None, lane: str, top: float) -> None:
    """The intervals of a lane. Short ones that begin within a few pixels are one box, darker
    the more of it they fill."""
    tall, every = _LANE - 6, found.intervals
    own = ((one, *_ends(found, one)) for one in every if lane in (one.axes or [""]))
    by_size = group_by(own, lambda at: at[2] - at[1] >= _SEEN)
    for one, left, right in by_size.get(True, ()):
        beside = one.seconds - one.waited
        text = f"{one.what}, {one.phase}: {seconds_text(one.seconds)}. {' '.join(one.line)}"
        late = f". {seconds_text(beside)} of it beside the work" if beside > 0 else ""
        ink = Ink(color=_color(one, longest), opacity=0.35, width=0.5, dashed=beside > 0)
        board.rect((left, top + 3), (right - left, tall), ink, title=text + late)
        board.inside(left, right, top + 19, one.what, title=text + late, spare=1)
    columns = group_by(by_size.get(False, ()), lambda at: int((at[1] - _NAME) / _SEEN))
    for column, some in columns.items():
        filled = sum(one.seconds for one, *_ in some) / found.seconds * _PLOT / _SEEN
        color = _color(max((one for one, *_ in some), key=lambda one: one.seconds), longest)
        ink = Ink(color=color, opacity=0.35 * min(1, filled), width=0)
        board.rect((_NAME + _SEEN * column, top + 3), (_SEEN, tall), ink, title="short operations")


def _lanes_table(found: Schedule) -> Table:
    sums = lane_seconds(found)
    shown: list[Phase] = [p for p in PHASES if any(row[p] for row in sums.values())]
    figures = {lane: (*(row[p] for p in shown), sum(row.values())) for lane, row in sums.items()}
    return table(
        ("lane", *(f">{p}" for p in (*shown, "sum"))),
        (
            (lane, *(seconds_text(s) if s else "-" for s in seconds))
            for lane, seconds in figures.items()
        ),
    )


# ---- limits -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a program or one part of it does per call.

    Attributes:
      flops: floating-point operations of its products on all devices together, without what
        rematerialisation repeats and what several devices do alike.
      repeated: those that rematerialisation repeats.
      seconds: modelled seconds by what they are spent on: `compute`, `memory`, or `link NAME` for
        the links along mesh axes.
    """

    flops: float
    repeated: float
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Its modelled seconds."""
        return sum(self.seconds.values())

    @property
    def bound(self) -> str:
        """What most of its seconds are spent on; empty where it takes none."""
        return max(self.seconds, key=lambda k: self.seconds[k]) if self.total else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWork(Work):
    """What one part of the program does per call.

    Attributes:
      place: its scopes, or the function that it stands in.
      phase: forward, backward or update.
    """

    place: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Work):
    """What a program does per call, and what limits it. The seconds are in order, the most first.

    Attributes:
      works: its parts, in program order.
      peak: floating-point operations per second of all devices at the rate of 16-bit products.
      modelled: the plan's modelled seconds. The parts may add up to slightly less.
    """

    works: tuple[PartWork, ...]
    peak: float
    modelled: float

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: FLOPs over what all devices can do in the modelled seconds.

        Source: Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B. As there, what
        rematerialisation repeats does not count.
        """
        possible = self.peak * self.modelled if self.modelled else 0.0
        return self.flops / possible if possible else 0.0


def limits(program: Program) -> Limits:
    """What limits a program. Of a `cond`, the mean of its branches counts, as in the modelled
    time."""
    has_scopes = any(flows.place_name(n, "scope").name for n in program.graph.walk())
    named: flows.Grouping = "scope" if has_scopes else "function"
    places = group_by(
        Schedule(program).intervals,
        lambda one: (
            flows.place_name(one.node, named).text if one.node else "arguments and results",
            one.phase,
        ),
    )
    works = tuple(
        PartWork(
            place=place,
            phase=phase,
            flops=sum(i.flops for i in own if not (i.node and i.node.is_recomputed)),
            repeated=sum(i.flops for i in own if i.node and i.node.is_recomputed),
            seconds={
                bound: sum(i.waited for i in same)
                for bound, same in group_by(own, lambda i: i.bound).items()
                if any(i.waited for i in same)
            },
        )
        for (place, phase), own in places.items()
    )
    mesh, bounds = program.mesh, dict.fromkeys(bound for w in works for bound in w.seconds)
    seconds = {bound: sum(w.seconds.get(bound, 0.0) for w in works) for bound in bounds}
    return Limits(
        works=works,
        flops=sum((w.flops for w in works), 0.0),
        repeated=sum((w.repeated for w in works), 0.0),
        seconds=dict(sorted(seconds.items(), key=lambda item: -item[1])),
        peak=mesh.num_devices * mesh.hardware.flops_per_second,
        modelled=program.cost.seconds,
    )


def limits_section(program: Program) -> Section:
    """What limits a program, as a part of a report."""
    found = limits(program)
    spent = [f"{name} {_percent(s / found.total)}" for name, s in found.seconds.items() if s > 0]
    repeats = f", beside {_flops_text(found.repeated)} that the backward pass repeats"
    text = (
        f"{_flops_text(found.flops)} in products on {counted(program.mesh.num_devices, 'device')}"
        f"{repeats if found.repeated else ''}. Predicted utilisation (MFU):"
        f" {_percent(found.utilisation)}, which is FLOPs / (modelled time x"
        f" {_flops_text(found.peak)}/s, the peak of all devices for 16-bit"
        f" products). The modelled time, {seconds_text(found.modelled)}, is spent on"
        f" {', '.join(spent) or 'nothing'}. It is computed by a cost model for hardware"
        f" {_hardware(program)}"
    )
    parts = table_of(
        sorted((w for w in found.works if w.total), key=lambda w: -w.total),
        {
            "part": lambda w: w.place,
            "pass": lambda w: w.phase,
            ">FLOPs": lambda w: _flops_text(w.flops),
            ">modelled": lambda w: seconds_text(w.total),
            ">share": lambda w: _percent(w.total / found.total),
            "bound by": lambda w: f"{w.bound} ({_percent(w.seconds[w.bound] / w.total)})",
        },
        shown=SHOWN_ROWS,
        rest=lambda left: f"and {counted(len(left), 'smaller part')}",
    )
    return Section(
        title=f"limits: {_flops_text(found.flops)} per call",
        parts=(text, parts),
    )


def _flops_text(flops: float) -> str:
    """A number of operations with three significant digits and a unit of thousands."""
    thousands = int(min(math.log10(max(flops * 1.0005, 1)) / 3, 6))  # 999.6 K is shown as 1 M
    return f"{flops / 1000**thousands:.3g} {['', *'KMGTPE'][thousands]}FLOP"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
