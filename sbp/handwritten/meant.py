"""What shows that a program is meant to compute something else on one device: each device ranks its
own elements, picks its own, or returns one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from sbp.handwritten.faults import places_of
from sbp.handwritten.measured import Types, is_good
from sbp.handwritten.specs import atom_of, claims
from sbp.signatures import traits_of
from sbp.signatures.rule import KEEPS_INDICES, RANKS
from sbp.trace.collectives import AXIS_INDEX, KINDS, SHARD_MAP, names_of
from sbp.trace.graph import Graph, Node
from sbp.types import Split


def bodies(graph: Graph) -> Iterator[Node]:
    """The operations of all regions."""
    for region in graph.walk():
        if region.op == SHARD_MAP:
            yield from region.params["body"].walk()


def permutes(graph: Graph, name: str) -> bool:
    """Whether a region sends values along a mesh axis from device to device."""
    named = (names_of(node) for node in bodies(graph) if KINDS.get(node.op) == "permute")
    return any(name in (x if isinstance(x, tuple | list) else (x,)) for x in named)


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


def ranks(graph: Graph, types: Types) -> Iterator[str]:
    """Whether the devices rank their own elements, and something depends on the ranks, as which
    tokens of a shard are over its capacity.

    Arguments:
      graph: a program with regions.
      types: its types on the mesh axis.
    """
    every = list(bodies(graph))
    ranked = [
        node
        for node in every
        if node.op in RANKS and not is_good(types.get(node.outputs[0], frozenset()))
    ]
    reached = {v for node in ranked for v in node.outputs}
    while more := {v for node in every if _takes(node, reached) for v in node.outputs} - reached:
        reached |= more
        for node in every:
            for region in node.regions if reached & set(node.inputs) else ():
                reached |= set(region.inputs)
    for node in every:
        picked = {node.inputs[i] for i in places_of(node)}
        compares = traits_of(node.op).scales == "compared" and len(node.inputs) == 2
        if reached & (set(node.inputs) if compares else picked):
            yield "each device ranks its own elements, and what has no place may be dropped"
            return


def one_each(graph: Graph, alone: Graph, name: str) -> Iterator[str]:
    """Whether a region returns one element for each device, whatever their number."""
    for (a, results), (b, _) in zip(claims(graph), claims(alone), strict=False):
        for i in results:
            claim = atom_of(a.params["out_specs"][i], name)
            bodies = [node.params["body"] for node in (a, b)]
            shapes = [g.aval(g.outputs[i]).shape for g in bodies if i < len(g.outputs)]
            if isinstance(claim, Split) and all(x[claim.dim] == 1 for x in shapes):
                yield "a region returns one element for each device"
                return


def picks(graph: Graph, n: int) -> Iterator[str]:
    """Whether each device picks one of n elements, as many as there are devices, by its index."""
    for region in graph.walk():
        body = region.params["body"] if region.op == SHARD_MAP else None
        own = set[int]()
        for node in body.walk() if body is not None else ():
            if node.op == AXIS_INDEX or (node.op in KEEPS_INDICES and own & {*node.inputs}):
                own |= {*node.outputs}
            shape = body.aval(node.inputs[0]).shape if body and node.inputs else ()
            if n in shape and {node.inputs[i] for i in places_of(node)} & own:
                yield "each device picks an element by its index, of as many as there are devices"
                return


def _takes(node: Node, values: set[int]) -> bool:
    """Whether an operation, or one of its regions, depends on some values."""
    return any(values & {*inputs} for inputs in (node.inputs, *(r.outputs for r in node.regions)))
