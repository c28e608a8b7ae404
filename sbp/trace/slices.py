"""Slices of slices as one slice of the whole array.

JAX takes the gradient of a pad with padding between elements by cutting off the edges and then
every second element. If the dim is split over devices, the first step moves elements that the
second step moves back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from sbp import _jax
from sbp.trace.graph import Constant, Graph, Node, Operand

Cut = tuple[int, int, int]
"""First index, last index (exclusive) and stride of a slice along a dim."""

Cuts = tuple[Cut, ...]
"""Where an array is cut, for each dim."""


def whole(shape: tuple[int, ...]) -> Cuts:
    """The cuts of a slice that has all elements of an array."""
    return tuple((0, size, 1) for size in shape)


def shape_of(cuts: Cuts) -> tuple[int, ...]:
    """The shape of a slice."""
    return tuple(-(-(end - start) // stride) for start, end, stride in cuts)


def slicing(cuts: Cuts) -> dict[str, Any]:
    """The fields of a node that slices its operand."""
    starts, limits, strides = zip(*cuts, strict=True)
    params = {
        "start_indices": starts,
        "limit_indices": limits,
        "strides": None if set(strides) == {1} else strides,
    }
    return {"op": "slice", "primitive": lax.slice_p, "params": params}


def cuts_of(node: Node, value: int, shape: tuple[Any, ...]) -> Cuts | None:
    """Where a node cuts its first operand to make a value; None for nodes that do something else,
    and for symbolic sizes.

    Arguments:
      node: the node.
      value: one of its results.
      shape: the shape of its first operand.
    """
    params = node.params
    match node.op:
        case "slice":
            strides = params["strides"] or (1,) * len(shape)
            cuts = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        case "split":
            ends = list(itertools.accumulate(params["sizes"], initial=0))
            at = node.outputs.index(value)
            cut = (ends[at], ends[at + 1], 1)
            cuts = [cut if d == params["axis"] else (0, s, 1) for d, s in enumerate(shape)]
        case "pad":
            config = params["padding_config"]
            if not all(_is_cutting(i) for edges in config for i in edges):
                return None
            sides = zip(config, shape, strict=True)
            cuts = [(-low, size + high, 1) for (low, high, _), size in sides]
        case _:
            return None
    found = tuple(tuple(cut) for cut in cuts)
    if not all(isinstance(i, int | np.integer) for cut in found for i in cut):
        return None
    return tuple((int(a), int(b), int(c)) for a, b, c in found)


def _is_cutting(padding: Any) -> bool:
    """Whether a number of padding elements is negative or 0."""
    return isinstance(padding, int | np.integer) and bool(padding <= 0)


def with_slices(graph: Graph) -> Graph:
    """A graph in which slices read the arrays that were sliced first, in regions too. A pad that
    only cuts off edges is a slice."""
    sources: dict[int, tuple[Operand, Cuts]] = {}
    nodes = []
    for node in graph.nodes:
        if node.regions:
            regions = tuple(with_slices(r) for r in node.regions)
            node = dataclasses.replace(node, regions=regions)
        elif node.op in ("slice", "pad"):
            node = _composed(graph, node, sources)
        for value in node.outputs if node.op in ("slice", "split") else ():
            cuts = cuts_of(node, value, graph.aval(node.inputs[0]).shape)
            if cuts is not None:
                sources[value] = (node.inputs[0], cuts)
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _composed(graph: Graph, node: Node, sources: dict[int, tuple[Operand, Cuts]]) -> Node:
    """A slice of what its operand was cut out of.

    Arguments:
      graph: the graph.
      node: a slice or a pad.
      sources: for each slice before it, its operand and its cuts.
    """
    x = node.inputs[0]
    cuts = cuts_of(node, node.outputs[0], graph.aval(x).shape)
    if cuts is None or not cuts or any(start >= end for start, end, _ in cuts):
        return node
    if isinstance(x, int) and x in sources:
        x, first = sources[x]
        cuts = tuple(map(_through, first, cuts))
    elif node.op == "slice":
        return node
    return dataclasses.replace(node, inputs=(x,), **slicing(cuts))


def _through(first: Cut, then: Cut) -> Cut:
    """A cut of a cut, as one."""
    start, stride = first[0] + then[0] * first[2], then[2] * first[2]
    count = -(-(then[1] - then[0]) // then[2])
    return (start, start + (count - 1) * stride + 1, stride)


# ---- slices one after the other -----------------------------------------------------------------
# Slices of values and copies of scalars, one after the other along a dim.


class Slice(NamedTuple):
    """Neighbouring elements of a value along a dim; of a scalar, copies.

    Arguments:
      source: the value.
      start: the first element.
      size: number of elements.
      is_cut: whether an operation of the program cut it out of a longer value.
    """

    source: Operand
    start: Any
    size: Any
    is_cut: bool = False


def within(parts: Sequence[Slice], cut: Cut) -> list[Slice]:
    """What a cut takes of each of some parts that lie one after the other."""
    slices, at = [], 0
    for part in parts:
        low, high = max(cut[0] - at, 0), min(cut[1] - at, part.size)
        if low < high:
            is_cut = part.is_cut or high - low < part.size
            slices.append(Slice(part.source, part.start + low, high - low, is_cut))
        at += part.size
    return slices


Padded = tuple[Slice, Slice, Slice]
"""Copies of a scalar, a slice, and copies of the scalar."""


def summed(first: Padded, *others: Padded) -> list[Slice]:
    """The slices of a pad, or of the sum of two pads with zeros; none where the slices of the two
    overlap."""
    slices = [[*first]] if not others else []
    for (before, left, _), (low, right, after) in itertools.permutations((first, *others), 2):
        if at_most(before.size + left.size, low.size):
            zeros = before._replace(size=low.size - before.size - left.size)
            end = before._replace(size=after.size)
            slices.append([before, left, zeros, right, end])
    return [s for s in slices[0] if s.size != 0] if slices else []


def is_zero(operand: Operand) -> bool:
    """Whether an operand is the constant zero."""
    return isinstance(operand, Constant) and not np.any(np.asarray(operand.value))


def plain(size: Any) -> Any:
    """A NumPy integer as a Python integer; a symbolic size unchanged."""
    return int(size) if isinstance(size, np.integer) else size


def at_most(a: Any, b: Any) -> bool:
    """Whether a <= b; False where symbolic sizes do not say."""
    try:
        return bool(a <= b)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def is_most(size: Any, of: Any) -> bool:
    """Whether a size is all of another one but 1, or more than half of it; for symbolic sizes also,
    whether it is all but a number."""
    left = of - size
    return (isinstance(left, int) and not isinstance(of, int)) or (
        at_most(left, 1) or at_most(left + 1, size)
    )


def with_single_pads(graph: Graph, inspected: Set[int], ids: Iterator[int]) -> Graph:
    """A graph in which a pad of several dims is several pads of one dim, if only slices read it, or
    sums that only slices read.

    Arguments:
      graph: the graph, without the nodes of its regions.
      inspected: values whose types the program asks for.
      ids: unused numbers of nodes.
    """
    others = {*inspected, *(o for o in graph.outputs if isinstance(o, int))}
    sliced: set[Operand] = set()
    for node in reversed(graph.nodes):
        is_sum = (
            node.op == "add_any" and node.outputs[0] in sliced and node.outputs[0] not in others
        )
        readers = sliced if is_sum or node.op in ("slice", "split") else others
        readers.update(o for o in node.inputs if isinstance(o, int))
    nodes: list[Node] = []
    for node in graph.nodes:
        is_sliced = node.op == "pad" and node.outputs[0] in sliced and node.outputs[0] not in others
        nodes += _single_pads(graph, node, ids) if is_sliced else [node]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _single_pads(graph: Graph, pad: Node, ids: Iterator[int]) -> list[Node]:
    """A pad as pads of one dim each, in the order of the dims."""
    config = [tuple(c) for c in pad.params["padding_config"]]
    dims = [d for d, c in enumerate(config) if c != (0, 0, 0)]
    nodes: list[Node] = []
    x, shape = pad.inputs[0], list(graph.aval(pad.inputs[0]).shape)
    for d in dims:
        (value,), number = pad.outputs, pad.id
        shape[d] = graph.avals[value].shape[d]
        if d != dims[-1]:
            aval = graph.avals[value].update(shape=tuple(shape))
            value, number = graph.new_value(aval), next(ids)
        own = tuple(c if e == d else (0, 0, 0) for e, c in enumerate(config))
        fields = {"inputs": (x, pad.inputs[1]), "outputs": (value,), "id": number}
        nodes.append(dataclasses.replace(pad, params={"padding_config": own}, **fields))
        x = value
    return nodes or [pad]


# ---- join_slices --------------------------------------------------------------------------------
# The primitive `join_slices`: slices of arrays, one after the other.


Piece = tuple[int, Any, Any]
"""(operand, start, size): a slice of an operand of `join_slices` along its dim; of a scalar
operand, `size` copies."""

join_slices_p = _jax.Primitive("join_slices")


def joined(*args: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    """Slices of arrays, one after the other.

    Arguments:
      args: arrays of one shape but for one dim, and scalars.
      dimension: the dim.
      pieces: the slices, in the order of the result.
    """
    array = next(x for x in args if x.ndim)
    found = []
    for operand, start, size in pieces:
        x = args[operand]
        if x.ndim:
            found.append(lax.slice_in_dim(x, start, start + size, axis=dimension))
        else:
            shape = (*array.shape[:dimension], size, *array.shape[dimension + 1 :])
            found.append(lax.broadcast(x, shape))
    return lax.concatenate(found, dimension)


def _abstract(*avals: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    array = next(a for a in avals if a.ndim)
    size = sum(size for _, _, size in pieces)
    return array.update(shape=(*array.shape[:dimension], size, *array.shape[dimension + 1 :]))


join_slices_p.def_impl(joined)
join_slices_p.def_abstract_eval(_abstract)
_jax.mlir.register_lowering(join_slices_p, _jax.mlir.lower_fun(joined, multiple_results=False))
