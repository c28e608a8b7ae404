"""The collectives and the memory traffic of the kernels of a row, and the rows whose collectives
rules allow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.infer.policy import Rules
from sbp.infer.rows import NdRow
from sbp.infer.space import Codes, decode, local_shape
from sbp.machine.mesh import MeshSpec
from sbp.signatures import Op, Row, Sent, kernel_named
from sbp.trace.graph import Graph, Node


def row_sends(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> tuple[tuple[int, Sent], ...]:
    """The collectives of a row's kernels, each with the position of its mesh axis.

    Arguments:
      graph: the program.
      node: the node.
      row: the row. The kernel of each axis sees the shapes that the other axes leave.
      mesh: the mesh.
    """
    placed = _PlacedRow(graph, node, row, mesh)
    found: list[tuple[int, Sent]] = []
    for position, name in enumerate(row.kernels):
        sends = kernel_named(name).sends
        if sends is not None:
            op, on_axis = placed.on_axis(position)
            ins = list(op.ins)
            for other in range(len(row.kernels)):
                ins = placed.widened(ins, other, position) if other != position else ins
            found += [
                (position, sent) for sent in sends(dataclasses.replace(op, ins=tuple(ins)), on_axis)
            ]
    return tuple(found)


def row_traffic(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> float:
    """Bytes that a device moves to or from memory in a row's kernels beside one pass over operands
    and results; arguments as `row_sends`."""
    placed, found = _PlacedRow(graph, node, row, mesh), 0.0
    for position, name in enumerate(row.kernels):
        traffic = kernel_named(name).traffic
        if traffic is not None:
            found += traffic(*placed.on_axis(position))
    return found


def allowed_rows(
    graph: Graph, node: Node, rows: tuple[NdRow, ...], rules: Rules, mesh: MeshSpec
) -> tuple[NdRow, ...]:
    """The rows whose collectives the rules allow.

    Arguments:
      graph: the program.
      node: the node.
      rows: its rows.
      rules: the rules at the node.
      mesh: the mesh.
    """
    if rules.unlimited:
        return rows
    return tuple(
        r
        for r in rows
        if rules.allows_kernel(r.kernels) and rules.allows_sent(row_sends(graph, node, r, mesh))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PlacedRow:
    """A row of a node on a mesh."""

    graph: Graph
    node: Node
    row: NdRow
    mesh: MeshSpec

    def on_axis(self, position: int) -> tuple[Op, Row]:
        """The operation and the row on one mesh axis, with the shapes that the other axes leave."""
        node, row = self.node, self.row
        ins = tuple(
            _localised_by_others(self.graph.aval(o), c, self.mesh, position)
            for o, c in zip(node.inputs, row.ins, strict=True)
        )
        outs = tuple(
            _localised_by_others(self.graph.avals[v], c, self.mesh, position)
            for v, c in zip(node.outputs, row.outs, strict=True)
        )
        atoms = (tuple(decode(c[position]) for c in types) for types in (row.ins, row.outs))
        return Op(node.op, node.params, ins, outs, self.mesh.sizes[position]), Row(
            *atoms, kernel=row.kernels[position]
        )

    def widened(self, ins: list[Any], other: int, position: int) -> list[Any]:
        """The operands after the kernel on another mesh axis has run. Its halo widens a dim that
        comes before the dim that this axis splits.

        Arguments:
          ins: avals of the operands.
          other: the position of the other mesh axis.
          position: the position of this mesh axis.
        """
        widens = kernel_named(self.row.kernels[other]).widens
        if widens is None:
            return ins
        op, on_axis = self.on_axis(other)
        out = list(ins)
        for operand, dim, size in widens(op, on_axis):
            if dim + 1 < self.row.ins[operand][position]:
                shape = list(out[operand].shape)
                shape[dim] = size
                out[operand] = _jax.empty_aval(shape, out[operand].dtype)
        return out


def _localised_by_others(aval: Any, codes: Codes, mesh: MeshSpec, position: int) -> Any:
    kept = tuple(0 if i == position else c for i, c in enumerate(codes))
    return _jax.empty_aval(local_shape(aval.shape, kept, mesh.sizes), aval.dtype)
