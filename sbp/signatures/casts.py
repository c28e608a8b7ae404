"""Casts that are moved, so that arrays in narrower types are sent and stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

import numpy as np
from jax import numpy as jnp

from sbp import _jax
from sbp.signatures.fallback import traits_of
from sbp.trace.graph import Graph, Node, Operand, rewritten
from sbp.trace.regions import LOOPS, body_of, interface_of, with_body_constants

# ---- ahead of loops -----------------------------------------------------------------------------
# Casts of loop constants to narrower types, ahead of the loop.
#
# A loop that casts a weight in each trip reads the weight itself. If the weight is split over
# devices, it is gathered ahead of the loop, before the cast: in float32 twice the bytes of the
# bfloat16 that the trips compute with. Ahead of the loop the cast comes first, as in a program
# without a loop. XLA moves such casts out of loops, too, but not across the collective of a plan.


def with_hoisted_casts(graph: Graph) -> Graph:
    """A graph in which casts of loop constants to narrower types stand ahead of their loops, in
    regions too, with the transposes and reshapes before them.

    Arguments:
      graph: a traced program; new values are entered in its table of avals.
    """
    if not any(node.op in LOOPS for node in graph.walk()):
        return graph

    def rewrite(graph: Graph, inspected: Set[int], ids: Iterator[int]) -> Graph:
        nodes: list[Node] = []
        for node in graph.nodes:
            if node.op in LOOPS:
                hoisted = _Hoisting(graph, node, inspected, ids)
                nodes += hoisted.before
                node = hoisted.loop
            nodes.append(node)
        return dataclasses.replace(graph, nodes=tuple(nodes))

    return rewritten(graph, rewrite)


class _Hoisting:
    """One loop, whose body reads hoisted casts.

    Arguments:
      graph: the graph around the loop.
      loop: the loop.
      inspected: values whose types the program asks for, which stay.
      ids: unused numbers of nodes.

    Attributes:
      before: the nodes that now stand ahead of the loop.
      loop: the loop that reads their results.
    """

    def __init__(
        self,
        graph: Graph,
        loop: Node,
        inspected: Set[int],
        ids: Iterator[int],
    ) -> None:
        self.graph, self.ids = graph, ids
        self.before: list[Node] = []
        self.outside: dict[int, Operand] = {}
        body_number = body_of(loop)
        body = loop.regions[body_number]
        fed = interface_of(loop).fed[body_number]
        fixed: dict[int, Operand] = {
            value: loop.inputs[entry.operand]
            for value, entry in zip(body.inputs, fed, strict=True)
            if entry.kind == "constant"
        }
        makers: dict[int, Node] = {}
        hoisted: list[Node] = []
        for node in body.nodes:
            if node.is_barrier:
                fixed |= {
                    out: fixed[o]
                    for o, out in zip(node.inputs, node.outputs, strict=True)
                    if isinstance(o, int) and o in fixed
                }
            elif _moves(self.graph, node) and node.inputs[0] in {*fixed, *makers}:
                makers[node.outputs[0]] = node
                if _narrows(graph, node) and node.outputs[0] not in inspected:
                    hoisted.append(node)
        self.fixed, self.makers = fixed, makers
        self.loop = self._with(loop, body_number, hoisted) if hoisted else loop

    def _with(self, loop: Node, body_number: int, hoisted: list[Node]) -> Node:
        """The loop that reads the results of nodes of its body as constants."""
        body, outer = loop.regions[body_number], [self._made(n.outputs[0]) for n in hoisted]
        nodes = _read_nodes(body, {n.id for n in hoisted})
        read = {*body.outputs, *(o for n in nodes for o in n.inputs)}
        made = {n.outputs[0]: o for n, o in zip(hoisted, outer, strict=True)}
        return with_body_constants(loop, dataclasses.replace(body, nodes=nodes), read, made)

    def _made(self, value: int) -> Operand:
        """A value of the body, made ahead of the loop."""
        if value in self.fixed:
            return self.fixed[value]
        if value not in self.outside:
            node = self.makers[value]
            operand = node.inputs[0]
            assert isinstance(operand, int)
            new = self.graph.new_value(self.graph.avals[value])
            inputs = (self._made(operand),)
            self.before.append(
                dataclasses.replace(node, id=next(self.ids), inputs=inputs, outputs=(new,))
            )
            self.outside[value] = new
        return self.outside[value]


def _read_nodes(body: Graph, hoisted: Set[int]) -> tuple[Node, ...]:
    """The nodes of a body without those of some ids, and without those that moved elements for
    them."""
    read, kept = set(body.outputs), list[Node]()
    for node in reversed(body.nodes):
        for_hoisted = traits_of(node.op).carries and not read.intersection(node.outputs)
        if node.id not in hoisted and not for_hoisted:
            read.update(node.inputs)
            kept.append(node)
    return tuple(reversed(kept))


def _moves(graph: Graph, node: Node) -> bool:
    """Whether a node has each element of its one operand once, perhaps rounded."""
    traits = traits_of(node.op)
    return (
        len(node.inputs) == len(node.outputs) == 1
        and not node.regions
        and (traits.carries in ("arranged", "copied") or _narrows(graph, node))
    )


def _narrows(graph: Graph, node: Node) -> bool:
    """Whether a node casts its operand to a type of fewer bytes."""
    traits = traits_of(node.op)
    if not (traits.carries == "rounded" and traits.adapts):
        return False
    before, after = graph.aval(node.inputs[0]), graph.avals[node.outputs[0]]
    return _jax.itemsize(after.dtype) < _jax.itemsize(before.dtype)


# ---- behind lookups -----------------------------------------------------------------------------
# Casts of tables of which few rows are read.
#
# `table.astype(bfloat16)[tokens]` casts the whole table: XLA does not move a cast behind a lookup.
# The rows that were looked up are cast instead (`sbp.run.interpret`).


def rounds(graph: Graph, node: Node) -> bool:
    """Whether a node rounds numbers to a dtype of fewer bytes.

    Arguments:
      graph: a program with the node.
      node: the node.
    """
    traits = traits_of(node.op)
    if not (traits.carries == "rounded" and traits.adapts and len(node.inputs) == 1):
        return False
    before, after = graph.aval(node.inputs[0]).dtype, graph.avals[node.outputs[0]].dtype
    return (
        _jax.itemsize(after) < _jax.itemsize(before)
        and jnp.issubdtype(before, np.floating)
        and jnp.issubdtype(after, np.floating)
    )


def looks_up(node: Node, operand: int) -> bool:
    """Whether a node takes elements of an operand at indices, and does nothing else with it.

    Arguments:
      node: a node.
      operand: the position of an operand.
    """
    return node.op == "gather" and operand == 0
