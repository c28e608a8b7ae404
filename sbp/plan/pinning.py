"""What-ifs: a program with a value, an operand, an input or an output pinned to another type, as an annotation in the source would."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sbp.annotate import Pin, annotate_p
from sbp.infer.check import Checker, CheckResult
from sbp.infer.space import Code, decode
from sbp.plan.edits import Case
from sbp.plan.program import Program
from sbp.plan.subjects import Subject, is_recomputed, kind_of
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import NdSbp

Wanted = Mapping[int, Code]
"""Atoms asked on some mesh axes, by the position of the axis."""


@dataclass(frozen=True, slots=True)
class Question(Case):
    """A program with everything that its types are chosen by, and what-ifs that change it."""

    def fault(self) -> CheckResult:
        """Why there is no plan, as far as one mesh axis alone says so."""
        return Checker(self.graph, self.mesh, self.demand, self.boxing).check()

    # ---- edits ---------------------------------------------------------------------------------------------------------------

    def pin(self, subject: Subject, wanted: Wanted) -> Question:
        """The program with a subject pinned on some mesh axes: what is pinned there already gives way, what is on others stays."""
        match subject.kind:
            case "input" | "output":
                return self._demand(subject, wanted)
            case "annotation":
                return self._repin(subject, wanted, ())
            case "made":
                return self._after(subject, self._pin_of(wanted))

    def unpin(self, subject: Subject, position: int) -> Question:
        """The program with a pinned subject left free on a mesh axis."""
        if subject.kind == "annotation":
            return self._repin(subject, {}, (position,))
        return self._demand(subject, {position: None})

    def _pin_of(self, wanted: Wanted) -> Pin:
        return Pin(NdSbp({self.mesh.names[k]: decode(c) for k, c in sorted(wanted.items())}))

    def _demand(self, subject: Subject, change: Mapping[int, Code | None]) -> Question:
        given = self.demand.inputs if subject.kind == "input" else self.demand.outputs
        free = (None,) * len(self.mesh.sizes)
        codes = tuple(change.get(k, c) for k, c in enumerate(given[subject.position] or free))
        asked = tuple((None if codes == free else codes) if i == subject.position else t for i, t in enumerate(given))
        inputs, outputs = (asked, self.demand.outputs) if subject.kind == "input" else (self.demand.inputs, asked)
        return dataclasses.replace(self, demand=dataclasses.replace(self.demand, inputs=inputs, outputs=outputs))

    def _repin(self, subject: Subject, wanted: Wanted, free: tuple[int, ...]) -> Question:
        values, at = set(subject.values), {}
        for node in self.graph.walk():
            if node.op == annotate_p.name and node.outputs[0] in values:
                pin: Pin = node.params["pin"]
                complete = {a: pin.type.get(a) for a in self.mesh.names if a in pin.type or (pin.complete and a not in pin.type.free)}
                atoms = complete | {self.mesh.names[k]: decode(c) for k, c in wanted.items()}
                kept = {a: t for a, t in atoms.items() if self.mesh.names.index(a) not in free}
                at[node.id] = Pin(NdSbp(kept)) if kept else None
        return self._edited(_Edit(at=at))

    def _after(self, subject: Subject, pin: Pin) -> Question:
        return self._edited(_Edit(after=dict.fromkeys(subject.values, pin), subject=subject))

    def _edited(self, edit: _Edit) -> Question:
        return dataclasses.replace(self, graph=_rewrite(self.graph, edit))


def type_in(program: Program, subject: Subject, asked: Graph) -> NdSbp:
    """The type of a subject of the program `asked` in a plan of it, or of an edit in which the subject is pinned.

    A plan may have less in it: conversions that are not repeated take what only fed them along.
    """
    if subject.kind == "output":
        return program.output_types[subject.position]
    values = program.typing.values
    if subject.kind == "made":
        pins = (n for n in program.graph.walk() if n.op == annotate_p.name and n.inputs[0] in subject.values)
        pinned = next((n.outputs[0] for n in pins if n.outputs[0] not in asked.avals), None)
        if pinned is not None:
            return program.typing.type_of(pinned)
    held = [v for v in subject.values if v in values]
    if not held:  # the annotation was taken out; what it annotated stands for it
        held = [
            o for n in asked.walk() if not set(subject.values).isdisjoint(n.outputs) for o in n.inputs if isinstance(o, int) and o in values
        ]
    return program.typing.type_of(held[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edit:
    """Annotations to put in.

    Arguments:
      after: by value: behind what makes it, for the readers outside of `subject`'s expression. Those inside of it, which are the
        operation's own gradient, read what the operation makes, as they do when the source annotates its result.
      at: by node id: annotations that say something else, or None for those that are taken out.
    """

    after: Mapping[int, Pin] = dataclasses.field(default_factory=dict)
    at: Mapping[int, Pin | None] = dataclasses.field(default_factory=dict)
    subject: Subject | None = None


def _rewrite(graph: Graph, edit: _Edit) -> Graph:
    avals = dict(graph.avals)
    values = itertools.count(max(avals, default=0) + 1)
    ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
    pinned: dict[int, int] = {}
    own = _own_reads(graph, edit.subject) if edit.subject else frozenset()
    # A copy that only the operation's own gradient reads is not annotated in the source's program either: JAX drops it as dead.
    read = {o for n in graph.walk() for o in n.inputs if (n.id, o) not in own} | {o for g in _graphs(graph) for o in g.outputs}

    def note(operand: int, pin: Pin, like: Node) -> Node:
        value = next(values)
        avals[value] = avals[operand]
        params = {"pin": pin, "cotangent": None}
        made = dataclasses.replace(like, id=next(ids), op=annotate_p.name, primitive=annotate_p, params=params, regions=())
        return dataclasses.replace(made, inputs=(operand,), outputs=(value,))

    def visit(g: Graph) -> Graph:
        nodes: list[Node] = []
        for node in g.nodes:
            inputs: list[Operand] = [pinned.get(o, o) if isinstance(o, int) and (node.id, o) not in own else o for o in node.inputs]
            if edit.at.get(node.id, node) is None:
                (operand,) = inputs
                if isinstance(operand, int):
                    pinned[node.outputs[0]] = operand
                    continue
            params = node.params
            if node.id in edit.at:
                params = params | {"pin": edit.at[node.id]}
            regions = tuple(map(visit, node.regions))
            nodes.append(dataclasses.replace(node, inputs=tuple(inputs), params=params, regions=regions))
            for value in node.outputs:
                if value in edit.after and value in read:
                    nodes.append(note(value, edit.after[value], node))
                    pinned[value] = nodes[-1].outputs[0]
        outputs = [pinned.get(o, o) if isinstance(o, int) else o for o in g.outputs]
        return dataclasses.replace(g, nodes=tuple(nodes), outputs=tuple(outputs), avals=avals)

    return visit(graph)


def _own_reads(graph: Graph, subject: Subject) -> frozenset[tuple[int, Operand]]:
    """Where an expression reads what it has made itself: (node id, value).

    In a Python loop the next turn reads it as well, on the same line. So the nodes of the expression are told apart by turns: of
    nodes alike the first belong to the first turn, in a backward pass to the last one.
    """
    frame, makers = subject.frame, {v: node for node in graph.walk() for v in node.outputs}
    alike: dict[object, list[Node]] = defaultdict(list)
    for node in graph.walk():
        if frame is not None and (frame == node.span or frame in node.stack):
            alike[kind_of(node, graph), is_recomputed(node)].append(node)
    turns = sum(not is_recomputed(makers[v]) for v in subject.values if v in makers)
    turn: dict[int, int] = {}
    for nodes in alike.values():
        each = -(-len(nodes) // max(1, turns))
        for number, node in enumerate(nodes):
            turn[node.id] = turns - 1 - number // each if node.backward else number // each
    return frozenset(
        (node.id, o)
        for nodes in alike.values()
        for node in nodes
        for o in node.inputs
        if isinstance(o, int) and o in subject.values and turn.get(makers[o].id) == turn[node.id]
    )


def _graphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.walk():
        yield from node.regions
