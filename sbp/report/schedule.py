"""Program -> its modelled schedule: when a device computes, and when it waits for the links along
each mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sbp.infer.cost import exchanges, local_seconds
from sbp.machine.mesh import MeshSpec
from sbp.plan.ir import Apply, Block, Box, Loop
from sbp.plan.program import Program
from sbp.plan.traffic import PHASES, Phase, Phases
from sbp.report.flows import PLACE_NAMES
from sbp.trace.graph import Node
from sbp.trace.regions import LOOPS, trips_are_assumed

Bound = Literal["compute", "memory", "link"]
"""What an interval is spent on: floating-point operations, a memory of the device or of its host,
or links between devices."""


OWN_LANE = "compute"
"""The name of the lane of a device's own work, bound by products or by memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Time that one device spends on one thing. All runs of a loop's body are one interval.

    Attributes:
      start, seconds: modelled; `start` is 0 where the call begins.
      waited: of these seconds, those that the step waits for; the others run beside its work.
      bound: what they are spent on.
      axes: positions of the mesh axes whose links are used; empty for local work.
      what: the collective or the operation.
      node: the operation that it belongs to; for a conversion its reader. None for a result that is
        an argument.
      phase: forward, backward or update.
      runs: how often it runs per call. A branch of a `cond` runs a part of a time.
      instruction: the instruction.
    """

    start: float
    seconds: float
    waited: float
    bound: Bound
    axes: tuple[int, ...]
    what: str
    node: Node | None
    phase: Phase
    runs: float
    instruction: Apply | Box


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopInterval:
    """Time of a loop.

    Attributes:
      start, seconds: modelled.
      node: the loop.
      trips: runs of its body.
      assumed: whether the number of trips is assumed.
      depth: how many loops are around it.
    """

    start: float
    seconds: float
    node: Node
    trips: int
    assumed: bool
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The modelled schedule of a program.

    Attributes:
      intervals: in program order; what runs beside an operation comes after it.
      loops: the outer ones before those inside them.
      seconds: from the first to the last; the sum of the seconds that the step waits for.
      branches: how many conditionals there are; each branch has an equal part of a run.
      by_hand: how many regions written by hand there are, whose time is not modelled.
    """

    intervals: tuple[Interval, ...]
    loops: tuple[LoopInterval, ...]
    seconds: float
    branches: int
    by_hand: int


def schedule(program: Program) -> Schedule:
    """The schedule that the cost model gives a program: its instructions one after another, but for
    exchanges that run beside the products that use them."""
    return _Clock(program).schedule()


class _Spending(NamedTuple):
    """What one run of an instruction is spent on; see `Interval`."""

    what: str
    seconds: float
    bound: Bound
    axes: tuple[int, ...]


