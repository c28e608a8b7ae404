"""The differences between two plans: settings, costs, types of values, conversions.

The programs need not be the same. Values are matched by the user's names and by the text of their
line, not by its number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sbp import _jax
from sbp.explain.names import Names
from sbp.explain.places import SourcePlace
from sbp.explain.settings import ComparedPlan, Setting, settings
from sbp.explain.subjects import Subject, Subjects
from sbp.infer.space import Code, Step, from_type, local_shape
from sbp.plan.program import Cost, Program
from sbp.source.reader import source_text
from sbp.trace.graph import Node
from sbp.trace.traffic import handwritten_bytes
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """A value in one plan.

    Arguments:
      type, shape: its type and whole shape.
      bytes_per_device: bytes of one device's shard.
      place: its line; None for inputs and outputs.
    """

    type: NdSbp
    shape: tuple[int, ...]
    bytes_per_device: float
    place: SourcePlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A value whose type is not the same in both plans.

    Arguments:
      name: the user's name or expression.
      is_gradient: whether it is the gradient of that expression.
      this, other: the value in each plan.
    """

    name: str
    is_gradient: bool = False
    this: ComparedValue
    other: ComparedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that one plan sends in collectives of one kind at one place.

    Arguments:
      runs: executions per call.
      bytes_per_device: bytes that one device sends per call.
    """

    runs: int
    bytes_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficEnd:
    """The maker or the reader of a value that is sent.

    Arguments:
      op: the operation; empty for an argument and for the end of a body or of the program.
      text: the user's expression, or the name of an argument; empty where there is none.
      gradient: whether it belongs to a backward pass.
    """

    op: str = ""
    text: str = ""
    gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficKey:
    """Collectives that two plans may have in common.

    Arguments:
      kind: the collective; "by hand" for the collectives of a region written by hand.
      mesh_axes: names of its mesh axes.
      before, after: of a conversion, the codes on those axes; empty for other collectives.
      maker: the maker of the value, or the operation that sends.
      reader: the reader of the value; None where an operation sends itself.
      kernel: of an operation that sends itself, its kernel.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    before: tuple[Code, ...] = ()
    after: tuple[Code, ...] = ()
    maker: TrafficEnd
    reader: TrafficEnd | None = None
    kernel: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDifference:
    """Collectives that the plans do not have alike.

    Arguments:
      key: which collectives.
      made_at, read_at: the lines of the maker and of the reader; None where there is no node.
      this, other: the traffic of each plan; None where it has none.
    """

    key: TrafficKey
    made_at: SourcePlace | None
    read_at: SourcePlace | None
    this: Traffic | None
    other: Traffic | None

    @property
    def bytes_more(self) -> float:
        """Bytes that the other plan sends beyond this one."""
        return (self.other.bytes_per_device if self.other else 0.0) - (
            self.this.bytes_per_device if self.this else 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs between two plans; each list has most bytes first.

    Arguments:
      titles: the functions.
      settings: what was asked differently.
      costs: of a call of each.
      inputs, outputs, values: types that differ, by name.
      sent: collectives that differ.
      matched: number of values that both have, inputs and outputs included.
      unmatched: number of values that only one has, for each.
    """

    titles: tuple[str, str]
    settings: tuple[Setting, ...]
    costs: tuple[Cost, Cost]
    inputs: tuple[ValueDifference, ...]
    outputs: tuple[ValueDifference, ...]
    values: tuple[ValueDifference, ...]
    sent: tuple[TrafficDifference, ...]
    matched: int
    unmatched: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return (
            not (self.settings or self.inputs or self.outputs or self.values or self.sent)
            and self.costs[0] == self.costs[1]
        )


def compare(this: ComparedPlan, other: ComparedPlan) -> Difference:
    """The differences of another plan from this one."""
    inputs, outputs, values = (
        (named(this), named(other)) for named in (_inputs, _outputs, _values)
    )
    pairs = (inputs, outputs, values)
    return Difference(
        titles=(this.title, other.title),
        settings=tuple(settings(this, other)),
        costs=(this.program.cost, other.program.cost),
        inputs=_differing(*inputs),
        outputs=_differing(*outputs),
        values=_differing(*values),
        sent=_traffic(this.program, other.program),
        matched=sum(len(a.keys() & b.keys()) for a, b in pairs),
        unmatched=(
            sum(len(a.keys() - b.keys()) for a, b in pairs),
            sum(len(b.keys() - a.keys()) for a, b in pairs),
        ),
    )


# ---- values -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueKey:
    """The key by which values of two programs are matched.

    Arguments:
      label: the user's name or expression.
      gradient: whether it is a gradient.
      number: which of the values with that label.
      function: the function it stands in; empty for inputs and outputs.
    """

    label: str
    gradient: bool = False
    number: int = 0
    function: str = ""


def _compared(side: ComparedPlan, subject: Subject) -> ComparedValue:
    program = side.program
    t = side.types.type_of(subject)
    aval = side.program.request.graph.avals[subject.values[0]]
    local = local_shape(aval.shape, from_type(t, program.mesh), program.mesh.sizes)
    size = float(math.prod(local) * _jax.itemsize(aval.dtype))
    return ComparedValue(
        type=t, shape=tuple(aval.shape), bytes_per_device=size, place=subject.place
    )


def _inputs(side: ComparedPlan) -> dict[ValueKey, ComparedValue]:
    graph = side.program.request.graph
    pairs = zip(graph.inputs, graph.input_names, strict=False)
    return {
        ValueKey(name): _compared(
            side, Subject(label=name, kind="input", values=(value,), position=number)
        )
        for number, (value, name) in enumerate(pairs)
    }


def _outputs(side: ComparedPlan) -> dict[ValueKey, ComparedValue]:
    pairs = zip(side.program.request.graph.outputs, side.output_names, strict=False)
    return {
        ValueKey(name): _compared(
            side, Subject(label=name, kind="output", values=(operand,), position=number)
        )
        for number, (operand, name) in enumerate(pairs)
        if isinstance(operand, int)
    }


def _values(side: ComparedPlan) -> dict[ValueKey, ComparedValue]:
    """The values that the expressions of a program make. Each value belongs to its innermost
    expression; values with one label are numbered in order."""
    subjects = Subjects.of(side.program.request.graph, side.output_names)
    seen: set[tuple[int, ...]] = set()
    found: list[Subject] = []
    for place in sorted(subjects.places.values(), key=lambda p: len(p.nodes)):
        for subject in subjects.subjects_of(place):
            if subject.values not in seen and any(
                v in side.program.typing.values for v in subject.values
            ):
                seen.add(subject.values)
                found.append(subject)
    count: Counter[ValueKey] = Counter()
    keyed: dict[ValueKey, ComparedValue] = {}
    for subject in sorted(found, key=lambda s: s.values[0]):
        assert subject.frame is not None
        key = ValueKey(subject.label, subject.gradient, function=subject.frame.function)
        keyed[replace(key, number=count[key])] = _compared(side, subject)
        count[key] += 1
    return keyed


def _differing(
    ours: Mapping[ValueKey, ComparedValue], theirs: Mapping[ValueKey, ComparedValue]
) -> tuple[ValueDifference, ...]:
    """Values of both plans whose types differ, most bytes first."""
    found = [
        ValueDifference(name=key.label, is_gradient=key.gradient, this=value, other=theirs[key])
        for key, value in ours.items()
        if key in theirs and theirs[key].type != value.type
    ]
    return tuple(
        sorted(found, key=lambda d: -max(d.this.bytes_per_device, d.other.bytes_per_device))
    )


# ---- traffic ------------------------------------------------------------------------------------


def _traffic(this: Program, other: Program) -> tuple[TrafficDifference, ...]:
    ours, theirs = _Sending.of(this), _Sending.of(other)
    found: list[TrafficDifference] = []
    for key in dict.fromkeys((*ours.traffic, *theirs.traffic)):
        here, there = ours.traffic.get(key), theirs.traffic.get(key)
        if here != there:
            made_at, read_at = (ours if here else theirs).places[key]
            found.append(
                TrafficDifference(key=key, made_at=made_at, read_at=read_at, this=here, other=there)
            )
    return tuple(sorted(found, key=lambda d: -abs(d.bytes_more)))


@dataclass(frozen=True, slots=True)
class _Sending:
    """The traffic of a plan, with the first place of the maker and of the reader of each key."""

    traffic: dict[TrafficKey, Traffic]
    places: dict[TrafficKey, tuple[SourcePlace | None, SourcePlace | None]]

    @classmethod
    def of(cls, program: Program) -> _Sending:
        """Reads it off a plan."""
        found = cls({}, {})
        found.add_conversions(program)
        mesh = program.mesh
        for operation, runs in program.kernels():
            for position, sent in operation.sends:
                node = operation.node
                key = TrafficKey(
                    kind=sent.kind,
                    mesh_axes=(mesh.names[position],),
                    maker=_end(node),
                    kernel=operation.row.kernels[position],
                )
                one = Traffic(runs=runs * sent.rounds, bytes_per_device=runs * sent.bytes)
                found.add(key, one, node)
        for node, runs in program.written_by_hand():
            maker = replace(_end(node), gradient=False)
            key = TrafficKey(kind="by hand", mesh_axes=mesh.names, maker=maker)
            one = Traffic(runs=runs, bytes_per_device=runs * handwritten_bytes(node))
            found.add(key, one, node)
        return found

    def add_conversions(self, program: Program) -> None:
        """Adds the traffic of a plan's conversions."""
        names = Names.of(program.graph)
        for planned in program.boxes():
            box = planned.box
            argument = TrafficEnd(text=names.value(box.source.value))
            for step in box.steps:
                if step.bytes_sent:
                    before, after = _atoms(step)
                    key = TrafficKey(
                        kind=step.kind,
                        mesh_axes=tuple(program.mesh.names[i] for i in step.mesh_axes),
                        before=before,
                        after=after,
                        maker=_end(box.maker) if box.maker else argument,
                        reader=_end(box.reader) if box.reader else TrafficEnd(),
                    )
                    sent = step.bytes_sent * planned.trips
                    one = Traffic(runs=planned.trips, bytes_per_device=sent)
                    self.add(key, one, box.maker, box.reader)

    def add(
        self, key: TrafficKey, one: Traffic, maker: Node | None, reader: Node | None = None
    ) -> None:
        """Adds the traffic of one place.

        Arguments:
          key: the key of the place.
          one: the traffic.
          maker, reader: the nodes that make and read the value.
        """
        old = self.traffic.get(key, Traffic(runs=0, bytes_per_device=0.0))
        self.traffic[key] = Traffic(
            runs=old.runs + one.runs, bytes_per_device=old.bytes_per_device + one.bytes_per_device
        )
        at = (maker and SourcePlace.of(maker), reader and SourcePlace.of(reader))
        self.places.setdefault(key, at)


def _end(node: Node) -> TrafficEnd:
    text = source_text(node.span, 44).replace("`", "'")
    return TrafficEnd(op=node.name, text=text, gradient=node.backward)


def _atoms(step: Step) -> tuple[tuple[Code, ...], tuple[Code, ...]]:
    """The codes on a step's mesh axes before and after it, each once."""
    before, after = (
        tuple(dict.fromkeys(codes[i] for i in step.mesh_axes))
        for codes in (step.source, step.target)
    )
    return before, after
