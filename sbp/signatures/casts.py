"""Casts that are moved, so that arrays in narrower types are sent and stored."""

import dataclasses
from collections.abc import Iterator, Set

import numpy as np
from jax import numpy as jnp

from sbp import _jax
from sbp.signatures.fallback import traits_of
from sbp.trace.graph import (
    LOOPS,
    Graph,
    Node,
    Operand,
    body_of,
    interface_of,
    rewriting,
    with_body_constants,
)

# ---- ahead of loops -----------------------------------------------------------------------------
# Casts of loop constants to narrower types, ahead of the loop.
#
# A loop that casts a weight in each trip reads the weight itself. If the weight is split over
# devices, it is gathered ahead of the loop, before the cast: in float32 twice the bytes of the
# bfloat16 that the trips compute with. Ahead of the loop the cast comes first, as in a program
# without a loop. XLA moves such casts out of loops, too, but not across the collective of a plan.


@rewriting
def with_hoisted_casts(graph: Graph, asked: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which casts of loop constants to narrower types stand ahead of their loops, in
    regions too, with the transposes and reshapes before them."""
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op in LOOPS:
            before, node = _hoist(graph, node, asked, ids)
            nodes += before
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _hoist(
    graph: Graph, loop: Node, asked: Set[int], ids: Iterator[int]
) -> tuple[list[Node], Node]:
    """The nodes that stand ahead of a loop, and the loop that reads their results.

    Arguments:
      graph: the graph around the loop.
      loop: the loop.
      asked: values whose types the program asks for, which stay.
      ids: unused numbers of nodes.
    """
    number = body_of(loop)
    body = loop.regions[number]
    fed = interface_of(loop).fed[number]
    # Values of the body that are fixed, each with what it is outside of the loop; and the nodes
    # that move elements of them.
    outside: dict[Operand, Operand] = {
        value: loop.inputs[entry.operand]
        for value, entry in zip(body.inputs, fed, strict=True)
        if entry.kind == "constant"
    }
    makers: dict[Operand, Node] = {}
    hoisted: list[Node] = []
    for node in body.nodes:
        if node.is_barrier:
            pairs = zip(node.inputs, node.outputs, strict=True)
            outside |= {out: outside[o] for o, out in pairs if o in outside}
        elif _moves(graph, node) and node.inputs[0] in {*outside, *makers}:
            makers[node.outputs[0]] = node
            if _narrows(graph, node) and node.outputs[0] not in asked:
                hoisted.append(node)
    before: list[Node] = []

    def made(value: Operand) -> Operand:
        """A value of the body, made ahead of the loop."""
        if value not in outside:
            node = makers[value]
            inputs, new = (made(node.inputs[0]),), graph.new_value(graph.aval(value))
            fields = {"id": next(ids), "inputs": inputs, "outputs": (new,)}
            before.append(dataclasses.replace(node, **fields))
            outside[value] = new
        return outside[value]

    if not hoisted:
        return before, loop
    constants = {node.outputs[0]: made(node.outputs[0]) for node in hoisted}
    nodes = _read_nodes(body, {n.id for n in hoisted})
    read = {*body.outputs, *(o for n in nodes for o in n.inputs)}
    body = dataclasses.replace(body, nodes=nodes)
    return before, with_body_constants(loop, body, read, constants)


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
    return _narrows(graph, node) and all(
        jnp.issubdtype(graph.aval(o).dtype, np.floating) for o in (*node.inputs, *node.outputs)
    )


def looks_up(node: Node, operand: int) -> bool:
    """Whether a node takes elements of an operand at indices, and does nothing else with it.

    Arguments:
      node: a node.
      operand: the position of an operand.
    """
    return node.op == "gather" and operand == 0
