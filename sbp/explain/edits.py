"""Programs with pins changed: dropped, moved to another dim, or put in where the source would have
a new annotation."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from sbp.annotations import Pin, annotate_p
from sbp.errors import SourceEdit, Span
from sbp.explain.subjects import Subject, kind_of
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.pins import pinned_codes
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.plan.program import Program
from sbp.source.editing import statement_span
from sbp.trace.dataflow import Dataflow
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import NdSbp

# ---- places of new annotations ------------------------------------------------------------------
# Where an annotation that a help adds to the source stands in the traced program.


Placed = tuple[dict[int, dict[Operand, None]], set[int]]
"""New annotations in a program: by node id, the values that are annotated before the node; and the
values that are annotated where they are made. All that follows reads what is annotated."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Finds the places of an annotation, one for each time that its line is traced: in unrolled
    layers, in rematerialisation.

    A statement before the line annotates all that the line reads, also in the functions that it
    calls. Any other edit annotates the expression that it replaces.

    Arguments:
      graph: the program.
      dataflow: its values, for the nodes that make them.
      line: the expression that reads the value.
      edit: the first edit of the annotation.
    """

    graph: Graph
    dataflow: Dataflow
    line: Span
    edit: SourceEdit

    def of(self, values: Iterable[Operand]) -> Placed:
        """The places of an annotation of some values that the line reads."""
        placed: Placed = defaultdict(dict), set()
        nodes = [n for n in self.graph.walk() if not n.in_gradient and self.frame(n) is not None]
        for value in values:
            reading = [n for n in nodes if value in n.inputs]
            # Other expressions of a comprehension may read the value, too.
            first = next((n for n in reading if self.line in n.stack), reading[0])
            number, depth = first.inputs.index(value), self.frame(first)
            assert depth is not None
            path = first.stack[: depth + 1]
            readers = {first.id} | {
                n.id
                for n in nodes
                if (n.op, len(n.inputs), n.stack[: depth + 1])
                == (first.op, len(first.inputs), path)
                and path[-1] not in self.stack(n.inputs[number])
            }
            for graph in self.graph.graphs():
                for k, node in enumerate(graph.nodes):
                    if node.id in readers:
                        self.place(placed, graph.nodes, k, node.inputs[number])
        return placed

    def place(
        self, placed: Placed, siblings: tuple[Node, ...], reader: int, operand: Operand
    ) -> None:
        """Adds the place for one read of a value.

        Arguments:
          placed: where the annotations stand.
          siblings: the nodes of one region, in order.
          reader: the position of the node that reads the value.
          operand: the value.
        """
        maker, (before, after) = self.dataflow.maker(operand), placed
        if self.inserts:
            before[self.start(siblings, reader, maker).id][operand] = None
        elif maker is not None and self.frame(maker) is not None and isinstance(operand, int):
            after.add(operand)
        else:
            before[siblings[reader].id][operand] = None

    def stack(self, operand: Operand) -> tuple[Span, ...]:
        """The frames of the node that makes an operand."""
        maker = self.dataflow.maker(operand)
        return maker.stack if maker is not None else ()

    @property
    def inserts(self) -> bool:
        """Whether the edit is a statement before the line."""
        span = self.edit.span
        return (span.line, span.column) == (span.end_line, span.end_column)

    def frame(self, node: Node) -> int | None:
        """The position in a node's stack of the frame that reads what is annotated."""
        start = self.edit.span if self.inserts else self.line
        found = (
            k
            for k, s in enumerate(node.stack)
            if (s.file, s.function) == (self.line.file, self.line.function)
            and (s.line, s.column) >= (start.line, start.column)
        )
        return next(found, None)

    def start(self, siblings: tuple[Node, ...], reader: int, maker: Node | None) -> Node:
        """The first node of the statement that a node belongs to, after what makes the value.

        Arguments:
          siblings: the nodes of one region, in order.
          reader: the position of the node that reads the value.
          maker: what makes the value.
        """
        statement, depth = statement_span(self.line), self.frame(siblings[reader])
        assert depth is not None
        caller, first = siblings[reader].stack[depth + 1 :], reader
        while statement is not None and first > 0:
            node = siblings[first - 1]
            k = self.frame(node)
            # By its id: edits of the program, such as dropping another fault's pins, copy nodes.
            made = maker is not None and node.id == maker.id
            if made or k is None or node.stack[k + 1 :] != caller:
                break
            if (node.stack[k].line, node.stack[k].column) >= (
                statement.end_line,
                statement.end_column,
            ):
                break
            first -= 1
        return siblings[first]


