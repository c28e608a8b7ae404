"""Program -> flows: the program as a graph of the user's lines, for a picture of it.

A line is one place however often it runs: the layers of a loop, a scan or a module used many times
fold into it, with their count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from sbp.errors import file_name, position_text
from sbp.infer.sends import step_sends
from sbp.infer.space import LOCAL, Code, to_type
from sbp.plan.program import Program
from sbp.report.phases import Phase, first_operation, phases
from sbp.report.wording import axes_text, change_text, without_number
from sbp.source.reader import shortened, users_span
from sbp.source.text import line_text
from sbp.trace.dataflow import Dataflow
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import CONTROL_FLOW, trips_of
from sbp.trace.scopes import scope_names
from sbp.trace.traffic import handwritten_bytes
from sbp.types import NdSbp

Grouping = Literal["line", "function", "scope"]
GROUPINGS: tuple[Grouping, ...] = ("line", "function", "scope")
TEXT_LIMIT = 52
"""Characters of a place's text."""

MOST_PLACES = 90
"""Places above which a picture takes functions or scopes for lines."""

Key = tuple[str, Phase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Collectives of one kind at one place.

    Attributes:
      kind: the collective.
      axes: the mesh axes it runs over, in words.
      change: the atoms before and after, in words.
      runs: per call.
      bytes: that one device sends per call.
      reduces: whether it ends a partial value.
    """

    kind: str
    axes: str
    change: str
    runs: int
    bytes: float
    reduces: bool = False


@dataclass(slots=True, kw_only=True)
class Stop:
    """A place in the program: a line, function or scope of the user in one phase.

    Attributes:
      name: what tells it from others of its phase.
      text: the source line, or the name of the function or scope.
      where: file and line.
      brief: the same without folders.
      phase: forward, backward or update.
      runs: how often its operations run per call: trips of loops, and copies of the line.
      operations: how many there are, each counted once.
      type: of its largest result that another place reads; None where there is none.
      born: whether a value becomes partial here.
      transfers: the collectives that convert what it reads, that run inside its operations, or that
        convert what it makes for the next turn of a loop.
    """

    name: str
    text: str
    where: str
    brief: str
    phase: Phase
    runs: int = 1
    operations: int = 0
    type: NdSbp | None = None
    born: bool = False
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        """Bytes that one device sends here per call."""
        return sum(t.bytes for t in self.transfers)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFlows:
    """The program as places and what flows between them.

    Attributes:
      stops: in program order.
      flows: between them.
      returned: the collectives of results.
      called: bytes that one device sends per call. Of a `cond`, the branch that sends most counts;
        the places have all branches.
      grouping: what a place is.
    """

    stops: tuple[Stop, ...]
    flows: tuple[ValueFlow, ...]
    returned: tuple[Transfer, ...]
    called: float
    grouping: Grouping

    @property
    def bytes(self) -> float:
        """Bytes that one device sends at all places."""
        return sum(s.bytes for s in self.stops) + sum(t.bytes for t in self.returned)


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


def _joined(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Those of one kind, over the same axes and with the same change as one; most bytes first."""
    groups: dict[tuple[str, str, str], list[Transfer]] = {}
    for t in transfers:
        groups.setdefault((t.kind, t.axes, t.change), []).append(t)
    joined = [
        replace(g[0], runs=sum(t.runs for t in g), bytes=sum(t.bytes for t in g))
        for g in groups.values()
    ]
    return sorted(joined, key=lambda t: -t.bytes)


class _FlowWalk:
    """Finds places and flows of one program."""

    def __init__(self, program: Program, key: Callable[[Node], PlaceName]) -> None:
        self.program, self.graph, self._key = program, program.graph, key
        self.phase = phases(self.graph)
        self.stops: dict[Key, Stop] = {}
        self._at: dict[int, Key] = {}
        self._dataflow = Dataflow(self.graph)
        self._copies: dict[Key, Counter[object]] = {}
        self._visit(self.graph, 1)

    def _visit(self, graph: Graph, runs: int) -> None:
        for node in graph.nodes:
            for region in node.regions:
                self._visit(region, runs * trips_of(node))
            if node.op not in CONTROL_FLOW:
                self._add(node, runs)

    def _add(self, node: Node, runs: int) -> None:
        named = self._key(node)
        key = named.name, self.phase[node.id]
        stop = self.stops.setdefault(key, Stop(**named._asdict(), phase=self.phase[node.id]))
        self._at[node.id] = key
        copies = self._copies.setdefault(key, Counter())
        like = node.op, node.span, tuple(self.graph.avals[v].shape for v in node.outputs)
        copies[like] += runs
        stop.runs = max(copies.values())
        stop.operations = len(copies)

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
        returned = self._transfers()
        for stop in self.stops.values():
            stop.transfers = _joined(stop.transfers)
        stops, largest = list(self.stops.values()), dict[int, float]()
        for flow in found.values():
            if flow.source >= 0 and flow.size >= largest.get(flow.source, 0.0):
                largest[flow.source] = flow.size
                stops[flow.source].type = flow.type
        return ProgramFlows(
            stops=tuple(self.stops.values()),
            flows=tuple(found.values()),
            returned=tuple(_joined(returned)),
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

    def _transfers(self) -> list[Transfer]:
        """Puts the collectives where they are needed; gives those of results."""
        returned: list[Transfer] = []
        mesh = self.program.mesh
        for planned in self.program.boxes():
            aval = self.graph.avals[planned.box.target.value]
            # What a loop hands on is shown where it is made.
            handed_on = planned.box.maker if planned.regions else None
            place = self._place(planned.box.reader or handed_on)
            for step in planned.box.steps:
                if step.kind in LOCAL:
                    continue
                for sent in step_sends(step, aval, mesh):
                    ends = any(step.source[k] < 0 <= step.target[k] for k in step.mesh_axes)
                    (returned if place is None else place.transfers).append(
                        Transfer(
                            kind=sent.kind,
                            axes=axes_text(step, mesh),
                            change=change_text(step),
                            runs=planned.trips * sent.rounds,
                            bytes=sent.bytes * planned.trips,
                            reduces=ends,
                        )
                    )
        for operation, runs in self.program.kernels():
            for position, sent in operation.sends:
                self.stops[self._at[operation.node.id]].transfers.append(
                    Transfer(
                        kind=sent.kind,
                        axes=mesh.names[position],
                        change=f"inside {operation.node.name}",
                        runs=runs * sent.rounds,
                        bytes=runs * sent.bytes,
                    )
                )
        for node, runs in self.program.written_by_hand():
            self.stops[self._at[node.id]].transfers.append(
                Transfer(
                    kind="by hand",
                    axes=", ".join(mesh.names),
                    change="in a manual region",
                    runs=runs,
                    bytes=runs * handwritten_bytes(node),
                )
            )
        return returned

    def _place(self, node: Node | None) -> Stop | None:
        """The place of an operation, of a loop that of the first one in it."""
        first = first_operation(node)
        return None if first is None else self.stops[self._at[first.id]]


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
