"""The differences between two plans: settings, costs, types of values, conversions.

The programs need not be the same. Values are matched by the user's names and by the text of their
line, not by its number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sbp import _jax
from sbp.explain.edits import Types
from sbp.explain.names import Names
from sbp.explain.subjects import SourcePlace, Subject, Subjects
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.space import decode, from_type, local_shape
from sbp.limits import Policy, policies_in
from sbp.machine.hardware import Hardware
from sbp.machine.table import HARDWARE
from sbp.plan.program import Cost, Program
from sbp.plan.traffic import Send, sends
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Graph, Node
from sbp.types import Atom, NdSbp

# ---- settings -----------------------------------------------------------------------------------
# The settings that differ between two plans: mesh, hardware, policies, limits, budgets, donation
# and pins.


SettingKind = Literal[
    "function",
    "mesh",
    "hardware",
    "figure",
    "network",
    "boxing",
    "memory limit",
    "budgets",
    "reduce_dtype",
    "donated",
    "policy",
    "input",
    "output",
    "annotation",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting that differs between two plans.

    Arguments:
      kind: which setting. "figure": a figure of the hardware; "network": that of a mesh axis;
        "policy": the policies around a line; "input", "output" and "annotation": a pin.
      subject: the figure, the mesh axis, the text of the line, or the name of the pinned value;
        empty for other kinds.
      this, other: the setting of each plan, by kind. Names, numbers, bytes, budgets and dtypes
        are themselves, or None; a mesh is (mesh axis, size) pairs, hardware a `HardwareName`, a
        figure a number or a `Network`, boxing a `ProgramPolicies`, the policies around a line
        `LinePolicies`, pins `PinnedAtoms` for each pin.
    """

    kind: SettingKind
    subject: str = ""
    this: Any
    other: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareName:
    """A description of hardware by its name.

    Arguments:
      name: the name.
      is_known: whether it has the figures of the table.
    """

    name: str
    is_known: bool

    @classmethod
    def of(cls, hardware: Hardware) -> HardwareName:
        """The name of hardware, the networks of its mesh axes left out."""
        known = HARDWARE.get(hardware.name)
        figures = known is None or dataclasses.replace(hardware, slow_axes=known.slow_axes)
        return cls(name=hardware.name, is_known=known is None or figures == known)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPolicies:
    """The policies of a program: for mesh axes without one of their own, and for each axis."""

    boxing: Policy
    axis_policies: tuple[Policy | None, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, request: Request) -> ProgramPolicies:
        """The policies of a request."""
        policies, axes = request.axis_policies, request.mesh.names
        return cls(boxing=request.boxing, axis_policies=policies, axes=axes)

    def on(self, axis: str) -> Policy:
        """The policy of a mesh axis."""
        own = dict(zip(self.axes, self.axis_policies, strict=False)).get(axis)
        return own or self.boxing


@dataclass(frozen=True, kw_only=True)
class ComparedPlan:
    """One of the two plans that are compared, with the names that its user knows.

    Arguments:
      title: the function's name.
      program: the plan.
      output_names: names of the results.
      donated: names of the inputs that are donated.
    """

    title: str
    program: Program
    output_names: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()

    @functools.cached_property
    def types(self) -> Types:
        """The types of its subjects."""
        return Types.of(self.program, self.program.request.graph)


def settings(this: ComparedPlan, other: ComparedPlan) -> Iterator[Setting]:
    """The settings that differ between two plans."""
    a, b = this.program.request, other.program.request
    yield from _changed("function", this.title, other.title)
    meshes = [tuple(zip(q.mesh.names, q.mesh.sizes, strict=True)) for q in (a, b)]
    yield from _changed("mesh", *meshes)
    yield from _hardware(a.mesh.hardware, b.mesh.hardware)
    ours, theirs = ProgramPolicies.of(a), ProgramPolicies.of(b)
    if any(ours.on(axis) != theirs.on(axis) for axis in (*a.mesh.names, *b.mesh.names)):
        yield Setting(kind="boxing", this=ours, other=theirs)
    yield from _changed("memory limit", a.memory_limit, b.memory_limit)
    yield from _changed("budgets", frozenset(a.budgets), frozenset(b.budgets))
    yield from _changed("reduce_dtype", a.reduce_dtype, b.reduce_dtype)
    yield from _changed("donated", frozenset(this.donated), frozenset(other.donated))
    yield from _regions(a.graph, b.graph)
    pins, others = _pins(this), _pins(other)
    for key in dict.fromkeys((*pins, *others)):
        x, y = pins.get(key, ()), others.get(key, ())
        if x != y:
            kind, name = key
            yield Setting(kind=kind, subject=name, this=x, other=y)


def _changed(kind: SettingKind, this: Any, other: Any) -> Iterator[Setting]:
    if this != other:
        yield Setting(kind=kind, this=this, other=other)


def _hardware(a: Hardware, b: Hardware) -> Iterator[Setting]:
    """Hardware by value: figures of one name may have been replaced, and mesh axes put on networks
    of their own."""
    yield from _changed("hardware", HardwareName.of(a), HardwareName.of(b))
    if a.name == b.name:
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if field.name != "slow_axes" and x != y:
                subject = f"{field.name} of {a.name}"
                yield Setting(kind="figure", subject=subject, this=x, other=y)
    ours, theirs = dict(a.slow_axes), dict(b.slow_axes)
    for axis in sorted(ours.keys() | theirs.keys()):
        if ours.get(axis) != theirs.get(axis):
            yield Setting(kind="network", subject=axis, this=ours.get(axis), other=theirs.get(axis))


LinePolicies = frozenset[tuple[tuple[Policy, str], ...]]
"""The policies around a line, one sequence of (policy, mesh axis) for each way in which the line
was traced under some; the innermost policy first, "" for all axes."""


def _regions(a: Graph, b: Graph) -> Iterator[Setting]:
    """Lines of both programs that stand under policies of their own in one."""
    ours, theirs = _policed(a), _policed(b)
    for key, policies in ours.items():
        other = theirs.get(key, policies)
        if policies != other:
            yield Setting(kind="policy", subject=key[0], this=policies, other=other)


def _policed(graph: Graph) -> dict[tuple[str, str], LinePolicies]:
    """The policies around each line of a program, by its text and function."""
    found: dict[tuple[str, str], LinePolicies] = {}
    for node in graph.walk():
        span = users_span(node)
        text = source_text(span, 44).replace("`", "'")
        if span and text:
            key = text, span.function
            around = tuple(reversed(policies_in(node.scope)))
            found[key] = found.get(key, frozenset()) | ({around} if around else set())
    return found


PinKind = Literal["input", "output", "annotation"]
PinnedAtoms = tuple[tuple[str, Atom], ...]
"""(mesh axis, atom) of a pin."""


def _pins(side: ComparedPlan) -> dict[tuple[PinKind, str], tuple[PinnedAtoms, ...]]:
    """The user's pins by the pinned value, each pin once. Types of inputs and outputs are complete,
    so B is left out there."""
    request = side.program.request
    names = Names.of(request.graph)
    found: dict[tuple[PinKind, str], tuple[PinnedAtoms, ...]] = {}
    for site in pin_sites(request):
        named = site.source == "output" and side.output_names
        name = side.output_names[site.position] if named else names.site(site)
        atoms = tuple(
            (axis, decode(c))
            for axis, c in zip(request.mesh.names, site.codes, strict=True)
            if c is not None and (c != 0 or site.source == "annotation")
        )
        key = site.source, name
        found[key] = tuple(dict.fromkeys((*found.get(key, ()), atoms)))
    return found


# ---- differences --------------------------------------------------------------------------------


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
