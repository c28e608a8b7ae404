"""The types that a region states for its operands and results: the PartitionSpecs of a
`jax.shard_map`, and the `NdSbp` types of an `sbp.manual`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sbp.trace.collectives import SHARD_MAP
from sbp.trace.dataflow import Dataflow
from sbp.trace.graph import Graph, Node
from sbp.types import Atom, B, NdSbp, P, Split


def outs_of(region: Node) -> str:
    """The argument that states the types of a region's results. A region without results and
    operands is a `jax.shard_map`."""
    stated = (*region.params["in_specs"], *region.params["out_specs"])
    return "out_types" if any(isinstance(s, NdSbp) for s in stated) else "out_specs"


def atom_of(spec: Any, mesh_axis: str) -> Atom:
    """The atom that a spec or a type states on a mesh axis.

    >>> from jax.sharding import PartitionSpec
    >>> atom_of(PartitionSpec(None, "model"), "model"), atom_of(NdSbp({"model": P}), "model")
    (S(1), P(sum))
    """
    if isinstance(spec, NdSbp):
        return spec.get(mesh_axis)
    for dim, entry in enumerate(spec):
        if mesh_axis in _axes(entry):
            return Split(dim)
    return P if mesh_axis in (getattr(spec, "unreduced", None) or ()) else B


def axes_by_dim(spec: Any, rank: int, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The mesh axes that split each dim, outermost first."""
    if isinstance(spec, NdSbp):
        return [tuple(a for a in names if spec.get(a) == Split(d)) for d in range(rank)]
    return [tuple(map(str, _axes(entry))) for entry in spec] + [()] * (rank - len(spec))


def split_over(spec: Any, mesh_axis: str, dim: int) -> Any:
    """A spec or a type that splits a dim over one more mesh axis, the innermost in a spec.

    >>> split_over(NdSbp({"data": Split(0)}), "model", 0)
    data:S(0) model:S(0)
    """
    if isinstance(spec, NdSbp):
        return NdSbp({**spec, mesh_axis: Split(dim)})
    entries = [*spec, *(None for _ in range(dim + 1 - len(spec)))]
    entries[dim] = (*_axes(entries[dim]), mesh_axis)
    return type(spec)(*entries)


def without(spec: Any, mesh_axis: str) -> Any:
    """A spec or a type in which a mesh axis splits nothing.

    >>> without(NdSbp({"data": Split(0), "model": Split(1)}), "data")
    model:S(1)
    """
    if isinstance(spec, NdSbp):
        return NdSbp({name: atom for name, atom in spec.items() if name != mesh_axis})
    entries = (tuple(a for a in _axes(entry) if a != mesh_axis) for entry in spec)
    return type(spec)(*(kept or None for kept in entries))


def _axes(entry: Any) -> tuple[Any, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def regions_of(graph: Graph) -> Iterator[Node]:
    """The regions of a program."""
    return (node for node in graph.walk() if node.op == SHARD_MAP)


def nodes_of(graph: Graph) -> Iterator[Node]:
    """The operations of a program and of the regions in it."""
    for node in graph.walk():
        yield node
        if node.op == SHARD_MAP:
            yield from nodes_of(node.params["body"])


def claims(graph: Graph) -> Iterator[tuple[Node, list[int]]]:
    """The regions of a program in order, each with the positions of the results that claim a type:
    those that not only a gradient takes back as they are."""
    readers = Dataflow(graph).readers
    for node in regions_of(graph):
        pairs = enumerate(zip(node.outputs, node.params["out_specs"], strict=True))
        yield (
            node,
            [
                i
                for i, (v, spec) in pairs
                if v not in readers or not all(_takes_back(r, v, spec) for r in readers[v])
            ],
        )


def _takes_back(reader: Node | None, value: int, spec: Any) -> bool:
    """Whether a reader is the region of a gradient that reads the result with the same spec. A
    residual has no other readers, and its spec claims nothing."""
    if reader is None or reader.op != SHARD_MAP or not reader.backward:
        return False
    taken = zip(reader.inputs, reader.params["in_specs"], strict=True)
    return all(own == spec for operand, own in taken if operand == value)
