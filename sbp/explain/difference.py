"""What differs between two plans: what was asked, what they cost, the types of values, the
conversions.

The programs need not be the same: values are matched by what the user calls them and the text of
their line, not by its number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.explain.names import Names, pinned_text
from sbp.explain.pinning import Types
from sbp.explain.subjects import Subject, Subjects
from sbp.handwritten.traffic import handwritten_bytes
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Step, decode, from_type, local_shape
from sbp.limits import Budget, policies_in, policies_text
from sbp.machine.hardware import HARDWARE, Hardware, Network
from sbp.machine.mesh import MeshSpec
from sbp.plan.ir import Apply, Block, Loop
from sbp.plan.program import Cost, Program
from sbp.plan.text import node_place
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Graph, Node
from sbp.types import NdSbp


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two plans.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A value in one plan.

    Arguments:
      type, shape: its type and whole shape.
      bytes_per_device: what one device holds of it.
      where: its line.
    """

    type: NdSbp
    shape: tuple[int, ...]
    bytes_per_device: float
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A value whose type is not the same in both plans."""

    name: str
    this: Held
    other: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one plan sends in conversions of one kind at one place: how often, and bytes one device
    sends per call."""

    runs: int
    bytes_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SentDifference:
    """Conversions that the plans do not have alike; None where a plan has none.

    Arguments:
      kind, mesh_axes, change: the collective, its mesh axes, and what becomes of the atoms on them.
      place: who makes and who reads what is sent.
      this, other: what each plan sends.
    """

    kind: str
    mesh_axes: str
    change: str
    place: str
    this: Sent | None
    other: Sent | None

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
      settings: what was asked differently: (what, here, there); the hardware by value, policies,
          limits, donation and pins.
      costs: of a call of each.
      inputs, outputs, values: types that differ, by name.
      sent: conversions that differ.
      matched: values that both have, inputs and outputs included.
      unmatched: values that only one has, in each.
    """

    titles: tuple[str, str]
    settings: tuple[tuple[str, str, str], ...]
    costs: tuple[Cost, Cost]
    inputs: tuple[ValueDifference, ...]
    outputs: tuple[ValueDifference, ...]
    values: tuple[ValueDifference, ...]
    sent: tuple[SentDifference, ...]
    matched: int
    unmatched: tuple[int, int]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return (
            not (self.settings or self.inputs or self.outputs or self.values or self.sent)
            and self.costs[0] == self.costs[1]
        )


def compare(this: Side, other: Side) -> Difference:
    """The differences of another plan from this one."""
    ours, theirs = _boundary(this), _boundary(other)
    mine, yours = _values(this), _values(other)
    counts = [
        (len(a.keys() & b.keys()), len(a.keys() - b.keys()), len(b.keys() - a.keys()))
        for a, b in ((ours, theirs), (mine, yours))
    ]
    boundary = _differing(
        {k[1]: v for k, v in ours.items() if k[0] == "input"},
        {k[1]: v for k, v in theirs.items() if k[0] == "input"},
    )
    returned = _differing(
        {k[1]: v for k, v in ours.items() if k[0] == "output"},
        {k[1]: v for k, v in theirs.items() if k[0] == "output"},
    )
    return Difference(
        titles=(this.title, other.title),
        settings=tuple(_settings(this, other)),
        costs=(this.program.cost, other.program.cost),
        inputs=boundary,
        outputs=returned,
        values=_differing(
            {_called(k): v for k, v in mine.items()}, {_called(k): v for k, v in yours.items()}
        ),
        sent=_sent(this.program, other.program),
        matched=sum(c[0] for c in counts),
        unmatched=(sum(c[1] for c in counts), sum(c[2] for c in counts)),
    )


# ---- what was asked -----------------------------------------------------------------------------


def _settings(this: Side, other: Side) -> Iterator[tuple[str, str, str]]:
    a, b = this.program.request, other.program.request
    limits = ["none" if q.memory_limit is None else f"{q.memory_limit:.0f} B" for q in (a, b)]
    pairs = [
        ("function", this.title, other.title),
        ("mesh", str(a.mesh), str(b.mesh)),
        *_hardware(a.mesh.hardware, b.mesh.hardware),
        *_policies(a, b),
        ("memory limit", *limits),
        ("budgets", *(_several(map(_budget, q.budgets)) for q in (a, b))),
        ("reduce_dtype", *(q.reduce_dtype or "the platform's own" for q in (a, b))),
        ("donated", *(_several(f"`{name}`" for name in side.donated) for side in (this, other))),
    ]
    yield from ((what, x, y) for what, x, y in pairs if x != y)
    yield from _regions(a.graph, b.graph)
    ours, theirs = _pins(this), _pins(other)
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name, "not pinned"), theirs.get(name, "not pinned")


def _several(texts: Iterable[str]) -> str:
    return ", ".join(sorted(set(texts))) or "none"


def _budget(budget: Budget) -> str:
    """A budget, its size to the byte."""
    return f"{budget} ({budget.above:.0f} B)" if budget.above else str(budget)


def _hardware(a: Hardware, b: Hardware) -> Iterator[tuple[str, str, str]]:
    """Hardware by value: figures of one name may have been replaced, and axes put on networks of
    their own."""
    yield "hardware", _kind(a), _kind(b)
    if a.name == b.name:
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if field.name != "slow_axes" and x != y:
                yield f"{field.name} of {a.name}", _figure(x), _figure(y)
    ours, theirs = dict(a.slow_axes), dict(b.slow_axes)
    for axis in sorted(ours.keys() | theirs.keys()):
        x, y = (
            _figure(own) if own else "none of its own" for own in (ours.get(axis), theirs.get(axis))
        )
        yield f"network of `{axis}`", x, y


def _kind(hardware: Hardware) -> str:
    """A name; whether its figures are those of the table is said, too."""
    known = HARDWARE.get(hardware.name)
    as_known = known is None or dataclasses.replace(hardware, slow_axes=known.slow_axes) == known
    return hardware.name if as_known else f"{hardware.name} with other figures"


def _figure(value: object) -> str:
    """A value of a description of hardware, such that no two look alike."""
    match value:
        case None:
            return "none"
        case Network():
            return f"{_figure(value.bytes_per_second)} B/s after {_figure(value.latency_seconds)} s"
        case float() if float(short := f"{value:g}") == value:
            return short
        case _:
            return str(value)


def _policies(a: Request, b: Request) -> Iterator[tuple[str, str, str]]:
    """Boxing policies where one differs on some mesh axis, however both are written."""
    ours, theirs = (dict(zip(q.mesh.names, q.axis_policies, strict=False)) for q in (a, b))
    if any(
        (ours.get(name) or a.boxing) != (theirs.get(name) or b.boxing)
        for name in (*a.mesh.names, *b.mesh.names)
    ):
        first, second = (policies_text(q.boxing, q.axis_policies, q.mesh.names) for q in (a, b))
        yield "boxing", first, second


def _regions(a: Graph, b: Graph) -> Iterator[tuple[str, str, str]]:
    """Lines of both programs that stand under policies of their own in one."""
    ours, theirs = _policed(a), _policed(b)
    for key, policies in ours.items():
        if policies != theirs.get(key, policies):
            yield f"policy of `{key[0]}`", _several(policies), _several(theirs[key])


def _policed(graph: Graph) -> dict[tuple[str, str], frozenset[str]]:
    """The policies around each line of a program, by its text and function."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for node in graph.walk():
        span = users_span(node)
        text = source_text(span, 44).replace("`", "'")
        if span and text:
            around = ", within ".join(
                f"{p} on `{axis}`" if axis else p for p, axis in reversed(policies_in(node.scope))
            )
            found[text, span.function] = found.get((text, span.function), frozenset()) | (
                {around} if around else set()
            )
    return found


