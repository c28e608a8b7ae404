"""The shape in which a TPU reduce-scatters a value.

The TPU compiler makes an all-reduce, twice the bytes, of a reduce-scatter whose blocks do not suit
the tiles of its layout (`python -m benchmarks.reduce_scatter_lowering`). A reduce-scatter along the
first dim of an array of three dims stays what it is, if the other two are tiles of a memory layout.
So the value is brought into such a shape where its own does not suit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Arrangement = Literal["as it is", "dim first", "blocks first", "rows of lanes", "exchange"]
"""How a value is arranged for a reduce-scatter along a dim.

`dim first`: the dim is moved to the front, and all between it and the last dim is joined. `blocks
first`: the last dim is cut into blocks, which come first, and all other dims are joined. `rows of
lanes`: each block is a matrix with 128 columns. `exchange`: no shape suits, so the devices
exchange blocks, and each one adds those that it receives.
"""

TILE = (8, 128)
"""Rows and columns of a tile in a TPU's memory. The last two dims of an array are stored in
tiles."""

WORD_BYTES = 4
"""Bytes of a word: narrower numbers share one, so that a block of lanes has to be longer."""

BROAD_BLOCK = 64
"""Elements of a block of the last dim from which on its blocks come first: a block of fewer fills
less than half of the lanes."""


def arrangement(
    shape: Sequence[int], dim: int, devices: int, itemsize: int, *, is_tpu: bool
) -> Arrangement:
    """How a value is arranged for a reduce-scatter.

    Arguments:
      shape: of one device's part, of which `devices` divides `dim`.
      dim: the dim that is split.
      devices: number of devices.
      itemsize: bytes of one element.
      is_tpu: whether the devices are TPUs; other platforms take every shape as it is.

    >>> arrangement((4096, 512), 1, 4, 2, is_tpu=True)
    'blocks first'
    >>> arrangement((4096, 512), 0, 4, 2, is_tpu=True)
    'as it is'
    """
    block, last = shape[dim] // devices, len(shape) - 1
    if not is_tpu or (last > 0 and _suits(shape, dim, block, itemsize)):
        return "as it is"
    if 0 < dim == last and block >= BROAD_BLOCK:
        return "blocks first"
    if last > 1 and dim < last:
        return "dim first"
    return "rows of lanes" if math.prod(shape) // devices % TILE[1] == 0 else "exchange"


def _suits(shape: Sequence[int], dim: int, block: int, itemsize: int) -> bool:
    """Whether blocks of a dim are whole tiles, or lie one after the other."""
    last = len(shape) - 1
    if dim == last:
        return block * itemsize % (TILE[1] * WORD_BYTES) == 0
    return block % TILE[0] == 0 if dim == last - 1 else dim == 0
