"""Mirror images of operations: they compute reversed results from reversed operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sbp.signatures.clusters import Wiring, split_values
from sbp.signatures.fallback import traits_of
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.slices import cuts_of, slicing

_MOVING = frozenset({"slice", "split", "pad", "concatenate", "join_slices"})
"""Operations on arrays of one rank that put slices and padding side by side."""
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
"""Operations with a parameter for the direction."""


def reversed_dims(node: Node) -> tuple[int, ...]:
    """The dims that a node reverses."""
    return tuple(map(int, node.params["dimensions"])) if node.op == "rev" else ()


def along_with(wiring: Wiring, at: int, value: Operand, dim: int) -> dict[Operand, int] | None:
    """The operands and results of a node that are reversed together with one of them, each with its
    dim; None for a node that has no mirror image.

    Arguments:
      wiring: the graph.
      at: the position of the node.
      value: one of its operands or results.
      dim: the dim of it that is reversed.
    """
    node, aval = wiring.graph.nodes[at], wiring.graph.aval
    arrays = [v for v in (*node.inputs, *node.outputs) if aval(v).shape]
    moves = node.op in _MOVING or (node.op == "rev" and dim not in reversed_dims(node))
    cumulative = node.op in _CUMULATIVE and node.params["axis"] == dim
    if moves or cumulative or traits_of(node.op).elementwise:
        found = [(v, dim) for v in arrays]
    else:
        row = wiring.pointwise(at, value, dim, made=value in node.outputs)
        found = [] if row is None else split_values(node, row)
    dims = dict(found)
    if len(set(found)) != len(dims) or not set(node.outputs) <= dims.keys():
        return None
    return dims


def mirror_image(graph: Graph, node: Node, dims: Mapping[Operand, int]) -> dict[str, Any]:
    """The fields of the node that makes reversed results from reversed operands, but for its
    operands and results; those are in the order of the fields `inputs` and `outputs`.

    Arguments:
      graph: the graph.
      node: the node.
      dims: the operands and results that are reversed, each with its dim.
    """
    dim, params = dims[node.outputs[0]], node.params
    match node.op:
        case "slice":
            cuts = cuts_of(node, node.outputs[0], graph.aval(node.inputs[0]).shape)
            assert cuts is not None
            start, end, stride = cuts[dim]
            size = graph.aval(node.inputs[0]).shape[dim]
            last = start + (end - 1 - start) // stride * stride
            turned = (size - 1 - last, size - start, stride) if start < end else (0, 0, 1)
            return slicing((*cuts[:dim], turned, *cuts[dim + 1 :]))
        case "split" if params["axis"] == dim:
            sizes = tuple(params["sizes"][::-1])
            return {"params": {**params, "sizes": sizes}, "outputs": node.outputs[::-1]}
        case "pad":
            sides = [tuple(side) for side in params["padding_config"]]
            low, high, interior = sides[dim]
            sides[dim] = (high, low, interior)
            return {"params": {**params, "padding_config": tuple(sides)}}
        case "concatenate" if params["dimension"] == dim:
            return {"inputs": node.inputs[::-1]}
        case "join_slices" if params["dimension"] == dim:
            sizes = [a.shape[dim] if a.shape else None for a in map(graph.aval, node.inputs)]
            pieces = tuple(
                (k, 0 if (whole := sizes[k]) is None else whole - start - size, size)
                for k, start, size in params["pieces"][::-1]
            )
            return {"params": {**params, "pieces": pieces}}
        case op if op in _CUMULATIVE and params["axis"] == dim:
            return {"params": {**params, "reverse": not params["reverse"]}}
        case _:
            return {}