# ---- pins of a program --------------------------------------------------------------------------
# Programs with pins changed, dropped or inserted.


_NOTHING: Mapping[int, Any] = MappingProxyType({})

Wanted = Mapping[int, Code | None]
"""Codes asked on some mesh axes, by the position of the axis; None leaves the axis free."""


def wanted_codes(codes: tuple[Code | None, ...], wanted: Wanted) -> tuple[Code | None, ...]:
    """The codes on all mesh axes, with others on some of them."""
    return tuple(wanted.get(k, c) for k, c in enumerate(codes))


def site_in(request: Request, site: PinSite) -> PinSite | None:
    """The pin that a pin of the program has become in an edited request; None when it was
    dropped."""
    nodes = {n.id for n in site.nodes}
    same = (
        s
        for s in pin_sites(request)
        if (s.source, s.position) == (site.source, site.position)
        and {n.id for n in s.nodes} == nodes
    )
    return next(same, None)


def pinned_value(graph: Graph, site: PinSite) -> Operand:
    """The value that a pin stands on."""
    if site.source == "annotation":
        return site.nodes[0].outputs[0]
    return (graph.inputs if site.source == "input" else graph.outputs)[site.position]


def set_pins(request: Request, changes: Iterable[tuple[PinSite, Wanted]]) -> Request | None:
    """The request with pins that ask other codes on some mesh axes; None where a value that is
    pinned by the same line has too few dims for one of them."""
    edited: Request | None = request
    for site, wanted in changes:
        edited = edited and _set_pin(edited, site, wanted)
    return edited


def drop_pins(request: Request, *sites: PinSite) -> Request:
    """The request without some pins."""
    free = dict.fromkeys(range(len(request.mesh.names)))
    found = set_pins(request, [(site, free) for site in sites])
    assert found is not None
    return found


def _set_pin(request: Request, site: PinSite, wanted: Wanted) -> Request | None:
    nodes = list(site.nodes)
    if site.is_input:
        # An input with an uneven split has two pins: what JAX can shard, and the node behind it
        # with the type that the user asks for.
        pinning = (n for n in request.graph.nodes if n.op == annotate_p.name and n.params["pin"])
        nodes = [n for n in pinning if n.params["pin"].input == site.position]
    values = [n.outputs[0] for n in nodes] or [pinned_value(request.graph, site)]
    highest = max((c for c in wanted.values() if c is not None), default=0)
    if any(len(request.graph.aval(v).shape) < highest for v in values):
        return None
    changed = _with_pins(request, nodes, wanted)
    if site.is_input or site.source == "output":
        kind = "input" if site.is_input else "output"
        return _demanding(changed, kind, site.position, wanted)
    return changed


def _with_pins(request: Request, nodes: Iterable[Node], wanted: Wanted) -> Request:
    """The request with annotations that ask other codes; none where they ask nothing."""
    at = dict[int, Pin | None]()
    for node in nodes:
        pin: Pin = node.params["pin"]
        codes = wanted_codes(pinned_codes(pin, request.mesh), wanted)
        named = zip(request.mesh.names, codes, strict=True)
        atoms = {axis: decode(c) for axis, c in named if c is not None}
        at[node.id] = replace(pin, type=NdSbp(atoms), complete=False) if atoms else None
    return replace(request, graph=rewrite(request.graph, at=at)) if at else request


def _demanding(
    request: Request, kind: Literal["input", "output"], position: int, wanted: Wanted
) -> Request:
    """The request with another type asked of one input or output."""
    demand = request.demand
    given = demand.inputs if kind == "input" else demand.outputs
    codes = wanted_codes(given[position] or (None,) * len(request.mesh.names), wanted)
    free = all(c is None for c in codes)
    asked = tuple(t if i != position else None if free else codes for i, t in enumerate(given))
    return replace(request, demand=replace(demand, **{f"{kind}s": asked}))


def insert_pin(request: Request, placed: Placed, position: int, code: Code) -> Request | None:
    """The request with new annotations; None where a value has too few dims for them.

    Arguments:
      request: the request.
      placed: where they stand.
      position: of the mesh axis.
      code: what they ask there.
    """
    graph, (placed_before, placed_after) = request.graph, placed
    pin = Pin(NdSbp({request.mesh.names[position]: decode(code)}))
    values = (*itertools.chain(*placed_before.values()), *placed_after)
    if any(len(graph.aval(v).shape) < code for v in values):
        return None
    before = {node: tuple((v, pin) for v in found) for node, found in placed_before.items()}
    after = dict.fromkeys(placed_after, pin)
    return replace(request, graph=rewrite(graph, before=before, after=after))


