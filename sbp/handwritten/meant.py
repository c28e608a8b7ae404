"""What shows that a program is meant to compute something else on one device of a mesh axis: each
device ranks its own elements, picks its own, or returns one of its own."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from sbp.handwritten.emulation import Ran, atom_of, claims, places_of, regions_of
from sbp.handwritten.measured import Body, Types, matched
from sbp.handwritten.written_sizes import AxisInCode
from sbp.signatures import traits_of
from sbp.signatures.rule import KEEPS_INDICES, RANKS
from sbp.trace.collectives import AXIS_INDEX, KINDS
from sbp.trace.graph import Constant, Graph, Node
from sbp.types import Split

ONE_EACH = "a region returns one element for each device"


def why_meant(
    got: Ran, want: Ran, types: Types, axis: AxisInCode, *, staged: bool
) -> tuple[dict[str, frozenset[int]], frozenset[int]]:
    """What shows that a difference may be meant, with the results of regions that depend on it; and
    the ids of operations by which each device ranks its own elements to place them, which is no
    fault.

    Arguments:
      got: a run of a program with regions that kept every value.
      want: such a run with one device on a mesh axis.
      types: the types on the mesh axis.
      axis: the mesh axis.
      staged: whether the stages of a pipeline ran one after the other, and so took all elements.
    """
    others = {a.id: b for a, b in matched(got.graph, want.graph)}
    placed, dropped = _ranks(got, want, types, others)
    picked, only = _picks(got.graph, want.graph, others, axis.size), _only_elements(got, types)
    return {
        "each device ranks its own elements, and may drop those over its capacity": _reached(
            got.graph, dropped
        ),
        "each device picks the element at its own index, one for each device": _reached(
            got.graph, {*picked}
        ),
        "each device takes the only element of its shard": _reached(
            got.graph, set() if staged else {*only}
        ),
        ONE_EACH: _one_each(got.graph, want.graph, axis.name),
    }, placed


def _reached(graph: Graph, values: set[int]) -> frozenset[int]:
    """The results of regions that depend on some values in them."""
    return frozenset(
        value
        for region in regions_of(graph)
        for body in [Body(region.params["body"], {}, "")]
        for value, own in zip(region.outputs, body.graph.outputs, strict=True)
        if not values.isdisjoint(body.upstream(own))
    )


def _ranks(
    got: Ran, want: Ran, types: Types, others: Mapping[int, Node]
) -> tuple[frozenset[int], set[int]]:
    """The operations by which the devices rank their own elements to place or to select them, and
    the values for which a run dropped elements, such as tokens of a shard that are over its
    capacity."""
    placed, drops = set[int](), set[int]()
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
                    if any(_drops(*run, i if compares else _moved(node)) for run in runs):
                        drops |= {*node.outputs}
    return frozenset(placed), drops


def _has_own_ranks(body: Body, rank: Node) -> bool:
    """Whether an operation ranks the elements of one device alone, and not values that a collective
    made. The largest element alone is no rank."""
    operand, (found, *_) = rank.inputs[0], rank.outputs
    is_sent = any(m.op in KINDS for m in body.makers(body.reached(operand)))
    own = body.split(operand) is not None or not body.is_good(operand)
    keeps_dims = len(body.graph.aval(operand).shape) == len(body.graph.aval(found).shape)
    return own and keeps_dims and not is_sent and not body.is_good(found)


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


def _one_each(graph: Graph, alone: Graph, name: str) -> frozenset[int]:
    """The results of regions that have one element for each device, whatever their number."""
    return frozenset(
        a.outputs[i]
        for (a, results), (b, _) in zip(claims(graph), claims(alone), strict=False)
        for i in results
        for claim in [atom_of(a.params["out_specs"][i], name)]
        if isinstance(claim, Split)
        and all(
            g.aval(g.outputs[i]).shape[claim.dim] == 1
            for g in (a.params["body"], b.params["body"])
            if i < len(g.outputs)
        )
    )


def _picks(graph: Graph, alone: Graph, others: Mapping[int, Node], n: int) -> Iterator[int]:
    """The values for which each device picks one of n elements by its index, with one device as
    well."""
    for region in regions_of(graph):
        own = set[int]()
        for node in region.params["body"].walk():
            if node.op == AXIS_INDEX or (node.op in KEEPS_INDICES and own & {*node.inputs}):
                own |= {*node.outputs}
            if own & {node.inputs[i] for i in places_of(node)}:
                pairs = ((graph, node), (alone, others.get(node.id)))
                if all(_is_one_of(g, x, n) for g, x in pairs if x is not None):
                    yield from node.outputs


def _is_one_of(graph: Graph, node: Node, n: int) -> bool:
    """Whether an operation takes or writes one of n elements along a dim."""
    taken = node.params.get("slice_sizes")
    sizes = graph.aval(node.inputs[1]).shape if taken is None else taken
    whole = graph.aval(node.inputs[0]).shape
    return any(size == n and part == 1 for size, part in zip(whole, sizes, strict=False))


def _only_elements(got: Ran, types: Types) -> Iterator[int]:
    """The values for which each device takes the only element of its shard, as `w[0]` does; one
    device takes one of several."""
    for region in regions_of(got.graph):
        body, axes = Body(region.params["body"], types, ""), len(region.params["mesh"].shape)
        for node in body.graph.walk():
            if not traits_of(node.op).moves or body.is_good(node.outputs[0]):
                continue
            operand, split = node.inputs[0], body.split(node.inputs[0])
            if isinstance(operand, int) and split is not None:
                shape = list(body.graph.aval(operand).shape)
                # A value in a scan has the dim of the trips before its own.
                dim = split.dim - (got.values[operand].ndim - axes - len(shape))
                out = [*body.graph.aval(node.outputs[0]).shape]
                # `w[0, 1]` is a slice of the other dim, and then `w[0]`.
                slices = len(node.inputs) == 1 and len(out) == len(shape) and out[dim] == 1
                is_smaller = math.prod(out) < math.prod(shape)
                if shape.pop(dim) == 1 and ((slices and is_smaller) or out == shape):
                    yield from node.outputs
