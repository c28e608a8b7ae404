"""Collectives of hand-written regions: the primitives that name mesh axes, the functions of
`jax.lax` that bind them, and the bytes that they send."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sbp import _jax
from sbp.trace.graph import Graph, Node, amount, trips_of

SHARD_MAP = "shard_map"
"""The primitive of `jax.shard_map`."""

AXIS_INDEX = "axis_index"
"""The primitive that gives the index of a device along a mesh axis."""

Collective = Literal["reduce", "scattering", "gathering", "exchange", "permute", "broadcast"]

KINDS: dict[str, Collective] = {
    "psum": "reduce",
    "psum_invariant": "reduce",
    "pmax": "reduce",
    "pmin": "reduce",
    "reduce_scatter": "scattering",
    "all_gather": "gathering",
    "all_gather_invariant": "gathering",
    "all_to_all": "exchange",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
}
"""The collectives that `check_shard_map` and `manual` know, each with its kind."""

SENT_AS: dict[Collective, str] = {
    "reduce": "all_reduce",
    "scattering": "reduce_scatter",
    "gathering": "all_gather",
    "exchange": "all_to_all",
    "permute": "permute",
    "broadcast": "broadcast",
}
"""The name that plans have for each kind of collective."""

SENDING = frozenset({"permute", "exchange"})
"""The kinds of collectives whose result comes from other devices."""

REDUCTIONS = {"psum": "sum", "psum_invariant": "sum", "pmax": "max", "pmin": "min"}
"""Collectives that reduce to B, with their monoids."""

SUMS = frozenset(op for op, monoid in REDUCTIONS.items() if monoid == "sum")
"""All-reduces by the sum."""

CALLED = {
    "sum": "psum",
    "max": "pmax",
    "min": "pmin",
    "mean": "pmean",
    "scattered": "psum_scatter",
    "gathered": "all_gather",
}
"""The functions of `jax.lax` that call collectives, by what they do."""

REDUCING_CALLS = frozenset(CALLED[name] for name in ("sum", "max", "min", "mean"))
"""The functions of `CALLED` whose result is B."""


def names_of(node: Node) -> tuple[str, ...]:
    """The mesh axes that a collective names; dims of its operand left out."""
    names = node.params.get("axes", node.params.get("axis_name"))
    return tuple(
        a for a in (names if isinstance(names, tuple | list) else (names,)) if isinstance(a, str)
    )


def mesh_sizes(region: Node) -> dict[str, int]:
    """The sizes of the mesh axes of a `shard_map` node."""
    return {str(name): int(n) for name, n in region.params["mesh"].shape.items()}


# ---- what collectives send ----------------------------------------------------------------------
# The bytes that the collectives of a hand-written region send, counted as those of a plan: by the
# ring optimum, with loop trips.


def handwritten_bytes(node: Node) -> float:
    """Bytes that one device sends when a `shard_map` node runs once."""
    return _of_body(node.params["body"], mesh_sizes(node))


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
    yield from _runs(region.params["body"], mesh_sizes(region), 1)


def _runs(graph: Graph, sizes: dict[str, int], runs: int) -> Iterator[CollectiveRun]:
    for node in graph.nodes:
        for inner in node.regions:
            yield from _runs(inner, sizes, runs * trips_of(node))
        if node.op in KINDS:
            sent = runs * _of_collective(graph, node, sizes)
            yield CollectiveRun(node, names_of(node), runs, sent)


def _of_body(graph: Graph, sizes: dict[str, int]) -> float:
    return sum(
        amount(node, [_of_body(region, sizes) for region in node.regions])
        + _of_collective(graph, node, sizes)
        for node in graph.nodes
    )


def _of_collective(graph: Graph, node: Node, sizes: dict[str, int]) -> float:
    if node.op not in KINDS:
        return 0.0
    operands = sum(_bytes(graph.aval(o)) for o in node.inputs)
    groups = node.params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(sizes[a] for a in names_of(node))
    match KINDS[node.op]:
        case "reduce":
            return 2 * (n - 1) / n * operands
        case "gathering":
            return (n - 1) * operands
        case "scattering" | "exchange":
            return (n - 1) / n * operands
        case "permute" | "broadcast":
            return operands if n > 1 else 0.0


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * _jax.itemsize(aval.dtype)
