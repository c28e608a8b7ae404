"""The differences between two plans: settings, costs, types of values, conversions.

The programs need not be the same. Values are matched by the user's names and by the text of their
line, not by its number.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sbp import _jax
from sbp.explain.names import Names
from sbp.explain.places import SourcePlace
from sbp.explain.settings import ComparedPlan, Setting, settings
from sbp.explain.subjects import Subject, Subjects
from sbp.infer.space import from_type, local_shape
from sbp.plan.program import Cost, Program
from sbp.plan.traffic import Send, sends
from sbp.source.reader import source_text
from sbp.trace.graph import Node
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
      kind: the collective.
      mesh_axes: names of its mesh axes.
      change: the atoms before and after a conversion; of another collective, where it runs.
      maker: the maker of the value, or the operation that sends.
      reader: the reader of the value; None where an operation sends itself.
      kernel: of an operation that sends itself, its kernel.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    change: str
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
    ours, theirs = _sends(this), _sends(other)
    found: list[TrafficDifference] = []
    for key in dict.fromkeys((*ours, *theirs)):
        here, there = _summed(ours.get(key, [])), _summed(theirs.get(key, []))
        if here != there:
            first = (ours.get(key) or theirs[key])[0]
            made_at, read_at = (n and SourcePlace.of(n) for n in (first.maker, first.reader))
            found.append(
                TrafficDifference(key=key, made_at=made_at, read_at=read_at, this=here, other=there)
            )
    return tuple(sorted(found, key=lambda d: -abs(d.bytes_more)))


def _sends(program: Program) -> dict[TrafficKey, list[Send]]:
    """The collectives of a plan by what they may have in common with another plan's."""
    names, found = Names.of(program.graph), defaultdict[TrafficKey, list[Send]](list)
    for send in sends(program):
        maker, reader = send.maker and _end(send.maker), None
        if send.planned is not None:
            maker = maker or TrafficEnd(text=names.value(send.planned.box.source.value))
            reader = _end(send.reader) if send.reader else TrafficEnd()
        assert maker is not None
        key = TrafficKey(
            kind=send.kind,
            mesh_axes=send.mesh_axes,
            change=send.change,
            maker=maker,
            reader=reader,
            kernel=send.kernel,
        )
        found[key].append(send)
    return found


def _summed(found: Sequence[Send]) -> Traffic | None:
    if not found:
        return None
    sent = sum(send.bytes for send in found)
    return Traffic(runs=sum(send.runs for send in found), bytes_per_device=sent)


def _end(node: Node) -> TrafficEnd:
    text = source_text(node.span, 44).replace("`", "'")
    return TrafficEnd(op=node.name, text=text, gradient=node.backward)
