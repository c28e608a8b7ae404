"""The operands of a hand-written region: arrays, and blocks of a dim that does not divide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sbp.annotations import as_array
from sbp.kinds import leaves_of


def arrays_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a region, each leaf an array.

    Raises:
      SbpError: `bad-argument` for a leaf that is no array.
    """
    leaves, tree = leaves_of(args, "a manual region")
    return jax.tree.unflatten(
        tree, [as_array(x, "a manual region takes pytrees of arrays; each leaf is") for x in leaves]
    )


def padded_blocks(x: Any, dim: int, counts: Sequence[int]) -> Any:
    """`x` padded with zeros so that each block of a nested split has the same size.

    Arguments:
      x: the array.
      dim: the dim that is split.
      counts: the sizes of the mesh axes that split it, outer axis first.
    """
    shape = x.shape
    x = jnp.moveaxis(x, dim, -1)
    for n in counts:
        size = -(-x.shape[-1] // n)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n * size - x.shape[-1])])
        x = x.reshape(*x.shape[:-1], n, size)
    x = x.reshape(*(s for i, s in enumerate(shape) if i != dim), -1)
    return jnp.moveaxis(x, -1, dim)
