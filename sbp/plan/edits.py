"""Edits of a program: a pin dropped, moved to another dim or added; what helps are made of."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from sbp.annotate import Pin, annotate_p
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.problem import Demand
from sbp.infer.space import Code, Policy, decode
from sbp.mesh import MeshSpec
from sbp.plan.fit import fit
from sbp.plan.program import Program
from sbp.plan.source import users_span
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True)
class Case:
    """A program with what is asked of it: what an edit changes.

    Arguments:
      graph, mesh, demand, boxing: as for `sbp.plan.fit.fit`.
      memory_limit: bytes per device, or None.
      aliased: positions of donated inputs.
    """

    graph: Graph
    mesh: MeshSpec
    demand: Demand
    boxing: Policy
    memory_limit: float | None = None
    aliased: tuple[int, ...] = ()

    def plan(self) -> Program | None:
        """The cheapest plan, or None."""
        return fit(self.graph, self.mesh, self.demand, boxing=self.boxing, memory_limit=self.memory_limit, aliased=self.aliased)[0]

    def sites(self) -> tuple[PinSite, ...]:
        """Its pins."""
        return pin_sites(self.graph, self.mesh, self.demand)

    def site(self, site: PinSite) -> PinSite | None:
        """The pin that a pin of this program before its edits has become; None when it was dropped."""
        nodes = {n.id for n in site.nodes}
        same = (s for s in self.sites() if (s.source, s.position) == (site.source, site.position) and {n.id for n in s.nodes} == nodes)
        return next(same, None)

    def value(self, site: PinSite) -> Operand:
        """The value that a pin stands on."""
        if site.source == "annotation":
            return site.nodes[0].outputs[0]
        return (self.graph.inputs if site.source == "input" else self.graph.outputs)[site.position]

    def drop(self, site: PinSite, position: int | None = None) -> Case:
        """The program without a pin, on one mesh axis or on all."""
        codes = tuple(None if position in (None, k) else c for k, c in enumerate(site.codes))
        return self._with(site, codes)

    def repin(self, site: PinSite, position: int, code: Code) -> Case:
        """The program with another pin on one mesh axis."""
        return self._with(site, tuple(code if k == position else c for k, c in enumerate(site.codes)))

    def _with(self, site: PinSite, codes: tuple[Code | None, ...]) -> Case:
        wanted = None if all(c is None for c in codes) else codes
        match site.source:
            case "input":
                inputs = tuple(wanted if i == site.position else t for i, t in enumerate(self.demand.inputs))
                return dataclasses.replace(self, demand=dataclasses.replace(self.demand, inputs=inputs))
            case "output":
                outputs = tuple(wanted if i == site.position else t for i, t in enumerate(self.demand.outputs))
                return dataclasses.replace(self, demand=dataclasses.replace(self.demand, outputs=outputs))
            case _:
                atoms = {axis: decode(c) for axis, c in zip(self.mesh.names, codes, strict=True) if c is not None}
                pin = Pin(NdSbp(atoms)) if atoms else None
                edited = _rewrite(self.graph, pins={n.id: pin for n in site.nodes}, inserts=None)
                return dataclasses.replace(self, graph=edited)

    def insert(self, node: Node, operand: int, position: int, code: Code) -> Case:
        """The program with an annotation on an operand of a node, before its line and wherever that was traced."""
        pin = Pin(NdSbp({self.mesh.names[position]: decode(code)}))
        return dataclasses.replace(self, graph=_rewrite(self.graph, pins={}, inserts=(node, operand, pin)))


def alike(node: Node, line: Node) -> bool:
    """Whether two nodes are one line of the user, traced more than once: in unrolled layers, in rematerialisation."""
    if node.id == line.id or node.span is None:
        return node.id == line.id
    return (node.op, node.span, in_gradient(node), len(node.inputs)) == (line.op, line.span, in_gradient(line), len(line.inputs))


def in_gradient(node: Node) -> bool:
    """Whether a node is of a gradient, and not of the forward pass or of its recomputation.

    JAX names the recomputation in the name stack of its equations, and the trace the region that holds both.
    """
    again = node.scope.partition("rematted_computation/")[2].rpartition("rematted_computation")
    return node.backward and not (again[1] and "transpose(" not in again[2])


def _rewrite(graph: Graph, pins: dict[int, Pin | None], inserts: tuple[Node, int, Pin] | None) -> Graph:
    """The program with pins replaced (None removes the annotation) and an annotation inserted wherever a line was traced.

    An inserted annotation stands for `x = annotate(x)` before the line: readers from there on see it, gradients included. What is made
    in the line itself is not annotated.
    """
    made_at = {v: users_span(n) for n in graph.walk() for v in n.outputs} if inserts is not None else {}
    avals = dict(graph.avals)
    values = itertools.count(max(avals, default=0) + 1)
    ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
    same: dict[int, Operand] = {}

    def of(operand: Operand) -> Operand:
        while isinstance(operand, int) and operand in same:
            operand = same[operand]
        return operand

    def visit(g: Graph) -> Graph:
        nodes: list[Node] = []
        for node in g.nodes:
            if inserts is not None:
                line, number, pin = inserts
                read = node.inputs[number] if alike(node, line) else None
                enters = isinstance(read, int) and (node.id == line.id or made_at.get(read) != users_span(node))
                operand = of(read) if enters and read is not None else None
                if isinstance(operand, int):
                    value = next(values)
                    avals[value] = avals[operand]
                    params = {"pin": pin, "cotangent": None}
                    note = dataclasses.replace(node, id=next(ids), op=annotate_p.name, primitive=annotate_p, params=params, regions=())
                    nodes.append(dataclasses.replace(note, inputs=(operand,), outputs=(value,)))
                    same[operand] = value
            if node.id in pins and pins[node.id] is None:
                same[node.outputs[0]] = of(node.inputs[0])
                continue
            params = node.params | {"pin": pins[node.id]} if node.id in pins else node.params
            regions = tuple(visit(r) for r in node.regions)
            nodes.append(dataclasses.replace(node, inputs=tuple(map(of, node.inputs)), params=params, regions=regions))
        return dataclasses.replace(g, nodes=tuple(nodes), outputs=tuple(map(of, g.outputs)), avals=avals)

    return visit(graph)
