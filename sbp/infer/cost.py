"""What a local operation costs: floating-point work of contractions, memory traffic of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sbp import _jax
from sbp.infer.rows import NdRow, row_sends
from sbp.infer.space import Codes, local_shape
from sbp.mesh import MeshSpec
from sbp.trace.graph import Graph, Node

_MOVES = frozenset(
    {"reshape", "broadcast_in_dim", "transpose", "squeeze", "iota", "convert_element_type", "sbp_annotate", "optimization_barrier"}
)
"""Operations that XLA fuses into their consumers nearly always."""

FUSED_FRACTION = 0.25
"""Share of an elementwise operation's operands and results that reaches memory once XLA has fused it with its neighbours."""


def dot_flops(node: Node, lhs: Sequence[int], rhs: Sequence[int]) -> float:
    """Floating-point operations of a dot_general on operands of these (local) shapes: 2 x batch x free x contracting."""
    (_, rhs_contract), (_, rhs_batch) = node.params["dimension_numbers"]
    free = math.prod(size for d, size in enumerate(rhs) if d not in rhs_contract and d not in rhs_batch)
    return 2.0 * math.prod(lhs) * free


def row_seconds(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> float:
    """Seconds of a node's kernel under a row: its work, redundant work of B operands included, and its own collectives."""
    return _local_seconds(graph, node, row, mesh) + sent_seconds(graph, node, row, mesh)


def sent_seconds(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> float:
    """Alpha-beta time of the collectives inside a row's kernels."""
    sent = [s for _, s in row_sends(graph, node, row, mesh)] if row.kernels else []
    return sum(s.rounds * mesh.hardware.latency_seconds + s.bytes / mesh.hardware.link_bytes_per_second for s in sent)


def _local_seconds(graph: Graph, node: Node, row: NdRow, mesh: MeshSpec) -> float:
    hardware = mesh.hardware

    def local(shape: Sequence[int], codes: Codes) -> tuple[int, ...]:
        return local_shape(shape, codes, mesh.sizes)

    ins = [local(graph.aval(o).shape, c) for o, c in zip(node.inputs, row.ins, strict=True)]
    outs = [local(graph.avals[o].shape, c) for o, c in zip(node.outputs, row.outs, strict=True)]
    traffic = sum(math.prod(s) * _jax.itemsize(graph.aval(o).dtype) for o, s in zip(node.inputs, ins, strict=True))
    traffic += sum(math.prod(s) * _jax.itemsize(graph.avals[o].dtype) for o, s in zip(node.outputs, outs, strict=True))
    if node.op == "dot_general":
        return max(dot_flops(node, ins[0], ins[1]) / hardware.flops_per_second, traffic / hardware.hbm_bytes_per_second)
    fraction = 0.05 if node.op in _MOVES else FUSED_FRACTION
    return fraction * traffic / hardware.hbm_bytes_per_second