def _pins(side: Side) -> dict[str, str]:
    """What the user pins, by what it stands on; of inputs and outputs, whose types are complete, B
    is not said."""
    request = side.program.request
    names = Names.of(request.graph)
    found: dict[str, str] = {}
    for site in pin_sites(request):
        name, text = f"`{names.site(site)}`", pinned_text(site, request.mesh)
        if site.source != "annotation":
            name = (
                side.output_names[site.position]
                if site.source == "output" and side.output_names
                else names.site(site)
            )
            name = f"{site.source} `{name}`"
            text = " ".join(t for t in text.split() if not t.endswith(":B")) or "B"
        known = found.get(name)
        found[name] = text if known is None or text in known.split("; ") else f"{known}; {text}"
    return found


# ---- values -------------------------------------------------------------------------------------

Key = tuple[str, bool, int, str]
"""A value of a program: its label, whether it is a gradient, which of that label it is, and the
function it stands in."""


def _held(side: Side, subject: Subject) -> Held:
    program = side.program
    t = side.types.type_of(subject)
    aval = side.program.request.graph.avals[subject.values[0]]
    local = local_shape(aval.shape, from_type(t, program.mesh), program.mesh.sizes)
    size = float(math.prod(local) * _jax.itemsize(aval.dtype))
    return Held(type=t, shape=tuple(aval.shape), bytes_per_device=size, where=subject.where)


def _boundary(side: Side) -> dict[tuple[str, str], Held]:
    graph = side.program.request.graph
    found: dict[tuple[str, str], Held] = {}
    for number, (value, name) in enumerate(zip(graph.inputs, graph.input_names, strict=False)):
        found["input", name] = _held(
            side, Subject(label=name, kind="input", values=(value,), position=number)
        )
    for number, (operand, name) in enumerate(zip(graph.outputs, side.output_names, strict=False)):
        if isinstance(operand, int):
            found["output", name] = _held(
                side, Subject(label=name, kind="output", values=(operand,), position=number)
            )
    return found


