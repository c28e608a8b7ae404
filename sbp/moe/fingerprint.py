"""Checksums of arrays that do not depend on where the arrays lie."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp.moe.hosts import whole

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprints(tree: Any) -> dict[str, str]:
    """A checksum of each array of a tree, by its path: 16 hexadecimal digits.

    Computed on the devices that hold the array, from integers alone, so that it is the same on
    every mesh. Each word is multiplied by odd numbers that depend on its place, and the products
    are added modulo 2**32, twice: a change of one word always shows, other damage almost
    surely.

    >>> fingerprints({"w": jnp.zeros(3)}) == fingerprints({"w": jnp.ones(3)})
    False
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    sums = whole(_all_sums([x for _, x in leaves]))
    return {
        jax.tree_util.keystr(path): "".join(f"{int(s):08x}" for s in np.asarray(two))
        for (path, _), two in zip(leaves, sums, strict=True)
    }


def _sums(x: Any) -> jax.Array:
    """Two sums of an array's words."""
    x = jnp.asarray(x)
    if x.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)  # two words, on a new last dim
    else:
        words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, words.shape, dim
        )
    return jnp.stack([jnp.sum(words * _odd(place, seed), dtype=jnp.uint32) for seed in (1, 2)])


def _odd(place: jax.Array, seed: int) -> jax.Array:
    """An odd number for each place: the finaliser of MurmurHash3 on it."""
    h = place + jnp.uint32(0x9E3779B9 * seed % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return h | jnp.uint32(1)


_all_sums = jax.jit(lambda arrays: [_sums(x) for x in arrays])
