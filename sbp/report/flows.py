"""Program -> flows: the program as a graph of the user's lines, for a picture of it.

A line is one place however often it runs: the layers of a loop, a scan or a module used many times
fold into it, with their count.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from sbp.errors import Span, file_name, position_text
from sbp.infer.space import Code, to_type
from sbp.plan.program import Program
from sbp.plan.traffic import PHASES, Phase, Phases, Send, sends
from sbp.report.wording import without_number
from sbp.source.reader import shortened, users_span
from sbp.source.text import line_text
from sbp.trace.dataflow import Dataflow
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import CONTROL_FLOW, trips_of
from sbp.trace.scopes import scope_names
from sbp.types import NdSbp

Grouping = Literal["line", "function", "scope"]
GROUPINGS: tuple[Grouping, ...] = ("line", "function", "scope")
TEXT_LIMIT = 52
"""Characters of a place's text."""

MOST_PLACES = 90
"""Places above which a picture takes functions or scopes for lines."""

Moment = Phase | Literal["returned"]
MOMENTS: tuple[Moment, ...] = (*PHASES, "returned")
"""The passes of a step; last the conversions of results."""

Key = tuple[str, Phase]


@dataclass(slots=True, kw_only=True)
class Stop:
    """A place in the program: a line, function or scope of the user in one phase.

    Attributes:
      name: what tells it from others of its phase.
      text: the source line, or the name of the function or scope.
      where: file and line.
      brief: the same without folders.
      phase: forward, backward or update; `returned` for the results.
      runs: how often it runs per call, by the trips of loops and the turns of Python's loops.
      operations: how many there are, each counted once.
      type: of its largest result that another place reads; None where there is none.
      born: whether a value becomes partial here.
      sends: its collectives (`sbp.plan.traffic.Phases.place`).
    """

    name: str
    text: str
    where: str = ""
    brief: str = ""
    phase: Moment
    runs: int = 1
    operations: int = 0
    type: NdSbp | None = None
    born: bool = False
    sends: list[Send] = field(default_factory=list[Send])

    @property
    def bytes(self) -> float:
        """Bytes that one device sends here per call."""
        return sum(send.bytes for send in self.sends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFlow:
    """Values that one place makes and another one reads.

    Attributes:
      source, target: positions among the stops; -1 for the arguments, and for the results.
      type: of the largest of them as it is made.
      size: bytes of that one, whole.
      partial: whether one of them is partial.
    """

    source: int
    target: int
    type: NdSbp
    size: float
    partial: bool


@dataclass(frozen=True, kw_only=True)
class ProgramFlows:
    """The program as places and what flows between them.

    Attributes:
      stops: in program order.
      flows: between them.
      results: the place of the collectives that convert results.
      called: bytes that one device sends per call. Of a `cond`, the branch that sends most counts;
        the places have all branches.
      grouping: what a place is.
    """

    stops: tuple[Stop, ...]
    flows: tuple[ValueFlow, ...]
    results: Stop
    called: float
    grouping: Grouping

    @property
    def bytes(self) -> float:
        """Bytes that one device sends at all places."""
        return sum(stop.bytes for stop in (*self.stops, self.results))

    @functools.cached_property
    def places(self) -> dict[str, list[Stop]]:
        """The stops that send something, by the names of their places."""
        found: dict[str, list[Stop]] = {}
        for stop in (*self.stops, self.results):
            if stop.bytes:
                found.setdefault(stop.name, []).append(stop)
        return found

    @functools.cached_property
    def costliest(self) -> list[Stop]:
        """The place that most bytes are sent for; empty where nothing is sent."""
        return max(self.places.values(), key=lambda stops: sum(s.bytes for s in stops), default=[])

    def sums(self, row: Callable[[Stop], str]) -> dict[tuple[str, str], float]:
        """Bytes by mesh axes and a property of stops."""
        found = defaultdict[tuple[str, str], float](float)
        for stops in self.places.values():
            for stop in stops:
                for send in stop.sends:
                    found[send.axes, row(stop)] += send.bytes
        return found


def program_flows(program: Program, grouping: Grouping = "line") -> ProgramFlows:
    """The places of a program and the values between them.

    Arguments:
      program: the plan.
      grouping: what a place is: a line, a function, or a scope of `jax.named_scope` and modules.
    """
    return _FlowWalk(program, PLACE_NAMES[grouping]).flows(grouping)


class PlaceName(NamedTuple):
    """What a place is called: see `Stop`."""

    name: str
    text: str
    where: str = ""
    brief: str = ""


def _brief(path: str) -> str:
    """A path whose name in reports has no folder; cells of notebooks keep theirs."""
    name = file_name(path)
    return path if name.startswith("Cell") else Path(path).name


def _line(node: Node) -> PlaceName:
    span = users_span(node)
    if span is None:
        return PlaceName("", "(no source)")
    text = (line_text(span.file, span.line) or "").strip()
    return PlaceName(
        f"{span.file}:{span.line}",
        shortened(text, TEXT_LIMIT) or "(no source)",
        position_text(span.file, span.line),
        position_text(_brief(span.file), span.line),
    )


def _function(node: Node) -> PlaceName:
    span = users_span(node)
    if span is None:
        return PlaceName("", "(no source)")
    name, brief = file_name(span.file), file_name(_brief(span.file))
    return PlaceName(f"{span.file}:{span.function}", span.function or "module level", name, brief)


def _scope(node: Node) -> PlaceName:
    name = "/".join(without_number(n) for n in scope_names(node.scope) if "->" not in n)
    return PlaceName(name, shortened(name, TEXT_LIMIT) or "(no scope)")


PLACE_NAMES: dict[Grouping, Callable[[Node], PlaceName]] = {
    "line": _line,
    "function": _function,
    "scope": _scope,
}
"""The place of a node in each grouping."""


def merge(found: Iterable[Send]) -> list[Send]:
    """Collectives of one kind, over the same axes and with the same change as one; most bytes
    first."""
    groups: dict[tuple[str, str, str], Send] = {}
    for send in found:
        key = send.kind, send.axes, send.change
        old = groups.setdefault(key, send._replace(runs=0, bytes=0.0))
        groups[key] = old._replace(runs=old.runs + send.runs, bytes=old.bytes + send.bytes)
    return sorted(groups.values(), key=lambda send: -send.bytes)


class _FlowWalk:
    """Finds places and flows of one program."""

    def __init__(self, program: Program, key: Callable[[Node], PlaceName]) -> None:
        self.program, self.graph, self._key = program, program.graph, key
        self.phase = Phases(self.graph).of
        self.stops: dict[Key, Stop] = {}
        self._at: dict[int, Key] = {}
        self._dataflow = Dataflow(self.graph)
        self._copies = defaultdict[Key, dict[Span | None, Counter[str]]](
            lambda: defaultdict(Counter)
        )
        self._sends = defaultdict[int | None, list[Send]](list)
        for send in sends(program):
            self._sends[None if send.is_returned or not send.node else send.node.id].append(send)
        self._visit(self.graph, 1)

    def _visit(self, graph: Graph, runs: int) -> None:
        for node in graph.nodes:
            named = self._key(node)
            for send in self._sends[node.id]:
                self._stop(named, send.phase).sends.append(send)
            if node.op not in CONTROL_FLOW:
                self._stop(named, self.phase[node.id])
                self._at[node.id] = named.name, self.phase[node.id]
                self._copies[self._at[node.id]][node.span][node.op] += runs
            for region in node.regions:
                self._visit(region, runs * trips_of(node))

    def _stop(self, named: PlaceName, phase: Phase) -> Stop:
        return self.stops.setdefault((named.name, phase), Stop(**named._asdict(), phase=phase))

    def _count(self) -> None:
        """Finds how often each place runs. An expression that runs once may have several operations
        of one name, which a library makes, but as a rule one that is alone. A gradient runs as
        often as its line."""
        for key, copies in self._copies.items():
            self.stops[key].operations = sum(map(len, copies.values()))
            self.stops[key].runs = max(min(count.values()) for count in copies.values())
        for (name, phase), stop in self.stops.items():
            if phase == "backward" and (name, "forward") in self.stops:
                stop.runs = self.stops[name, "forward"].runs

    def flows(self, grouping: Grouping) -> ProgramFlows:
        """The result."""
        found: dict[tuple[int, int], ValueFlow] = {}
        number = {key: n for n, key in enumerate(self.stops)}
        for node in self.graph.walk():
            if node.op in CONTROL_FLOW:
                continue
            key = self._at[node.id]
            self._births(node, self.stops[key])
            for operand in node.inputs:
                self._flow(found, number, operand, number[key])
        for operand in self.graph.outputs:
            self._flow(found, number, operand, -1)
        self._count()
        for stop in self.stops.values():
            stop.sends = merge(stop.sends)
        stops, largest = list(self.stops.values()), dict[int, float]()
        for flow in found.values():
            if flow.source >= 0 and flow.size >= largest.get(flow.source, 0.0):
                largest[flow.source] = flow.size
                stops[flow.source].type = flow.type
        returned = merge(self._sends[None])
        return ProgramFlows(
            stops=tuple(self.stops.values()),
            flows=tuple(found.values()),
            results=Stop(name="<results>", text="results", phase="returned", sends=returned),
            called=self.program.cost.bytes_per_device,
            grouping=grouping,
        )

    def _flow(
        self,
        found: dict[tuple[int, int], ValueFlow],
        number: dict[Key, int],
        operand: Operand,
        target: int,
    ) -> None:
        for value in self._dataflow.sources(operand):
            node = self._dataflow.makers.get(value)
            source = -1 if node is None else number[self._at[node.id]]
            if source == target:
                continue
            codes = self.program.typing.values[value]
            aval = self.graph.avals[value]
            new = ValueFlow(
                source=source,
                target=target,
                type=to_type(codes, self.program.mesh),
                size=float(aval.size * aval.dtype.itemsize) if aval.shape else 0.0,
                partial=any(c < 0 for c in codes),
            )
            old = found.get((source, target))
            if old is None or new.size > old.size or (new.partial and not old.partial):
                found[source, target] = new

    def _births(self, node: Node, stop: Stop) -> None:
        """Whether an operation makes a value partial whose operands are not."""
        row = self.program.typing.rows[node.id]
        for k in range(len(self.program.mesh.sizes)):
            ins: list[Code] = [codes[k] for codes in row.ins]
            stop.born |= any(codes[k] < 0 for codes in row.outs) and all(c >= 0 for c in ins)


def traffic(program: Program) -> ProgramFlows:
    """The flows of a program by the scopes of `jax.named_scope` and of modules; by functions where
    everything that sends stands in one scope.

    Arguments:
      program: the plan.
    """
    found = program_flows(program, "scope")
    scopes = found.places.keys() - {found.results.name}
    return found if len(scopes) > 1 else program_flows(program, "function")


def folded(program: Program, grouping: Grouping | None = None) -> ProgramFlows:
    """The flows of a program by lines; where there are too many, by functions or scopes.

    Arguments:
      program: the plan.
      grouping: what a place is; None to choose.
    """
    if grouping is not None:
        return program_flows(program, grouping)
    found = [program_flows(program, g) for g in GROUPINGS[:1]]
    if len(found[0].stops) > MOST_PLACES:
        found += [program_flows(program, g) for g in GROUPINGS[1:]]
    fitting = [f for f in found if 3 < len(f.stops) <= MOST_PLACES]
    return fitting[0] if fitting else min(found, key=lambda f: (len(f.stops) <= 3, len(f.stops)))
