"""What shows that the devices of a region are meant to compute something else than one device: each
draws its own numbers, or ranks its own elements."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from jax.sharding import PartitionSpec

from sbp.shardmap.coverage import axes_over
from sbp.shardmap.operators import compares
from sbp.signatures import traits_of
from sbp.trace.collectives import KINDS, SHARD_MAP
from sbp.trace.graph import Graph, Node


def _bodies(graph: Graph) -> Iterator[Node]:
    """The operations of all regions."""
    for region in graph.walk():
        if region.op == SHARD_MAP:
            yield from region.params["body"].walk()


def permutes(graph: Graph, name: str) -> bool:
    """Whether a region sends values along a mesh axis from device to device."""
    return any(
        KINDS.get(node.op) == "permute" and axes_over(node, (name,)) for node in _bodies(graph)
    )


def lengths_of(graph: Graph, name: str) -> frozenset[int]:
    """The lengths of one device's shards along dims that a mesh axis splits."""
    found: set[int] = set()
    for region in graph.walk():
        if region.op != SHARD_MAP:
            continue
        body = region.params["body"]
        for value, spec in zip(body.inputs, region.params["in_specs"], strict=True):
            entries: tuple[Any, ...] = tuple(spec) if isinstance(spec, PartitionSpec) else ()
            for d, e in enumerate(entries):
                if e == name or (isinstance(e, tuple) and name in e):
                    found.add(body.aval(value).shape[d])
    return frozenset(found)


def meant(graph: Graph, ranked: Collection[int]) -> Iterator[str]:
    """What shows that another result on one device may be meant.

    Arguments:
      graph: a program with regions.
      ranked: ids of operations that rank or add up the elements of each shard where they need the
          whole dim.
    """
    every = list(_bodies(graph))
    if any(_draws(node) for node in every):
        yield "its devices draw random numbers of their own"
    reached = {v for node in every if node.id in ranked for v in node.outputs}
    while more := {v for node in every if _takes(node, reached) for v in node.outputs} - reached:
        reached |= more
        for node in every:
            for region in node.regions if reached & set(node.inputs) else ():
                reached |= set(region.inputs)
    for node in every:
        picked = {node.inputs[i] for i in _places(node)}
        if reached & (set(node.inputs) if compares(node) else picked):
            yield "each device ranks its own elements, and what has no place may be dropped"
            return


def _takes(node: Node, values: set[int]) -> bool:
    """Whether an operation, or one of its regions, depends on some values."""
    return any(values & {*inputs} for inputs in (node.inputs, *(r.outputs for r in node.regions)))


def _places(node: Node) -> range:
    indices = traits_of(node.op).indices
    return range(indices.start, min(indices.stop, len(node.inputs)))


def _draws(node: Node) -> bool:
    generates = traits_of(node.op).generates
    return generates == "draws" or (generates == "counter" and bool(node.inputs))
