"""An array of which each process has a part: the elements that its own devices hold."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sbp.errors import ArgumentError
from sbp.run.padding import Padding


def of_process(x: Any, padding: Padding, sharding: NamedSharding, name: str) -> jax.Array:
    """The global array, padded, from this process's part. Nothing is sent.

    Arguments:
      x: the part: the elements of the true shape that the devices of this process hold, blocks in
        ascending order along each dim, without padding.
      padding: the blocks of the whole.
      sharding: the sharding of the padded shape.
      name: the name of the argument, for errors.

    Raises:
      SbpError: `bad-argument` for a part of another shape.
    """
    blocks = _own_blocks(padding, sharding)
    ranges = [[padding.ranges(dim)[b] for b in own] for dim, own in enumerate(blocks)]
    expected = tuple(sum(stop - start for start, stop in own) for own in ranges)
    if tuple(x.shape) != expected:
        raise ArgumentError(
            f"{name}: an array of shape {tuple(x.shape)} is neither the whole, {padding.shape}, nor"
            f" the part of process {jax.process_index()}, {expected}"
        )
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    sizes = padding.block_shape

    def buffer(index: Any) -> np.ndarray:
        """The buffer of one device: its blocks, of which a dim that is not split has one."""
        picked = host
        for dim, where in enumerate(index):
            block = (where.start or 0) // max(sizes[dim], 1)
            at = blocks[dim].index(block)
            ends = list(itertools.accumulate((b - a for a, b in ranges[dim]), initial=0))
            picked = picked[(slice(None),) * dim + (slice(ends[at], ends[at + 1]),)]
        missing = [(0, size - n) for size, n in zip(sizes, picked.shape, strict=True)]
        return np.pad(picked, missing)

    return jax.make_array_from_callback(padding.padded_shape, sharding, buffer, dtype=host.dtype)


def _own_blocks(padding: Padding, sharding: NamedSharding) -> list[list[int]]:
    """For each dim, the blocks that devices of this process hold, in ascending order."""
    sizes = padding.block_shape
    held = sharding.addressable_devices_indices_map(padding.padded_shape).values()
    return [
        sorted({(index[dim].start or 0) // max(size, 1) for index in held if index is not None})
        for dim, size in enumerate(sizes)
    ]