def rewrite(
    graph: Graph,
    *,
    at: Mapping[int, Pin | None] = _NOTHING,
    before: Mapping[int, tuple[tuple[Operand, Pin], ...]] = _NOTHING,
    after: Mapping[int, Pin] = _NOTHING,
    own: frozenset[tuple[int, Operand]] = frozenset(),
) -> Graph:
    """The program with annotations changed, taken out or put in.

    Arguments:
      graph: the program.
      at: by the node id of an annotation, its new pin; None takes the annotation out.
      before: by node id, values and pins: new annotations of the values before the node. The node
          and everything after it read the annotated values.
      after: by value, a pin: a new annotation after the node that makes the value.
      own: reads that do not read an annotated value, as (node id, value).
    """
    avals = dict(graph.avals)
    values = itertools.count(max(avals, default=0) + 1)
    ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
    same: dict[int, Operand] = {}

    def of(operand: Operand) -> Operand:
        """The operand after the edits."""
        while isinstance(operand, int) and operand in same:
            operand = same[operand]
        return operand

    def note(operand: int, pin: Pin, like: Node) -> Node:
        """A new annotation of an operand, at the line of a node."""
        value = next(values)
        avals[value], same[operand] = avals[operand], value
        params = {"pin": pin, "cotangent": None}
        made = replace(
            like, id=next(ids), op=annotate_p.name, primitive=annotate_p, params=params, regions=()
        )
        return replace(made, inputs=(operand,), outputs=(value,))

    def visit(g: Graph) -> Graph:
        """The program or the body of a region after the edits."""
        nodes: list[Node] = []
        for node in g.nodes:
            for value, pin in before.get(node.id, ()):
                operand = of(value)
                if isinstance(operand, int):
                    nodes.append(note(operand, pin, node))
            inputs = tuple(o if (node.id, o) in own else of(o) for o in node.inputs)
            if at.get(node.id, node) is None:
                same[node.outputs[0]] = inputs[0]
                continue
            params = node.params | {"pin": at[node.id]} if node.id in at else node.params
            nodes.append(
                replace(node, inputs=inputs, params=params, regions=tuple(map(visit, node.regions)))
            )
            nodes += [note(v, after[v], node) for v in node.outputs if v in after]
        return replace(g, nodes=tuple(nodes), outputs=tuple(map(of, g.outputs)), avals=avals)

    return visit(graph)


# ---- pins of a subject --------------------------------------------------------------------------
# Programs with a value, an operand, an input or an output pinned to another type, as an annotation
# in the source would pin it.


def pin_subject(request: Request, subject: Subject, wanted: Wanted) -> Request:
    """The request with a subject pinned, or left free, on some mesh axes. The new pin replaces the
    user's pins of the subject on these axes; pins on other axes stay.

    Arguments:
      request: the request.
      subject: the subject. A value that is not pinned cannot be left free.
      wanted: what is asked.
    """
    match subject.kind:
        case "input" | "output" as kind:
            return _demanding(request, kind, subject.position, wanted)
        case "annotation":
            nodes = (n for n in request.graph.walk() if n.op == annotate_p.name)
            mine = [n for n in nodes if n.outputs[0] in subject.values]
            return _with_pins(request, mine, wanted)
        case "made":
            return _pinned_after(request, subject, wanted)


def _pinned_after(request: Request, subject: Subject, wanted: Wanted) -> Request:
    graph, names = request.graph, request.mesh.names
    asked = ((names[k], c) for k, c in sorted(wanted.items()))
    pin = Pin(NdSbp({axis: decode(c) for axis, c in asked if c is not None}))
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
      pinned: for each value that was pinned by the edit, the annotation's result.
    """

    program: Program
    asked: Graph
    pinned: Mapping[Operand, int]

    @classmethod
    def of(cls, program: Program, asked: Graph) -> Types:
        """Collects the pins of a plan."""
        pins = (n for n in program.graph.walk() if n.op == annotate_p.name)
        new = [n for n in pins if n.outputs[0] not in asked.avals]
        return cls(program, asked, {n.inputs[0]: n.outputs[0] for n in reversed(new)})

    def type_of(self, subject: Subject) -> NdSbp:
        """The type of a subject. Values may be missing in the plan: a conversion that is not
        repeated takes with it the operations that only fed it."""
        if subject.kind == "output":
            return self.program.output_types[subject.position]
        typing, values = self.program.typing, set(subject.values)
        pinned = [self.pinned[v] for v in subject.values if v in self.pinned]
        if subject.kind == "made" and pinned:
            return typing.type_of(pinned[0])
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
