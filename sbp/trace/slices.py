"""Slices of slices as one slice of the whole array.

JAX takes the gradient of a pad with padding between elements by cutting off the edges and then
every second element. If the dim is split over devices, the first step moves elements that the
second step moves back.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from jax import lax

from sbp.trace.graph import Graph, Node, Operand

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
