"""Questions of the checker about an operation, answered by the traits of its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sbp.signatures import traits_of
from sbp.trace.collectives import SUMS
from sbp.trace.graph import Node


def function_of(node: Node) -> Callable[..., Any] | None:
    """The same function in NumPy; None where the rule names none."""
    return traits_of(node.op).numpy


def divides(node: Node) -> bool:
    """Whether it divides one operand by the other."""
    return function_of(node) is np.divide


def multiplies(node: Node) -> bool:
    """Whether it multiplies two operands element by element."""
    return function_of(node) is np.multiply


def sums_dims(node: Node) -> bool:
    """Whether it sums elements along the dims of its parameter `axes`."""
    return traits_of(node.op).reduces == "sum" and "axes" in node.params and node.op not in SUMS


def sums(node: Node) -> bool:
    """Whether it sums elements along dims, or parts over devices."""
    return node.op in SUMS or sums_dims(node)


def reshapes(node: Node) -> bool:
    """Whether it splits and joins dims."""
    return "new_sizes" in node.params


def counts(node: Node) -> bool:
    """Whether each element of the result is its index along a dim."""
    return traits_of(node.op).generates == "counter" and "dimension" in node.params


def compares(node: Node) -> bool:
    """Whether it compares two operands element by element."""
    return traits_of(node.op).scales == "compared" and len(node.inputs) == 2


def selects(node: Node) -> bool:
    """Whether its first operand selects among the others, element by element."""
    traits = traits_of(node.op)
    return traits.elementwise and traits.indices == range(1)


def slices_at(node: Node) -> range:
    """The positions of the operands that say where a block of the first operand begins along each
    dim; empty for other operations."""
    indices = traits_of(node.op).indices
    places = range(indices.start, len(node.inputs))
    moves = traits_of(node.op).moves and indices.stop > len(node.inputs)
    return places if moves else range(0)


def looks_up(node: Node) -> bool:
    """Whether it looks up or writes elements of its first operand at the indices of the second."""
    return traits_of(node.op).indices == range(1, 2)


def joins(node: Node) -> bool:
    """Whether it joins its operands along the dim of its parameter `dimension`."""
    return traits_of(node.op).moves and "dimension" in node.params


def fills_with_zero(node: Node) -> bool:
    """Whether a lookup at places outside of its table gives zero."""
    mode = node.params.get("mode")
    return getattr(mode, "name", "") == "FILL_OR_DROP" and node.params.get("fill_value") == 0


def writes_at(node: Node) -> bool:
    """Whether it writes elements of its last operand into the first one, at the indices of the
    second."""
    traits = traits_of(node.op)
    return traits.moves and traits.indices == range(1, 2) and len(node.inputs) == 3
