"""Rewrites of a traced program under which fewer bytes cross shards: casts to narrower types are
moved; and the clusters that rewrites move as one."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.signatures.rule import Op, Row, rule_for, traits_of
from sbp.trace.graph import (
    LOOPS,
    Dataflow,
    Graph,
    Node,
    Operand,
    body_of,
    interface_of,
    rewriting,
    with_body_constants,
)
from sbp.trace.slices import Writer, without_unread
from sbp.types import Split

# ---- clusters -----------------------------------------------------------------------------------
# Neighbouring operations that compute each index of a dim without the others: what
# `Wiring.pointwise` binds to a value.


Bound = tuple[Operand, int]
"""An operand or result of a node, with a dim that the node computes together with others."""


@dataclass(frozen=True)
class Wiring(Dataflow):
    """Who makes and who reads the values of a graph, and which dims nodes compute index by index.

    Arguments:
      graph: the graph.
      rows: rows of nodes that were asked for.
    """

    rows: dict[Node, tuple[Row, ...]] = field(default_factory=dict)

    def beside(self, value: int) -> list[tuple[Node, bool]]:
        """The nodes that read a value, and the node that makes it, each with whether it makes the
        value."""
        found = [(node, False) for node in self.readers.get(value, ()) if node is not None]
        return found + ([(self.makers[value], True)] if value in self.makers else [])

    def pointwise(self, node: Node, value: Operand, dim: int, made: bool) -> Sequence[Bound]:
        """The operands and results of a node that a row splits together with one of them, if the
        node computes each index of the dim without the others; none for other nodes.

        Arguments:
          node: the node.
          value: the operand or result.
          dim: its dim.
          made: whether the value is a result.
        """

        for row in self._rows(node):
            values, atoms = (node.outputs, row.outs) if made else (node.inputs, row.ins)
            pairs = zip(values, atoms, strict=True)
            if {atom for v, atom in pairs if v is value or v == value} == {Split(dim)}:
                return split_values(node, row)
        return ()

    def _rows(self, node: Node) -> tuple[Row, ...]:
        """The rows that split a dim in all results of a node, and compute each index without the
        others."""
        if node not in self.rows:
            # A sum of pads puts arrays side by side: it is no computation.
            sums_pads = all(m is not None and m.op == "pad" for m in map(self.maker, node.inputs))
            computes = traits_of(node.op).pointwise and not sums_pads
            rows = self._rows_on(node, 1) if computes else ()
            self.rows[node] = tuple(row for row in rows if self._is_by_index(node, row))
        return self.rows[node]

    def _rows_on(self, node: Node, n: int) -> Sequence[Row]:
        """The rows of a node on `n` devices."""
        rule, aval = rule_for(node.op), self.graph.aval
        ins, outs = tuple(map(aval, node.inputs)), tuple(map(aval, node.outputs))
        return () if rule is None else rule.rows(Op(node.op, node.params, ins, outs, n))

    def _is_by_index(self, node: Node, row: Row) -> bool:
        """Whether a row splits a dim of one size in all results, and would do so with one index on
        each device. Groups of features of a convolution are split whole."""
        if row.kernel != "local" or not all(isinstance(atom, Split) for atom in row.outs):
            return False
        sizes = {self.graph.aval(v).shape[dim] for v, dim in split_values(node, row)}
        return len(sizes) == 1 and (
            traits_of(node.op).elementwise or row in self._rows_on(node, max(1, *sizes))
        )


def split_values(node: Node, row: Row) -> list[Bound]:
    """The operands and results of a node that a row splits, each with its dim."""
    values, atoms = (*node.inputs, *node.outputs), (*row.ins, *row.outs)
    return [
        (value, atom.dim)
        for value, atom in zip(values, atoms, strict=True)
        if isinstance(atom, Split)
    ]


def bound_to(
    wiring: Wiring,
    value: int,
    dim: int,
    along: Callable[[Node, Operand, int, bool], Sequence[Bound]],
) -> tuple[dict[Operand, int], dict[Node, Sequence[Bound]]] | None:
    """The values that nodes bind to a dim of a value, each with its dim, and what each of these
    nodes binds; None where a value would have two dims.

    Arguments:
      wiring: the graph.
      value: the value.
      dim: its dim.
      along: what a node binds together, from the node, a value that it reads or makes, the dim of
        that, and whether it makes it; nothing for a node that binds nothing.
    """
    dims: dict[Operand, int] = {value: dim}
    nodes: dict[Node, Sequence[Bound]] = {}
    pending: list[Operand] = [value]
    for found in pending:
        for node, made in wiring.beside(found) if isinstance(found, int) else ():
            if node not in nodes and (bound := along(node, found, dims[found], made)):
                nodes[node] = bound
                pending += dict.fromkeys(v for v, _ in bound if v not in dims)
                if any(dims.setdefault(v, d) != d for v, d in bound):
                    return None
    return dims, nodes


# ---- casts ahead of loops -----------------------------------------------------------------------
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
    return replace(graph, nodes=tuple(nodes))


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
    if not hoisted:
        return [], loop
    writer = Writer(graph, asked, ids)

    def made(value: Operand) -> Operand:
        """A value of the body, made ahead of the loop."""
        if value not in outside:
            node = makers[value]
            inputs = (made(node.inputs[0]),)
            outside[value] = writer.emit(node, graph.aval(value), inputs=inputs)
        return outside[value]

    constants = {node.outputs[0]: made(node.outputs[0]) for node in hoisted}
    # Nor do the nodes stay that moved elements for those that are hoisted.
    left = [node for node in body.nodes if node not in hoisted]
    kept = {*asked, *body.outputs}
    nodes = without_unread(left, kept, lambda node: bool(traits_of(node.op).carries))
    read = {*kept, *(o for n in nodes for o in n.inputs)}
    body = replace(body, nodes=tuple(nodes))
    return writer.nodes, with_body_constants(loop, body, read, constants)


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
    return (
        traits.carries == "rounded"
        and traits.adapts
        and _jax.itemsize(graph.avals[node.outputs[0]].dtype)
        < _jax.itemsize(graph.aval(node.inputs[0]).dtype)
    )


# ---- casts behind lookups -----------------------------------------------------------------------
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
