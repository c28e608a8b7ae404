"""What shows that a program is meant to compute something else on one device of a mesh axis: each
device ranks its own elements, picks its own, or returns one of its own."""

from collections.abc import Iterator

import numpy as np

from sbp.handwritten.emulation import Ran, atom_of, claims, regions_of
from sbp.handwritten.measured import Body, Types, matched, places_of
from sbp.signatures import traits_of
from sbp.signatures.rule import KEEPS_INDICES, RANKS
from sbp.trace.collectives import AXIS_INDEX
from sbp.trace.graph import Constant, Graph, Node
from sbp.types import Split


def why_meant(
    got: Ran, want: Ran, types: Types, name: str, n: int
) -> tuple[frozenset[str], frozenset[int]]:
    """What shows that a difference may be meant; and the ids of operations by which each device
    ranks its own elements to place them, which is no fault.

    Arguments:
      got: a run of a program with regions that kept every value.
      want: such a run with one device on a mesh axis.
      types: the types on the mesh axis.
      name: the mesh axis.
      n: its size.
    """
    placed, drops = _ranks(got, want, types)
    capacity = {"each device ranks its own elements, and may drop those over its capacity"}
    reasons = {*_picks(got.graph, n), *_one_each(got.graph, want.graph, name)}
    return frozenset(reasons | (capacity if drops else set())), placed


def _ranks(got: Ran, want: Ran, types: Types) -> tuple[frozenset[int], bool]:
    """The operations by which the devices rank their own elements to place or to select them, and
    whether a run dropped elements, such as tokens of a shard that are over its capacity."""
    placed, drops, others = set[int](), False, {a.id: b for a, b in matched(got.graph, want.graph)}
    for region in regions_of(got.graph):
        body = Body(region.params["body"], types, "")
        nodes = [*body.graph.walk()]
        own = [n for n in nodes if n.op in RANKS and _has_own_ranks(body, n)]
        ranked = {v for node in own for v in node.outputs}
        for node in nodes if own else ():
            compares = traits_of(node.op).scales == "compared" and not _is_sign(node)
            for i in range(len(node.inputs)) if compares else _own_places(body, node):
                if found := ranked.intersection(body.upstream(node.inputs[i])):
                    placed |= {n.id for n in own if not found.isdisjoint(n.outputs)}
                    runs = ((got, node), (want, others.get(node.id)))
                    drops |= any(_drops(*run, i if compares else _moved(node)) for run in runs)
    return frozenset(placed), drops


def _has_own_ranks(body: Body, rank: Node) -> bool:
    """Whether an operation ranks the elements of one device alone."""
    operand = rank.inputs[0]
    own = body.split(operand) is not None or not body.is_good(operand)
    return own and not body.is_good(rank.outputs[0])


def _is_sign(node: Node) -> bool:
    """Whether JAX looks for negative indices."""
    zeros = (x.value for x in node.inputs if isinstance(x, Constant))
    return traits_of(node.op).numpy is np.less and any(np.all(np.asarray(x) == 0) for x in zeros)


def _own_places(body: Body, node: Node) -> range:
    """The operands that say where an operation takes elements of the device's own shard, or where
    it writes elements."""
    places = places_of(node)
    is_own = places and (_moved(node) > 0 or body.split(node.inputs[0]) is not None)
    return places if is_own else range(0)


def _moved(node: Node) -> int:
    """The operand that an operation takes elements of, or whose elements it writes."""
    return max({*range(len(node.inputs))} - {*places_of(node)})


def _drops(ran: Ran, node: Node | None, operand: int) -> bool:
    """Whether an operation leaves out an element, or may do so because its values were not kept.

    Arguments:
      ran: the run.
      node: a comparison of ranks with a capacity or with places, or an operation that takes or
          writes elements at places.
      operand: the position of the ranks, or of the elements.
    """
    sides = () if node is None else (node.inputs[operand], node.outputs[0])
    values = [ran.values[v] for v in sides if isinstance(v, int) and v in ran.values]
    if node is None or len(values) < 2:
        return True
    given, found = values
    if places_of(node):
        return not np.isin(given, found).all()
    if traits_of(node.op).numpy is np.equal:  # each rank is compared with all places, along a dim
        dims = (d for d in range(given.ndim) if (given == given.take([0], d)).all())
        return not any(found.any(d).all() for d in dims)
    return not found.all() and bool(found.any())


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
