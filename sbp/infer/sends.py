"""The collectives of steps of conversions, those of the kernels of a row with their memory traffic,
and the rows whose collectives rules allow."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbp import _jax
from sbp.infer.policy import Rules
from sbp.infer.rows import NdRow
from sbp.infer.space import LOCAL, Codes, Step, decode, local_shape
from sbp.machine.mesh import MeshSpec
from sbp.signatures import Op, PlacedOp, Row, Sent, kernel_named
from sbp.trace.graph import Graph, Node
from sbp.types import Unreduced


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
            times = placed.times(position)
            found += [
                (position, dataclasses.replace(sent, rounds=times * sent.rounds))
                for sent in sends(dataclasses.replace(op, ins=tuple(ins)), on_axis)
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

    def is_allowed(row: NdRow) -> bool:
        # Only the policy "auto" allows collectives of kernels.
        return all(
            policy == "auto" or not kernel_named(name).communicates
            for policy, name in zip(rules.policies, row.kernels, strict=True)
        ) and not any(
            ban.forbids(sent.kind, (position,), sent.bytes)
            for position, sent in row_sends(graph, node, row, mesh)
            for ban in rules.bans
        )

    return rows if rules.unlimited else tuple(filter(is_allowed, rows))


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

    def times(self, position: int) -> int:
        """In how many parts the collectives of the kernel on one mesh axis send their bytes."""
        times = kernel_named(self.row.kernels[position]).times
        if times is None:
            return 1
        atoms = tuple(tuple(map(decode, codes)) for codes in self.row.ins)
        ins = tuple(self.graph.aval(o) for o in self.node.inputs)
        return times(PlacedOp(self.node.params, ins, atoms, self.row.kernels, self.mesh.sizes))

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


def step_stages(step: Step, aval: Any, mesh: MeshSpec) -> tuple[int, ...]:
    """The sizes of the groups in which a reduce-scatter runs, one stage after the other; empty
    where it runs as one collective, and for other steps.

    Arguments:
      step: the step.
      aval: of the whole value.
      mesh: the mesh.
    """
    if step.kind != "reduce_scatter" or _is_exchanged(step, aval, mesh):
        return ()
    return mesh.stages(math.prod(mesh.sizes[i] for i in step.mesh_axes))


def step_sends(step: Step, aval: Any, mesh: MeshSpec) -> tuple[Sent, ...]:
    """The collectives of one step of a conversion, in order; arguments as `step_stages`.

    A reduction that no collective computes (a product, a sum in a wider dtype) exchanges blocks,
    reduces them on each device, and for an all-reduce gathers the results.
    """
    sent = step.bytes_sent
    if step.kind in LOCAL:
        return ()
    if _is_exchanged(step, aval, mesh):
        if step.kind == "reduce_scatter":
            return (Sent("all_to_all", sent),)
        return (Sent("all_to_all", sent / 2), Sent("all_gather", sent / 2))
    return (Sent(step.kind, sent, max(1, len(step_stages(step, aval, mesh)))),)


def _is_exchanged(step: Step, aval: Any, mesh: MeshSpec) -> bool:
    """Whether devices exchange blocks and reduce them themselves."""
    before = decode(step.source[step.mesh_axes[0]])
    if not isinstance(before, Unreduced):
        return False
    if step.wide is not None and step.wide.dim is not None:
        return True
    if step.kind == "all_reduce":
        return before.monoid not in ("sum", "max", "min") and aval.dtype != np.bool_
    if step.kind != "reduce_scatter" or before.monoid != "sum":
        return step.kind == "reduce_scatter"
    (position,) = step.mesh_axes
    dim, n = step.target[position] - 1, mesh.sizes[position]
    part = list(local_shape(aval.shape, step.source, mesh.sizes))
    part[dim] = n * local_shape(aval.shape, step.target, mesh.sizes)[dim]
    return "exchange" in mesh.arrangements(part, dim, n, _jax.itemsize(aval.dtype))
