"""Programs with a value, an operand, an input or an output pinned to another type, as an annotation
in the source would pin it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sbp.annotations import Pin, annotate_p
from sbp.explain.edits import rewrite
from sbp.explain.subjects import Subject, kind_of
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.plan.program import Program
from sbp.trace.dataflow import Dataflow
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import NdSbp

Wanted = Mapping[int, Code]
"""Atoms asked on some mesh axes, by the position of the axis."""


def pin_subject(request: Request, subject: Subject, wanted: Wanted) -> Request:
    """The request with a subject pinned on some mesh axes. The new pin replaces the user's pins of
    the subject on these axes; pins on other axes stay.

    Arguments:
      request: the request.
      subject: the subject.
      wanted: the code to pin, by position of the mesh axis.
    """
    match subject.kind:
        case "input" | "output":
            return _demanding(request, subject, wanted)
        case "annotation":
            return _repinned(request, subject, wanted, ())
        case "made":
            return _pinned_after(request, subject, wanted)


def unpin_subject(request: Request, subject: Subject, position: int) -> Request:
    """The request with a pinned subject left free on one mesh axis.

    Arguments:
      request: the request.
      subject: the subject.
      position: the position of the mesh axis.
    """
    if subject.kind == "annotation":
        return _repinned(request, subject, {}, (position,))
    return _demanding(request, subject, {position: None})


def _demanding(request: Request, subject: Subject, change: Mapping[int, Code | None]) -> Request:
    demand = request.demand
    given = demand.inputs if subject.kind == "input" else demand.outputs
    free = (None,) * len(request.mesh.sizes)
    codes = tuple(change.get(k, c) for k, c in enumerate(given[subject.position] or free))
    asked = tuple(
        (None if codes == free else codes) if i == subject.position else t
        for i, t in enumerate(given)
    )
    inputs, outputs = (asked, demand.outputs) if subject.kind == "input" else (demand.inputs, asked)
    return replace(request, demand=replace(demand, inputs=inputs, outputs=outputs))


def _repinned(request: Request, subject: Subject, wanted: Wanted, free: tuple[int, ...]) -> Request:
    values, names, at = set(subject.values), request.mesh.names, dict[int, Pin | None]()
    for node in request.graph.walk():
        if node.op == annotate_p.name and node.outputs[0] in values:
            pin: Pin = node.params["pin"]
            complete = {
                a: pin.type.get(a)
                for a in names
                if a in pin.type or (pin.complete and a not in pin.type.free)
            }
            atoms = complete | {names[k]: decode(c) for k, c in wanted.items()}
            kept = {a: t for a, t in atoms.items() if names.index(a) not in free}
            at[node.id] = Pin(NdSbp(kept), reduce_dtype=pin.reduce_dtype) if kept else None
    return replace(request, graph=rewrite(request.graph, at=at))


def _pinned_after(request: Request, subject: Subject, wanted: Wanted) -> Request:
    graph, names = request.graph, request.mesh.names
    pin = Pin(NdSbp({names[k]: decode(c) for k, c in sorted(wanted.items())}))
    own = _own_reads(graph, subject)
    # A copy that only the operation's own gradient reads is not annotated in the source's program
    # either: JAX drops it as dead.
    read = {o for n in graph.walk() for o in n.inputs if (n.id, o) not in own} | {
        o for g in graph.graphs() for o in g.outputs
    }
    # Readers inside of the expression belong to the operation's own gradient. They read its result
    # without the annotation, as they do when the source annotates the result.
    after = {v: pin for v in subject.values if v in read}
    return replace(request, graph=rewrite(graph, after=after, own=own))


@dataclass(frozen=True, slots=True)
class Types:
    """The types of subjects of the program `asked` in a plan of it, or of an edit in which one of
    them is pinned.

    Arguments:
      program: the plan.
      asked: the program.
      pinned: for each value that was pinned by the edit, the annotation's result and which
          annotation it is, in program order.
    """

    program: Program
    asked: Graph
    pinned: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, program: Program, asked: Graph) -> Types:
        """Collects the pins of a plan."""
        pins = (
            n
            for n in program.graph.walk()
            if n.op == annotate_p.name and n.outputs[0] not in asked.avals
        )
        found: dict[int, tuple[int, int]] = {}
        for number, node in enumerate(pins):
            if isinstance(value := node.inputs[0], int):
                found.setdefault(value, (number, node.outputs[0]))
        return cls(program, asked, found)

    def type_of(self, subject: Subject) -> NdSbp:
        """The type of a subject. Values may be missing in the plan: a conversion that is not
        repeated takes with it the operations that only fed it."""
        if subject.kind == "output":
            return self.program.output_types[subject.position]
        typing, values = self.program.typing, set(subject.values)
        if subject.kind == "made":
            pinned = [self.pinned[v] for v in subject.values if v in self.pinned]
            if pinned:
                return typing.type_of(min(pinned)[1])
        present = [v for v in subject.values if v in typing.values]
        if not present:  # the annotation was taken out: take its operand
            inputs = (
                o for n in self.asked.walk() if not values.isdisjoint(n.outputs) for o in n.inputs
            )
            present = [o for o in inputs if isinstance(o, int) and o in typing.values]
        return typing.type_of(present[0])


def _own_reads(graph: Graph, subject: Subject) -> frozenset[tuple[int, Operand]]:
    """Where an expression reads its own results: (node id, value).

    In a Python loop the next turn reads a result too, on the same line. So the nodes of the
    expression are sorted by turns. Of alike nodes the first belong to the first turn; in a backward
    pass the first belong to the last turn.
    """
    frame, makers = subject.frame, Dataflow(graph).makers
    alike: dict[object, list[Node]] = defaultdict(list)
    for node in graph.walk():
        if frame is not None and (frame == node.span or frame in node.stack):
            alike[kind_of(node, graph), node.is_recomputed].append(node)
    turns = sum(not makers[v].is_recomputed for v in subject.values if v in makers)
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
