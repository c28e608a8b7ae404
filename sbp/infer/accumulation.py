"""Which sums of 16-bit parts over devices are accumulated in float32: `reduce_dtype` of `sbp.jit`
and `sbp.annotate`.

Without `reduce_dtype`, such a sum is the platform's own collective, as in `jax.jit` (a TPU adds in
bfloat16).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from sbp.annotations import Pin, annotate_p
from sbp.infer.flow import Flow
from sbp.trace.graph import Node

Carried = Callable[[Node], Iterator[int]]
"""For a node with rows, the positions of operands that some row takes as parts of a sum."""


@dataclass(frozen=True, slots=True)
class Float32Sum:
    """A sum of 16-bit parts for which the user chose float32 (`reduce_dtype`).

    Arguments:
      dim: the tensor dim that is cut into one block for each device. An all-to-all exchanges the
        blocks, each device sums its blocks in float32, and for an all-reduce an all-gather joins
        the sums. None where no dim has as many elements as there are devices: then the platform
        sums natively.
    """

    dim: int | None


TILE = (8, 128)
"""Rows and columns of a tile in a TPU's memory. The last two dims of an array are stored in
tiles."""


def block_dim(part: Sequence[int], n: int) -> int | None:
    """The dim along which a sum of parts is cut into blocks, one for each device.

    Arguments:
      part: the shape of one device's part.
      n: the number of devices.

    Returns:
      The dim with the least padding; of equals one whose blocks are whole tiles; of equals one that
      is not the last; of equals the first. None when no dim has `n` elements.

    >>> block_dim((2048, 8192), 16), block_dim((16, 8192), 16), block_dim((3,), 16)
    (0, 1, None)
    """
    tiles = (*(1 for _ in part[2:]), *TILE[2 - min(2, len(part)) :])

    def order(dim: int) -> tuple[float, bool, bool]:
        block = -(-part[dim] // n)
        return block * n / part[dim], block % tiles[dim] != 0, dim == len(part) - 1

    return min((d for d, size in enumerate(part) if size >= n), key=order, default=None)


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits or fewer.

    >>> is_narrow(jnp.bfloat16), is_narrow(jnp.int16)
    (True, False)
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def float32_sums(flow: Flow, reduce_dtype: str | None, carried: Carried) -> frozenset[int]:
    """The values whose partial sums are accumulated in float32.

    Arguments:
      flow: the decisions and edges of the program.
      reduce_dtype: "float32" for every 16-bit value of the program; None for the values whose parts
        may reach an annotation with `reduce_dtype`.
      carried: says which operands of a node may be parts of a sum whose results are parts, too.

    Returns:
      Value ids. Where an annotation chooses, these are its operand and all values whose parts may
      reach it: a sum that the plan makes earlier, such as before a transpose or before a loop, is
      in float32 as well.
    """
    graph = flow.graph
    if reduce_dtype is not None:
        return frozenset(v for v, aval in graph.avals.items() if is_narrow(aval.dtype))
    waiting = [o for n in graph.walk() if _chooses(n) and isinstance(o := n.inputs[0], int)]
    found: set[int] = set()
    sources = _sources(flow, carried) if waiting else {}
    while waiting:
        value = waiting.pop()
        if value not in found and is_narrow(graph.avals[value].dtype):
            found.add(value)
            waiting += sources.get(value, ())
    return frozenset(found)


def _chooses(node: Node) -> bool:
    if node.op != annotate_p.name:
        return False
    pin: Pin | None = node.params["pin"]
    return pin is not None and pin.reduce_dtype is not None


def _sources(flow: Flow, carried: Carried) -> dict[int, list[int]]:
    """For each value, the values whose parts may become its own."""
    found: dict[int, list[int]] = defaultdict(list)
    for decision, edges in zip(flow.decisions, flow.into(), strict=True):
        if decision.kind == "row" and decision.node is not None:
            numbers = frozenset(carried(decision.node))
            edges = [e for e in edges if e.number in numbers]
        for edge in edges:
            if isinstance(edge.operand, int) and edge.kind != "output":
                for value in decision.makes:
                    found[value].append(edge.operand)
    return found
