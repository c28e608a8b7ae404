"""Clusters: neighbouring operations that compute each index of a dim without the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp.signatures.fallback import traits_of
from sbp.signatures.rule import Op, Row, rule_for
from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.types import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Who makes and who reads the values of a graph.

    Arguments:
      graph: the graph, without the nodes of its regions.
      makers: for each value, the position of its node.
      readers: for each value, the positions of the nodes that read it.
      rows: rows of nodes that were asked for.
    """

    graph: Graph
    makers: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]
    rows: dict[int, tuple[Row, ...]]

    @staticmethod
    def of(graph: Graph) -> Wiring:
        """The wiring of a graph."""
        readers: dict[int, list[int]] = defaultdict(list)
        for at, node in enumerate(graph.nodes):
            for operand in node.inputs:
                if isinstance(operand, int):
                    readers[operand].append(at)
        makers = {v: at for at, node in enumerate(graph.nodes) for v in node.outputs}
        return Wiring(graph=graph, makers=makers, readers=readers, rows={})

    def maker(self, operand: Operand) -> Node | None:
        """The node that makes a value; None for inputs of the graph and constants."""
        at = self.makers.get(operand) if isinstance(operand, int) else None
        return None if at is None else self.graph.nodes[at]

    def beside(self, value: int) -> list[tuple[int, bool]]:
        """The positions of the nodes that read a value, and of the node that makes it, each with
        whether it makes the value."""
        found = [(at, False) for at in self.readers.get(value, ())]
        return found + ([(self.makers[value], True)] if value in self.makers else [])

    def pointwise(self, at: int, value: Operand, dim: int, *, made: bool) -> Row | None:
        """The row of a node that splits a dim of one of its operands or results, if the node
        computes each index of the dim without the others.

        Arguments:
          at: the position of the node.
          value: the operand or result.
          dim: its dim.
          made: whether the value is a result.
        """
        node = self.graph.nodes[at]
        for row in self._rows(at):
            values, atoms = (node.outputs, row.outs) if made else (node.inputs, row.ins)
            if any(v is value or v == value for v in values) and all(
                atom == Split(dim)
                for v, atom in zip(values, atoms, strict=True)
                if v is value or v == value
            ):
                return row
        return None

    def _rows(self, at: int) -> tuple[Row, ...]:
        """The rows that split a dim in all results of a node, and compute each index without the
        others."""
        if at not in self.rows:
            node = self.graph.nodes[at]
            makers = [self.maker(o) for o in node.inputs]
            # A sum of pads puts arrays side by side: it is no computation.
            is_sum_of_pads = all(m is not None and m.op == "pad" for m in makers)
            found: Sequence[Row] = ()
            if traits_of(node.op).pointwise and not is_sum_of_pads:
                found = self._offered(node, 1)
            self.rows[at] = tuple(row for row in found if self._is_by_index(node, row))
        return self.rows[at]

    def _offered(self, node: Node, n: int) -> Sequence[Row]:
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
        if len(sizes) != 1:
            return False
        (size,) = sizes
        return traits_of(node.op).elementwise or row in self._offered(node, max(1, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Operations on values that have one size along a dim, each index by itself.

    Arguments:
      nodes: the row of each node, by its position in the graph.
      dims: the dim of each value that a node of the cluster makes.
      leaves: the dim of each other value that the nodes read.
    """

    nodes: dict[int, Row]
    dims: dict[int, int]
    leaves: dict[Operand, int]


def split_values(node: Node, row: Row) -> list[tuple[Operand, int]]:
    """The operands and results of a node that a row splits, each with its dim."""
    values, atoms = (*node.inputs, *node.outputs), (*row.ins, *row.outs)
    return [
        (value, atom.dim)
        for value, atom in zip(values, atoms, strict=True)
        if isinstance(atom, Split)
    ]


def cluster_of(wiring: Wiring, value: int, dim: int) -> Cluster | None:
    """The largest cluster around a value and one of its dims; None where a value would have two
    dims.

    Arguments:
      wiring: the graph.
      value: a result of the cluster.
      dim: its dim.
    """
    nodes: dict[int, Row] = {}
    dims: dict[Operand, int] = {value: dim}
    pending: list[Operand] = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, Constant):
            continue
        for at, made in wiring.beside(found):
            row = nodes.get(at) or wiring.pointwise(at, found, dims[found], made=made)
            if row is None:
                continue
            nodes[at] = row
            for other, its_dim in split_values(wiring.graph.nodes[at], row):
                if other not in dims:
                    dims[other] = its_dim
                    pending.append(other)
                if dims[other] != its_dim:
                    return None
    made = {v for at in nodes for v in wiring.graph.nodes[at].outputs}
    return Cluster(
        nodes=dict(sorted(nodes.items())),
        dims={v: d for v, d in dims.items() if isinstance(v, int) and v in made},
        leaves={v: d for v, d in dims.items() if v not in made},
    )