def _values(side: Side) -> dict[Key, Held]:
    """What the expressions of a program make, each value under its innermost expression, those of
    one label by their order."""
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
    count: Counter[tuple[str, bool, str]] = Counter()
    keyed: dict[Key, Held] = {}
    for subject in sorted(found, key=lambda s: s.values[0]):
        assert subject.frame is not None
        label = subject.label, subject.gradient, subject.frame.function
        keyed[subject.label, subject.gradient, count[label], subject.frame.function] = _held(
            side, subject
        )
        count[label] += 1
    return keyed


def _called(key: Key) -> tuple[str, Key]:
    """What a difference is called: gradients say so."""
    label, gradient, _, _ = key
    return (f"gradient of `{label}`" if gradient else f"`{label}`"), key


def _differing(ours: Mapping[Any, Held], theirs: Mapping[Any, Held]) -> tuple[ValueDifference, ...]:
    """Entries of both whose types differ, most bytes first."""
    found = [
        ValueDifference(
            name=f"`{key}`" if isinstance(key, str) else key[0], this=held, other=theirs[key]
        )
        for key, held in ours.items()
        if key in theirs and theirs[key].type != held.type
    ]
    return tuple(
        sorted(found, key=lambda d: -max(d.this.bytes_per_device, d.other.bytes_per_device))
    )


# ---- conversions --------------------------------------------------------------------------------

Place = tuple[str, str, str, str, str]
"""Kind, mesh axes, change, and maker and reader without line numbers."""


def _sent(this: Program, other: Program) -> tuple[SentDifference, ...]:
    ours, theirs = _conversions(this), _conversions(other)
    found: list[SentDifference] = []
    for key in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(key), theirs.get(key)
        if here is None or there is None or here[0] != there[0]:
            kind, mesh_axes, change, *_ = key
            where = (here or there or (None, ""))[1]
            a, b = (None if side is None else side[0] for side in (here, there))
            found.append(
                SentDifference(
                    kind=kind, mesh_axes=mesh_axes, change=change, place=where, this=a, other=b
                )
            )
    return tuple(sorted(found, key=lambda d: -abs(d.bytes_more)))


def _conversions(program: Program) -> dict[Place, tuple[Sent, str]]:
    """What a plan sends, by place."""
    found: dict[Place, tuple[Sent, str]] = {}

    def enter(key: Place, runs: int, sent: float, where: str) -> None:
        old, where = found.get(key, (Sent(runs=0, bytes_per_device=0.0), where))
        found[key] = Sent(runs=old.runs + runs, bytes_per_device=old.bytes_per_device + sent), where

    names = Names.of(program.graph)
    for planned in program.boxes():
        box = planned.box
        name = names.value(box.source.value)
        made = (
            _node_text(box.maker) if box.maker else f"`{name}`" if name else "an argument of a body"
        )
        read = _node_text(box.reader) if box.reader else "the end"
        for step in box.steps:
            if step.bytes_sent:
                change = f"{_atoms(step, step.source)} -> {_atoms(step, step.target)}"
                where = f"{made}{_at(box.maker)}, for {read}{_at(box.reader)}"
                key = (
                    step.kind,
                    _axes(step, program.mesh),
                    change,
                    _side(made, box.maker),
                    _side(read, box.reader),
                )
                enter(key, planned.trips, step.bytes_sent * planned.trips, where)
    for operation, runs in program.kernels():
        for position, sent in operation.sends:
            node = operation.node
            key = (
                sent.kind,
                program.mesh.names[position],
                f"inside {node.op}",
                _side(_node_text(node), node),
                operation.row.kernels[position],
            )
            enter(key, runs * sent.rounds, runs * sent.bytes, f"{_node_text(node)}{_at(node)}")
    for node, runs in _by_hand(program.block, 1):
        key = ("by hand", ", ".join(program.mesh.names), "in a manual region", _node_text(node), "")
        enter(key, runs, runs * handwritten_bytes(node), f"{_node_text(node)}{_at(node)}")
    return found


def _by_hand(block: Block, trips: int) -> Iterator[tuple[Node, int]]:
    for instruction in block.instructions:
        if isinstance(instruction, Loop):
            for inner in instruction.blocks:
                yield from _by_hand(inner, trips * instruction.trips)
        elif isinstance(instruction, Apply) and instruction.node.op == "shard_map":
            yield instruction.node, trips


def _atoms(step: Step, codes: tuple[int, ...]) -> str:
    return ", ".join(dict.fromkeys(repr(decode(codes[i])) for i in step.mesh_axes))


def _axes(step: Step, mesh: MeshSpec) -> str:
    return ", ".join(mesh.names[i] for i in step.mesh_axes)


def _node_text(node: Node) -> str:
    text = source_text(node.span, 44).replace("`", "'")
    return f"{node.op} `{text}`" if text else node.op


def _side(text: str, node: Node | None) -> str:
    """The text of a maker or reader, told apart in forward and backward passes."""
    return f"gradient: {text}" if node is not None and node.backward else text


def _at(node: Node | None) -> str:
    return f" {node_place(node)}" if node is not None else ""
