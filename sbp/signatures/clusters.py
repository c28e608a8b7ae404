"""Clusters: neighbouring operations that compute each index of a dim without the others."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sbp.signatures.fallback import traits_of
from sbp.signatures.rule import Op, Row, rule_for
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import Split

Bound = tuple[Operand, int]
"""An operand or result of a node, with a dim that the node computes together with others."""


class Wiring:
    """Who makes and who reads the values of a graph.

    Arguments:
      graph: the graph, without the nodes of its regions.

    Attributes:
      makers: for each value, the position of its node.
      readers: for each value, the positions of the nodes that read it.
      rows: rows of nodes that were asked for.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.rows = graph, dict[int, tuple[Row, ...]]()
        self.makers = {v: at for at, node in enumerate(graph.nodes) for v in node.outputs}
        self.readers = defaultdict[Operand, list[int]](list)
        for at, node in enumerate(graph.nodes):
            for operand in node.inputs:
                self.readers[operand].append(at)

    def maker(self, operand: Operand) -> Node | None:
        """The node that makes a value; None for inputs of the graph and constants."""
        at = self.makers.get(operand) if isinstance(operand, int) else None
        return None if at is None else self.graph.nodes[at]

    def beside(self, value: int) -> list[tuple[int, bool]]:
        """The positions of the nodes that read a value, and of the node that makes it, each with
        whether it makes the value."""
        found = [(at, False) for at in self.readers.get(value, ())]
        return found + ([(self.makers[value], True)] if value in self.makers else [])

    def pointwise(self, at: int, value: Operand, dim: int, made: bool) -> Sequence[Bound]:
        """The operands and results of a node that a row splits together with one of them, if the
        node computes each index of the dim without the others; none for other nodes.

        Arguments:
          at: the position of the node.
          value: the operand or result.
          dim: its dim.
          made: whether the value is a result.
        """
        node = self.graph.nodes[at]
        for row in self._rows(at):
            values, atoms = (node.outputs, row.outs) if made else (node.inputs, row.ins)
            pairs = zip(values, atoms, strict=True)
            if {atom for v, atom in pairs if v is value or v == value} == {Split(dim)}:
                return split_values(node, row)
        return ()

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
                found = self._rows_on(node, 1)
            self.rows[at] = tuple(row for row in found if self._is_by_index(node, row))
        return self.rows[at]

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
        if len(sizes) != 1:
            return False
        (size,) = sizes
        return traits_of(node.op).elementwise or row in self._rows_on(node, max(1, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Operations on values that have one size along a dim, each index by itself.

    Arguments:
      nodes: the operands and results that each node binds, by its position in the graph.
      dims: the dim of each value that a node of the cluster makes.
      leaves: the dim of each other value that the nodes read.
    """

    nodes: dict[int, Sequence[Bound]]
    dims: dict[int, int]
    leaves: dict[Operand, int]


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
    along: Callable[[int, Operand, int, bool], Sequence[Bound]],
) -> tuple[dict[Operand, int], dict[int, Sequence[Bound]]] | None:
    """The values that nodes bind to a dim of a value, each with its dim, and what each of these
    nodes binds, by its position; None where a value would have two dims.

    Arguments:
      wiring: the graph.
      value: the value.
      dim: its dim.
      along: what a node binds together, from its position, a value that it reads or makes, the dim
        of that, and whether it makes it; nothing for a node that binds nothing.
    """
    dims: dict[Operand, int] = {value: dim}
    nodes: dict[int, Sequence[Bound]] = {}
    pending: list[Operand] = [value]
    while pending:
        found = pending.pop()
        for at, made in wiring.beside(found) if isinstance(found, int) else ():
            bound = () if at in nodes else along(at, found, dims[found], made)
            if bound:
                nodes[at] = bound
                pending += dict.fromkeys(v for v, _ in bound if v not in dims)
                if any(dims.setdefault(v, d) != d for v, d in bound):
                    return None
    return dims, nodes


def cluster_of(wiring: Wiring, value: int, dim: int) -> Cluster | None:
    """The largest cluster around a value and one of its dims; None where a value would have two
    dims.

    Arguments:
      wiring: the graph.
      value: a result of the cluster.
      dim: its dim.
    """
    found = bound_to(wiring, value, dim, wiring.pointwise)
    if found is None:
        return None
    dims, nodes = found
    made = {v for at in nodes for v in wiring.graph.nodes[at].outputs}
    return Cluster(
        nodes=dict(sorted(nodes.items())),
        dims={v: d for v, d in dims.items() if isinstance(v, int) and v in made},
        leaves={v: d for v, d in dims.items() if v not in made},
    )
