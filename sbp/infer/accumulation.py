"""Which values' 16-bit parts are summed in float32: `reduce_dtype` of `sbp.jit` and `sbp.annotate`.

Without `reduce_dtype`, a sum of 16-bit parts over devices is the platform's own collective, as in
`jax.jit` (a TPU adds in bfloat16).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from sbp.annotations import Pin, annotate_p
from sbp.trace.graph import Graph, Node, Operand
from sbp.trace.regions import interface_of

Carried = Callable[[Node], Iterator[int]]
"""The positions of the operands of a node whose parts of a sum may go on as parts of its
results."""


@dataclass(frozen=True, slots=True)
class Float32Sum:
    """A sum of 16-bit parts for which the user chose float32 (`reduce_dtype`).

    Arguments:
      dim: the tensor dim that is cut into one block for each device: an all-to-all along it, a
        local sum in float32, and for an all-reduce an all-gather along it. None where no dim is as
        large as the devices are many: the platform sums natively.
    """

    dim: int | None


TILE = (8, 128)
"""Rows and columns of a tile of a TPU's memory: the last two dims of an array lie in such tiles."""


def block_dim(part: Sequence[int], n: int) -> int | None:
    """The dim along which `n` devices each sum one block of their parts.

    Arguments:
      part: the shape of one device's part.
      n: how many devices sum.

    Returns:
      The dim with the least padding; among equals one whose blocks are whole tiles, one that is not
      the last, the first. None when no dim has `n` elements.

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


def float32_sums(graph: Graph, reduce_dtype: str | None, carried: Carried) -> frozenset[int]:
    """The values whose partial sums are accumulated in float32.

    Arguments:
      graph: the program, its regions included.
      reduce_dtype: "float32" for every 16-bit value of the program; None for those that reach an
        annotation with `reduce_dtype`.
      carried: which operands of a node outside of regions hand their parts on.

    Returns:
      Value ids. Where an annotation chooses, these are its operand and all values whose parts may
      arrive there: a sum that is taken earlier, such as ahead of a transpose or of a loop, is in
      float32 as well.
    """
    if reduce_dtype is not None:
        return frozenset(v for v, aval in graph.avals.items() if is_narrow(aval.dtype))
    waiting = [o for n in graph.walk() if _chooses(n) and isinstance(o := n.inputs[0], int)]
    found: set[int] = set()
    sources = _sources(graph, carried) if waiting else {}
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


def _sources(graph: Graph, carried: Carried) -> dict[int, list[int]]:
    """For each value those whose parts may become its own."""
    found: dict[int, list[int]] = defaultdict(list)
    for node in graph.walk():
        pairs: Iterator[tuple[Operand, Operand]] = (
            _through_region(node)
            if node.regions
            else ((node.inputs[k], result) for k in carried(node) for result in node.outputs)
        )
        for source, value in pairs:
            if isinstance(source, int) and isinstance(value, int):
                found[value].append(source)
    return found


def _through_region(node: Node) -> Iterator[tuple[Operand, Operand]]:
    """The operands of a loop or branch with the inputs of its bodies, and what the bodies return
    with the results and, in a loop, with the inputs of the next turn."""
    interface = interface_of(node)
    for number, region in enumerate(node.regions):
        yield from zip(interface.inputs(number, node.inputs), region.inputs, strict=True)
    for out in interface.exits:
        region = node.regions[out.region]
        if out.result >= 0:
            yield region.outputs[out.output], node.outputs[out.result]
        if out.entry is not None:
            yield region.outputs[out.output], region.inputs[out.entered(out.region)]
