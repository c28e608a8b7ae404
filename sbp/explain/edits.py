"""Programs with a pin dropped, moved to another dim or inserted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sbp.annotations import Pin, annotate_p
from sbp.explain.placed import Placed
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.pins import pinned_codes
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
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


def move_pin(request: Request, site: PinSite, position: int, code: Code) -> Request | None:
    """The request with a pin that asks another code on one mesh axis; None where a value that is
    pinned by the same line has too few dims for it.

    Arguments:
      request: the request.
      site: the pin.
      position: of the mesh axis.
      code: the code that the pin asks there.
    """
    codes = tuple(code if k == position else c for k, c in enumerate(site.codes))
    return change_pin(request, site, codes)


def change_pin(request: Request, site: PinSite, codes: tuple[Code | None, ...]) -> Request | None:
    """The request with a pin that asks other codes; None where a value that is pinned by the same
    line has too few dims for one of them.

    Arguments:
      request: the request.
      site: the pin.
      codes: for each mesh axis what the pin asks; None leaves the axis free.
    """
    values = [n.outputs[0] for n in site.nodes] or [pinned_value(request.graph, site)]
    highest = max((c for c in codes if c is not None), default=0)
    if any(len(request.graph.aval(v).shape) < highest for v in values):
        return None
    return _with_codes(request, site, codes)


def _with_codes(request: Request, site: PinSite, codes: tuple[Code | None, ...]) -> Request:
    if site.is_input:
        return _with_input(request, site, codes)
    match site.source:
        case "output":
            wanted = None if all(c is None for c in codes) else codes
            demand = request.demand
            outputs = tuple(
                wanted if i == site.position else t for i, t in enumerate(demand.outputs)
            )
            return replace(request, demand=replace(demand, outputs=outputs))
        case _:
            pins = {n.id: _changed(n.params["pin"], codes, request) for n in site.nodes}
            return replace(request, graph=rewrite(request.graph, at=pins))


def _with_input(request: Request, site: PinSite, codes: tuple[Code | None, ...]) -> Request:
    """The request with another type of an input. An input with an uneven split has two pins: what
    JAX can shard, and the node behind it with the type that the user asks for."""
    old = request.demand.inputs[site.position] or (None,) * len(codes)
    changed = [new != before for new, before in zip(codes, site.codes, strict=True)]

    def edited(pinned: tuple[Code | None, ...]) -> tuple[Code | None, ...]:
        return tuple(
            new if differs else kept
            for new, differs, kept in zip(codes, changed, pinned, strict=True)
        )

    outer = edited(old)
    demand = request.demand
    wanted = None if all(c is None for c in outer) else outer
    inputs = tuple(wanted if i == site.position else t for i, t in enumerate(demand.inputs))
    behind = [
        (n.id, n.params["pin"])
        for n in request.graph.nodes
        if n.op == annotate_p.name and n.params["pin"] and n.params["pin"].input == site.position
    ]
    pins = {i: _changed(pin, edited(pinned_codes(pin, request.mesh)), request) for i, pin in behind}
    graph = rewrite(request.graph, at=pins) if pins else request.graph
    return replace(request, demand=replace(demand, inputs=inputs), graph=graph)


def _changed(pin: Pin, codes: tuple[Code | None, ...], request: Request) -> Pin | None:
    """A pin that asks other codes; None where it asks nothing."""
    named = zip(request.mesh.names, codes, strict=True)
    atoms = {axis: decode(c) for axis, c in named if c is not None}
    return replace(pin, type=NdSbp(atoms), complete=False) if atoms else None


def insert_pin(request: Request, placed: Placed, position: int, code: Code) -> Request | None:
    """The request with new annotations; None where a value has too few dims for them.

    Arguments:
      request: the request.
      placed: where they stand.
      position: of the mesh axis.
      code: what they ask there.
    """
    graph = request.graph
    pin = Pin(NdSbp({request.mesh.names[position]: decode(code)}))
    values = (*itertools.chain(*placed.before.values()), *placed.after)
    if any(len(graph.aval(v).shape) < code for v in values):
        return None
    before = {node: tuple((v, pin) for v in found) for node, found in placed.before.items()}
    after = dict.fromkeys(placed.after, pin)
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
