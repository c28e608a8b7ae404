"""Edits of a request: a pin dropped, moved to another dim or inserted. Helps are made of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sbp.annotations import Pin, annotate_p
from sbp.errors import Edit, Help, Span
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.plan.program import Program
from sbp.source.reader import users_span
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import NdSbp

_NOTHING: Mapping[int, Any] = MappingProxyType({})


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


def drop_pin(request: Request, site: PinSite, position: int | None = None) -> Request:
    """The request without a pin.

    Arguments:
      request: the request.
      site: the pin.
      position: of the mesh axis on which the pin is dropped; None for all axes.
    """
    return _with_codes(
        request, site, tuple(None if position in (None, k) else c for k, c in enumerate(site.codes))
    )


def move_pin(request: Request, site: PinSite, position: int, code: Code) -> Request:
    """The request with a pin that asks another code on one mesh axis.

    Arguments:
      request: the request.
      site: the pin.
      position: of the mesh axis.
      code: the code that the pin asks there.
    """
    return _with_codes(
        request, site, tuple(code if k == position else c for k, c in enumerate(site.codes))
    )


def _with_codes(request: Request, site: PinSite, codes: tuple[Code | None, ...]) -> Request:
    wanted = None if all(c is None for c in codes) else codes
    demand = request.demand
    match site.source:
        case "input":
            inputs = tuple(wanted if i == site.position else t for i, t in enumerate(demand.inputs))
            return replace(request, demand=replace(demand, inputs=inputs))
        case "output":
            outputs = tuple(
                wanted if i == site.position else t for i, t in enumerate(demand.outputs)
            )
            return replace(request, demand=replace(demand, outputs=outputs))
        case _:
            atoms = {
                axis: decode(c)
                for axis, c in zip(request.mesh.names, codes, strict=True)
                if c is not None
            }
            pins = {
                n.id: Pin(NdSbp(atoms), reduce_dtype=n.params["pin"].reduce_dtype)
                if atoms
                else None
                for n in site.nodes
            }
            return replace(request, graph=rewrite(request.graph, at=pins))


def insert_pin(request: Request, node: Node, operand: int, position: int, code: Code) -> Request:
    """The request with an annotation on an operand of a node, before its line and wherever that
    line was traced.

    It stands for `x = annotate(x)` there: readers from there on see it, gradients included.
    Operands made in the line itself are not annotated.

    Arguments:
      request: the request.
      node: the reader.
      operand: which operand of the node.
      position: of the mesh axis.
      code: the code that the annotation asks there.
    """
    pin = Pin(NdSbp({request.mesh.names[position]: decode(code)}))
    graph = request.graph
    made_at: dict[Operand, Span | None] = {
        v: users_span(n) for n in graph.walk() for v in n.outputs
    }
    lines = [n for n in graph.walk() if alike(n, node)]
    entered = [
        n for n in lines if n.id == node.id or made_at.get(n.inputs[operand]) != users_span(n)
    ]
    return replace(request, graph=rewrite(graph, before={n.id: (operand, pin) for n in entered}))


def priced(
    text: str, edits: tuple[Edit, ...], program: Program, *, clears_all_errors: bool
) -> Help:
    """A help with the price of the plan after it.

    Arguments:
      text: the change in words.
      edits: the change itself.
      program: the plan that was made after the change.
      clears_all_errors: whether the plan is that of the whole program, and not of the program
          without the pins of its other errors.
    """
    return Help(
        text=text,
        edits=edits,
        bytes_per_device=program.cost.bytes_per_device,
        peak_memory_bytes=program.cost.peak_memory_bytes,
        clears_all_errors=clears_all_errors,
    )


def alike(node: Node, line: Node) -> bool:
    """Whether two nodes are one line of the user, traced more than once: in unrolled layers, in
    rematerialisation."""
    if node.id == line.id or node.span is None:
        return node.id == line.id
    return (node.op, node.span, node.in_gradient, len(node.inputs)) == (
        line.op,
        line.span,
        line.in_gradient,
        len(line.inputs),
    )


def rewrite(
    graph: Graph,
    *,
    at: Mapping[int, Pin | None] = _NOTHING,
    before: Mapping[int, tuple[int, Pin]] = _NOTHING,
    after: Mapping[int, Pin] = _NOTHING,
    own: frozenset[tuple[int, Operand]] = frozenset(),
) -> Graph:
    """The program with annotations changed, taken out or put in.

    Arguments:
      graph: the program.
      at: by the node id of an annotation, its new pin; None takes the annotation out.
      before: by node id, the number of an operand and a pin: a new annotation of the operand before
          the node. The node and everything after it read the annotated value.
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
            if node.id in before:
                number, pin = before[node.id]
                operand = of(node.inputs[number])
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
