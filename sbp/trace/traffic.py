"""The bytes that the collectives of a hand-written region send, counted as those of a plan: by the
ring optimum, with loop trips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sbp import _jax
from sbp.trace.collectives import KINDS, names_of
from sbp.trace.graph import Graph, Node
from sbp.trace.regions import amount, trips_of


def handwritten_bytes(node: Node) -> float:
    """Bytes that one device sends when a `shard_map` node runs once."""
    sizes = {str(name): int(n) for name, n in node.params["mesh"].shape.items()}
    return _of_body(node.params["body"], sizes)


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveRun:
    """A collective of a hand-written region.

    Arguments:
      node: the collective.
      mesh_axes: the mesh axes that it runs over.
      runs: how often it runs when the region runs once; in a branch, when that branch is taken.
      bytes_per_device: the bytes that one device sends in all these runs.
    """

    node: Node
    mesh_axes: tuple[str, ...]
    runs: int
    bytes_per_device: float


def collective_runs(region: Node) -> Iterator[CollectiveRun]:
    """The collectives of a `shard_map` node, in program order, with those in loops and branches."""
    sizes = {str(name): int(n) for name, n in region.params["mesh"].shape.items()}
    yield from _runs(region.params["body"], sizes, 1)


def _runs(graph: Graph, sizes: dict[str, int], runs: int) -> Iterator[CollectiveRun]:
    for node in graph.nodes:
        for inner in node.regions:
            yield from _runs(inner, sizes, runs * trips_of(node))
        if node.op in KINDS:
            sent = runs * _of_collective(graph, node, sizes)
            yield CollectiveRun(node, tuple(_mesh_axes(node)), runs, sent)


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
    n = len(groups[0]) if groups else math.prod(sizes[a] for a in _mesh_axes(node))
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


def _mesh_axes(node: Node) -> list[str]:
    names = names_of(node)
    return [
        a for a in (names if isinstance(names, tuple | list) else (names,)) if isinstance(a, str)
    ]


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * _jax.itemsize(aval.dtype)
