"""The bytes that the collectives of a hand-written region send, counted as those of a plan: by the
ring optimum, with loop trips."""

from __future__ import annotations

import math
from typing import Any

from sbp import _jax
from sbp.trace.collectives import KINDS, names_of
from sbp.trace.graph import Graph, Node
from sbp.trace.regions import amount


def handwritten_bytes(node: Node) -> float:
    """Bytes that one device sends when a `shard_map` node runs once."""
    sizes = {str(name): int(n) for name, n in node.params["mesh"].shape.items()}
    return _of_body(node.params["body"], sizes)


def _of_body(graph: Graph, sizes: dict[str, int]) -> float:
    total = 0.0
    for node in graph.nodes:
        inner = [_of_body(region, sizes) for region in node.regions]
        total += amount(node, inner)
        total += _of_collective(graph, node, sizes)
    return total


def _of_collective(graph: Graph, node: Node, sizes: dict[str, int]) -> float:
    names = names_of(node)
    if names is None or not node.inputs:
        return 0.0
    operands = sum(_bytes(graph.aval(o)) for o in node.inputs)
    groups = node.params.get("axis_index_groups")
    mesh_axes = [
        a for a in (names if isinstance(names, tuple | list) else (names,)) if isinstance(a, str)
    ]
    n = len(groups[0]) if groups else math.prod(sizes[a] for a in mesh_axes)
    match KINDS.get(node.op):
        case "reduce":
            return 2 * (n - 1) / n * operands
        case "gathering":
            return (n - 1) * operands
        case "scattering" | "exchange":
            return (n - 1) / n * operands
        case "permute" | "broadcast":
            return operands if n > 1 else 0.0
        case None:
            return 0.0


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * _jax.itemsize(aval.dtype)
