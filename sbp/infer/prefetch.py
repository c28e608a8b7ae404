"""Which operands of products a device fetches into its fast memory before the product runs.

A TPU copies arguments of the program from its memory while it computes something else, so a product
that reads weights late does not wait for them. The copies are free as long as the program computes
for at least the time that they take; what they take beyond that is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from sbp import _jax
from sbp.infer.cost import product_seconds
from sbp.infer.flow import Flow
from sbp.machine.mesh import MeshSpec
from sbp.signatures import traits_of
from sbp.trace.graph import Graph, Node

Asked = Mapping[int, tuple[int | None, ...] | None]
"""For each argument of a program the type that is asked for it, in codes; None where it is free."""


def waited_shares(graph: Graph, flow: Flow, asked: Asked, mesh: MeshSpec) -> Mapping[int, float]:
    """For each argument of the program that products read, the share of the reading that they wait
    for; empty where the hardware fetches nothing ahead.

    The time that hides the reading is that of the program's products beyond their own traffic,
    split over all devices. An argument is read in the type that is asked for it, and whole where
    none is asked.

    Arguments:
      graph: the program.
      flow: its decisions.
      asked: types of its arguments.
      mesh: the mesh and its hardware.
    """
    if not mesh.hardware.fast_memory_bytes:
        return {}
    read: set[int] = set()
    idle = taken = 0.0
    for decision in flow.decisions:
        node = decision.node
        if decision.kind != "row" or node is None or traits_of(node.op).flops is None:
            continue
        idle += decision.weight * _idle_seconds(graph, node, mesh)
        for operand in {o for o in node.inputs if isinstance(o, int) and o in asked}:
            read.add(operand)
            taken += decision.weight * _read_seconds(graph, operand, asked[operand] or (), mesh)
    share = max(0.0, 1.0 - idle / taken) if taken else 1.0
    return dict.fromkeys(sorted(read), share)


def _idle_seconds(graph: Graph, node: Node, mesh: MeshSpec) -> float:
    """Seconds of a product in which memory is idle, with its work split over all devices."""
    hardware = mesh.hardware
    avals = [graph.aval(o) for o in (*node.inputs, *node.outputs)]
    traffic = sum(math.prod(a.shape) * _jax.itemsize(a.dtype) for a in avals)
    shapes = [a.shape for a in avals]
    count = len(node.inputs)
    seconds = product_seconds(graph, node, shapes[:count], shapes[count:], hardware)
    return max(0.0, seconds - traffic / hardware.hbm_bytes_per_second) / math.prod(mesh.sizes)


def _read_seconds(graph: Graph, value: int, codes: tuple[int | None, ...], mesh: MeshSpec) -> float:
    """Seconds in which a device reads its part of an argument."""
    aval = graph.avals[value]
    parts = math.prod(n for c, n in zip(codes, mesh.sizes, strict=False) if c is not None and c > 0)
    size = math.prod(aval.shape) * _jax.itemsize(aval.dtype)
    return size / parts / mesh.hardware.hbm_bytes_per_second
