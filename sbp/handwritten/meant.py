"""What shows that a program is meant to compute something else on one device of a mesh axis: each
device ranks its own elements, picks its own, or returns one of its own."""

from collections.abc import Iterator

from sbp.handwritten.emulation import atom_of, claims, regions_of
from sbp.handwritten.measured import Body, Types, places_of
from sbp.signatures import traits_of
from sbp.signatures.rule import KEEPS_INDICES, RANKS
from sbp.trace.collectives import AXIS_INDEX
from sbp.trace.graph import Graph
from sbp.types import Split


def why_meant(graph: Graph, alone: Graph, types: Types, name: str, n: int) -> Iterator[str]:
    """What shows that a difference may be meant.

    Arguments:
      graph: a program with regions.
      alone: the program with one device on a mesh axis.
      types: its types on the mesh axis.
      name: the mesh axis.
      n: its size.
    """
    yield from _ranks(graph, types)
    yield from _picks(graph, n)
    yield from _one_each(graph, alone, name)


def _ranks(graph: Graph, types: Types) -> Iterator[str]:
    """Whether the devices rank their own elements, and something depends on the ranks, as which
    tokens of a shard are over its capacity."""
    for region in regions_of(graph):
        body = Body(region.params["body"], types, "")
        nodes = [*body.graph.walk()]
        own = [n for n in nodes if n.op in RANKS and not body.is_good(n.outputs[0])]
        ranks = {v for node in own for v in node.outputs}
        for node in nodes if ranks else ():
            compares = traits_of(node.op).scales == "compared" and len(node.inputs) == 2
            read = node.inputs if compares else [node.inputs[i] for i in places_of(node)]
            if any(not ranks.isdisjoint(body.upstream(v)) for v in read):
                yield "each device ranks its own elements, and may drop those over its capacity"


def _one_each(graph: Graph, alone: Graph, name: str) -> Iterator[str]:
    """Whether a region returns one element for each device, whatever their number."""
    for (a, results), (b, _) in zip(claims(graph), claims(alone), strict=False):
        for i in results:
            claim = atom_of(a.params["out_specs"][i], name)
            shapes = [
                g.aval(g.outputs[i]).shape
                for g in (a.params["body"], b.params["body"])
                if i < len(g.outputs)
            ]
            if isinstance(claim, Split) and all(x[claim.dim] == 1 for x in shapes):
                yield "a region returns one element for each device"


def _picks(graph: Graph, n: int) -> Iterator[str]:
    """Whether each device picks one of n elements, as many as there are devices, by its index."""
    for region in regions_of(graph):
        body, own = region.params["body"], set[int]()
        for node in body.walk():
            if node.op == AXIS_INDEX or (node.op in KEEPS_INDICES and own & {*node.inputs}):
                own |= {*node.outputs}
            shape = body.aval(node.inputs[0]).shape if node.inputs else ()
            if n in shape and {node.inputs[i] for i in places_of(node)} & own:
                yield "each device picks the element at its own index, one for each device"
