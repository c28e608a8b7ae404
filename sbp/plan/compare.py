"""What differs between two plans: what was asked, what they cost, the types of values, the conversions.

The programs need not be the same: values are matched by what the user calls them and the text of their line, not by its number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.infer.constraints import pin_sites
from sbp.infer.space import Step, decode, from_type, local_shape
from sbp.mesh import MeshSpec
from sbp.plan.handwritten import handwritten_bytes
from sbp.plan.ir import Apply, Block, Loop
from sbp.plan.pinning import Question, type_in
from sbp.plan.program import Cost, Program
from sbp.plan.source import Names, pinned_text, source_text
from sbp.plan.subjects import Subject, Subjects
from sbp.plan.text import node_place
from sbp.trace.graph import Node
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two plans.

    Arguments:
      title: the function's name.
      program: the plan.
      question: what it was planned from.
      output_names: names of the results.
    """

    title: str
    program: Program
    question: Question
    output_names: tuple[str, ...] = ()


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
    """What one plan sends in conversions of one kind at one place: how often, and bytes one device sends per call."""

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
        return (self.other.bytes_per_device if self.other else 0.0) - (self.this.bytes_per_device if self.this else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """All that differs between two plans; each list has most bytes first.

    Arguments:
      titles: the functions.
      settings: what was asked differently: (what, here, there), pins included.
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
        return not (self.settings or self.inputs or self.outputs or self.values or self.sent) and self.costs[0] == self.costs[1]


def compare(this: Side, other: Side) -> Difference:
    """The differences of another plan from this one."""
    ours, theirs = _boundary(this), _boundary(other)
    mine, yours = _values(this), _values(other)
    counts = [(len(a.keys() & b.keys()), len(a.keys() - b.keys()), len(b.keys() - a.keys())) for a, b in ((ours, theirs), (mine, yours))]
    boundary = _differing({k[1]: v for k, v in ours.items() if k[0] == "input"}, {k[1]: v for k, v in theirs.items() if k[0] == "input"})
    returned = _differing({k[1]: v for k, v in ours.items() if k[0] == "output"}, {k[1]: v for k, v in theirs.items() if k[0] == "output"})
    return Difference(
        titles=(this.title, other.title),
        settings=tuple(_settings(this, other)),
        costs=(this.program.cost, other.program.cost),
        inputs=boundary,
        outputs=returned,
        values=_differing({_called(k): v for k, v in mine.items()}, {_called(k): v for k, v in yours.items()}),
        sent=_sent(this.program, other.program),
        matched=sum(c[0] for c in counts),
        unmatched=(sum(c[1] for c in counts), sum(c[2] for c in counts)),
    )


# ---- what was asked --------------------------------------------------------------------------------------------------------------


def _settings(this: Side, other: Side) -> Iterator[tuple[str, str, str]]:
    a, b = this.question, other.question
    limits = ["none" if q.memory_limit is None else f"{q.memory_limit:.0f} B" for q in (a, b)]
    pairs = [
        ("function", this.title, other.title),
        ("mesh", str(a.mesh), str(b.mesh)),
        ("hardware", a.mesh.hardware.name, b.mesh.hardware.name),
        ("boxing", a.boxing, b.boxing),
        ("memory limit", *limits),
    ]
    yield from ((what, x, y) for what, x, y in pairs if x != y)
    ours, theirs = _pins(this), _pins(other)
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            yield name, ours.get(name, "not pinned"), theirs.get(name, "not pinned")


def _pins(side: Side) -> dict[str, str]:
    """What the user pins, by what it stands on; of inputs and outputs, whose types are complete, B is not said."""
    q, names = side.question, Names.of(side.question.graph)
    found: dict[str, str] = {}
    for site in pin_sites(q.graph, q.mesh, q.demand):
        name, text = f"`{names.site(site)}`", pinned_text(site, q.mesh)
        if site.source != "annotation":
            name = side.output_names[site.position] if site.source == "output" and side.output_names else names.site(site)
            name = f"{site.source} `{name}`"
            text = " ".join(t for t in text.split() if not t.endswith(":B")) or "B"
        known = found.get(name)
        found[name] = text if known is None or text in known.split("; ") else f"{known}; {text}"
    return found


# ---- values ----------------------------------------------------------------------------------------------------------------------

Key = tuple[str, bool, int, str]
"""A value of a program: its label, whether it is a gradient, which of that label it is, and the function it stands in."""


def _held(side: Side, subject: Subject) -> Held:
    program = side.program
    t = type_in(program, subject, side.question.graph)
    aval = side.question.graph.avals[subject.values[0]]
    local = local_shape(aval.shape, from_type(t, program.mesh), program.mesh.sizes)
    size = float(math.prod(local) * _jax.itemsize(aval.dtype))
    return Held(type=t, shape=tuple(aval.shape), bytes_per_device=size, where=subject.where)


def _boundary(side: Side) -> dict[tuple[str, str], Held]:
    graph = side.question.graph
    found: dict[tuple[str, str], Held] = {}
    for number, (value, name) in enumerate(zip(graph.inputs, graph.input_names, strict=False)):
        found["input", name] = _held(side, Subject(label=name, kind="input", values=(value,), position=number))
    for number, (operand, name) in enumerate(zip(graph.outputs, side.output_names, strict=False)):
        if isinstance(operand, int):
            found["output", name] = _held(side, Subject(label=name, kind="output", values=(operand,), position=number))
    return found


def _values(side: Side) -> dict[Key, Held]:
    """What the expressions of a program make, each value under its innermost expression, those of one label by their order."""
    subjects = Subjects.of(side.question.graph, side.output_names)
    seen: set[tuple[int, ...]] = set()
    found: list[Subject] = []
    for place in sorted(subjects.places.values(), key=lambda p: len(p.nodes)):
        for subject in subjects.subjects_of(place):
            if subject.values not in seen and any(v in side.program.typing.values for v in subject.values):
                seen.add(subject.values)
                found.append(subject)
    count: Counter[tuple[str, bool, str]] = Counter()
    keyed: dict[Key, Held] = {}
    for subject in sorted(found, key=lambda s: s.values[0]):
        assert subject.frame is not None
        label = subject.label, subject.gradient, subject.frame.function
        keyed[subject.label, subject.gradient, count[label], subject.frame.function] = _held(side, subject)
        count[label] += 1
    return keyed


def _called(key: Key) -> tuple[str, Key]:
    """What a difference is called: gradients say so."""
    label, gradient, _, _ = key
    return (f"gradient of `{label}`" if gradient else f"`{label}`"), key


def _differing(ours: Mapping[Any, Held], theirs: Mapping[Any, Held]) -> tuple[ValueDifference, ...]:
    """Entries of both whose types differ, most bytes first."""
    found = [
        ValueDifference(name=f"`{key}`" if isinstance(key, str) else key[0], this=held, other=theirs[key])
        for key, held in ours.items()
        if key in theirs and theirs[key].type != held.type
    ]
    return tuple(sorted(found, key=lambda d: -max(d.this.bytes_per_device, d.other.bytes_per_device)))


# ---- conversions -----------------------------------------------------------------------------------------------------------------

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
            found.append(SentDifference(kind=kind, mesh_axes=mesh_axes, change=change, place=where, this=a, other=b))
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
        made = _node_text(box.maker) if box.maker else f"`{name}`" if name else "an argument of a body"
        read = _node_text(box.reader) if box.reader else "the end"
        for step in box.steps:
            if step.bytes_sent:
                change = f"{_atoms(step, step.source)} -> {_atoms(step, step.target)}"
                where = f"{made}{_at(box.maker)}, for {read}{_at(box.reader)}"
                key = (step.kind, _axes(step, program.mesh), change, _side(made, box.maker), _side(read, box.reader))
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
