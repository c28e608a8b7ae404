"""Edits of a program: a pin dropped, moved to another dim or added; what helps are made of."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sbp.annotations import Pin, annotate_p
from sbp.errors import Edit, Help, Span
from sbp.explain.subjects import in_gradient
from sbp.infer.check import Checker
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.problem import Demand
from sbp.infer.rows import Tables
from sbp.infer.space import Code, Policy, decode
from sbp.machine.mesh import MeshSpec
from sbp.plan.fit import fit
from sbp.plan.program import Program
from sbp.source.reader import users_span
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import NdSbp

_NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Case:
    """A program with what is asked of it: what an edit changes.

    Arguments:
      graph, demand, boxing: as for `sbp.plan.fit.fit`.
      tables: the mesh and its rows, which are found once for the program and its edits.
      memory_limit: bytes per device, or None.
      aliased: positions of donated inputs.
      keeping: whether plans are chosen with what gradients keep in mind, which takes longer.
    """

    graph: Graph
    tables: Tables
    demand: Demand
    boxing: Policy
    memory_limit: float | None = None
    aliased: tuple[int, ...] = ()
    keeping: bool = True

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.tables.mesh

    def plan(self) -> Program | None:
        """The cheapest plan, or None."""
        return fit(
            self.graph,
            self.mesh,
            self.demand,
            boxing=self.boxing,
            memory_limit=self.memory_limit,
            aliased=self.aliased,
            keeping=self.keeping,
            tables=self.tables,
        )[0]

    def checker(self) -> Checker:
        """Its constraints, ready to be checked."""
        return Checker(self.graph, self.mesh, self.demand, self.boxing, tables=self.tables)

    def sites(self) -> tuple[PinSite, ...]:
        """Its pins."""
        return pin_sites(self.graph, self.mesh, self.demand)

    def site(self, site: PinSite) -> PinSite | None:
        """The pin that a pin of this program before its edits has become; None when it was
        dropped."""
        nodes = {n.id for n in site.nodes}
        same = (
            s
            for s in self.sites()
            if (s.source, s.position) == (site.source, site.position)
            and {n.id for n in s.nodes} == nodes
        )
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
        return self._with(
            site, tuple(code if k == position else c for k, c in enumerate(site.codes))
        )

    def _with(self, site: PinSite, codes: tuple[Code | None, ...]) -> Case:
        wanted = None if all(c is None for c in codes) else codes
        match site.source:
            case "input":
                inputs = tuple(
                    wanted if i == site.position else t for i, t in enumerate(self.demand.inputs)
                )
                return dataclasses.replace(
                    self, demand=dataclasses.replace(self.demand, inputs=inputs)
                )
            case "output":
                outputs = tuple(
                    wanted if i == site.position else t for i, t in enumerate(self.demand.outputs)
                )
                return dataclasses.replace(
                    self, demand=dataclasses.replace(self.demand, outputs=outputs)
                )
            case _:
                atoms = {
                    axis: decode(c)
                    for axis, c in zip(self.mesh.names, codes, strict=True)
                    if c is not None
                }
                pin = Pin(NdSbp(atoms)) if atoms else None
                return dataclasses.replace(
                    self, graph=rewrite(self.graph, at={n.id: pin for n in site.nodes})
                )

    def insert(self, node: Node, operand: int, position: int, code: Code) -> Case:
        """The program with an annotation on an operand of a node, before its line and wherever that
        was traced.

        It stands for `x = annotate(x)` there: readers from there on see it, gradients included.
        What is made in the line itself is not annotated.
        """
        pin = Pin(NdSbp({self.mesh.names[position]: decode(code)}))
        made_at: dict[Operand, Span | None] = {
            v: users_span(n) for n in self.graph.walk() for v in n.outputs
        }
        lines = [n for n in self.graph.walk() if alike(n, node)]
        entered = [
            n for n in lines if n.id == node.id or made_at.get(n.inputs[operand]) != users_span(n)
        ]
        return dataclasses.replace(
            self, graph=rewrite(self.graph, before={n.id: (operand, pin) for n in entered})
        )


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
    return (node.op, node.span, in_gradient(node), len(node.inputs)) == (
        line.op,
        line.span,
        in_gradient(line),
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
      at: by node id, annotations that say something else, or None for those that are taken out.
      before: by node id, the number of an operand and its pin: an annotation before the node, which
          all that follows reads.
      after: by value, its pin: an annotation behind what makes it.
      own: reads that stay what they are, as (node id, value).
    """
    avals = dict(graph.avals)
    values = itertools.count(max(avals, default=0) + 1)
    ids = itertools.count(max((n.id for n in graph.walk()), default=0) + 1)
    same: dict[int, Operand] = {}

    def of(operand: Operand) -> Operand:
        while isinstance(operand, int) and operand in same:
            operand = same[operand]
        return operand

    def note(operand: int, pin: Pin, like: Node) -> Node:
        value = next(values)
        avals[value], same[operand] = avals[operand], value
        params = {"pin": pin, "cotangent": None}
        made = dataclasses.replace(
            like, id=next(ids), op=annotate_p.name, primitive=annotate_p, params=params, regions=()
        )
        return dataclasses.replace(made, inputs=(operand,), outputs=(value,))

    def visit(g: Graph) -> Graph:
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
                dataclasses.replace(
                    node, inputs=inputs, params=params, regions=tuple(map(visit, node.regions))
                )
            )
            nodes += [note(v, after[v], node) for v in node.outputs if v in after]
        return dataclasses.replace(
            g, nodes=tuple(nodes), outputs=tuple(map(of, g.outputs)), avals=avals
        )

    return visit(graph)