class _Clock:
    """Runs a program in modelled time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.phases = Phases(program.graph)
        self.now = 0.0
        self.loops: list[LoopInterval] = []
        self.branches = 0
        self.around: list[Node] = []

    def schedule(self) -> Schedule:
        """The result."""
        intervals = tuple(self._block(self.program.block, 1.0))
        return Schedule(
            intervals=intervals,
            loops=tuple(sorted(self.loops, key=lambda loop: (loop.start, loop.depth))),
            seconds=self.now,
            branches=self.branches,
            by_hand=len(self.program.written_by_hand()),
        )

    def _block(self, block: Block, runs: float) -> Iterator[Interval]:
        for instruction in block.instructions:
            match instruction:
                case Box():
                    yield from self._box(instruction, runs)
                case Loop(node=node, blocks=blocks, trips=trips):
                    start, is_loop = self.now, node.op in LOOPS
                    share = trips if is_loop else 1 / len(blocks)
                    self.branches += not is_loop
                    self.around.append(node)
                    for inner in blocks:
                        yield from self._block(inner, runs * share)
                    self.around.pop()
                    if is_loop:
                        self.loops.append(
                            LoopInterval(
                                start=start,
                                seconds=self.now - start,
                                node=node,
                                trips=trips,
                                assumed=trips_are_assumed(node),
                                depth=sum(n.op in LOOPS for n in self.around),
                            )
                        )
                case Apply():
                    if instruction.row.kernels:
                        yield from self._apply(instruction, runs)

    def _box(self, box: Box, runs: float) -> Iterator[Interval]:
        for step in box.steps:
            axes = step.mesh_axes if step.bytes_sent else ()
            bound: Bound = "link" if axes else "memory"
            yield self._next(box, runs, _Spending(step.kind, step.seconds, bound, axes))

    def _apply(self, done: Apply, runs: float) -> Iterator[Interval]:
        graph, mesh, node = self.program.graph, self.program.mesh, done.node
        begin = self.now
        found = list(exchanges(graph, node, done.row, mesh)) if done.sends else []
        for one in found:
            if one.before:
                spent = _Spending(one.kind, one.before, "link", (one.position,))
                yield self._next(done, runs, spent)
        shares = self.program.typing.graph_request.memory_shares
        local = local_seconds(graph, node, done.row, mesh, shares)
        bound: Bound = "compute" if local.compute >= local.memory else "memory"
        yield self._next(done, runs, _Spending(node.name, max(local), bound, ()))
        for one in found:
            if one.beside:
                spent = _Spending(one.kind, one.beside, "link", (one.position,))
                late = max(0.0, begin + runs * one.beside - self.now)
                yield self._interval(done, runs, spent, (begin, late))
                self.now += late

    def _next(self, instruction: Apply | Box, runs: float, spent: _Spending) -> Interval:
        """What runs now, and all that follows waits for."""
        start, taken = self.now, runs * spent.seconds
        self.now += taken
        return self._interval(instruction, runs, spent, (start, taken))

    def _interval(
        self, instruction: Apply | Box, runs: float, spent: _Spending, times: tuple[float, float]
    ) -> Interval:
        node, phase = self.phases.place(instruction, self.around)
        start, waited = times
        return Interval(
            start=start,
            seconds=runs * spent.seconds,
            waited=waited,
            bound=spent.bound,
            axes=spent.axes,
            what=spent.what,
            node=node,
            phase=phase,
            runs=runs,
            instruction=instruction,
        )


def lane_of(interval: Interval, mesh: MeshSpec) -> str:
    """The lane that an interval is in: the device's own, or `link` with the names of mesh axes."""
    names = ", ".join(mesh.names[k] for k in interval.axes)
    return f"link {names}" if names else OWN_LANE


def lane_seconds(program: Program, found: Schedule) -> dict[str, dict[Phase, float]]:
    """Modelled seconds that the step waits for, by lane and phase. A collective over several mesh
    axes has a lane of its own here.

    Arguments:
      program: the plan.
      found: its schedule.
    """
    sums: dict[str, dict[Phase, float]] = {OWN_LANE: dict.fromkeys(PHASES, 0.0)}
    for interval in found.intervals:
        row = sums.setdefault(lane_of(interval, program.mesh), dict.fromkeys(PHASES, 0.0))
        row[interval.phase] += interval.waited
    return sums


class Cause(NamedTuple):
    """What intervals with the same cause take together.

    Attributes:
      what: the collective or the operation.
      text: the source text of its line.
      where: file and line.
      phase: forward, backward or update.
      axes: positions of the mesh axes of a collective; empty for local work.
      runs: how often it runs per call.
      seconds: modelled seconds that the step waits for it.
    """

    what: str
    text: str
    where: str
    phase: Phase
    axes: tuple[int, ...]
    runs: float = 0.0
    seconds: float = 0.0


def causes(found: Schedule) -> list[Cause]:
    """What the step waits for, the longest first. Operations, and conversions for them, are put
    together by line, pass, name and mesh axes."""
    sums: dict[Cause, Cause] = {}
    for one in found.intervals:
        cause = cause_of(one)
        old = sums.get(cause, cause)
        sums[cause] = old._replace(runs=old.runs + one.runs, seconds=old.seconds + one.waited)
    return sorted((c for c in sums.values() if c.seconds > 0), key=lambda c: -c.seconds)


def cause_of(interval: Interval) -> Cause:
    """What an interval is put together with others by, without runs and seconds."""
    return Cause(interval.what, *line_of(interval), interval.phase, interval.axes)


def line_of(interval: Interval) -> tuple[str, str]:
    """The text of an interval's line, and where it stands."""
    if interval.node is None:
        return "(results)", ""
    place = PLACE_NAMES["line"](interval.node)
    return place.text, place.where
