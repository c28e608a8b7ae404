"""Attention inside each sequence, and the positions of tokens.

Dims: G groups, n sequences of a group, T tokens of one, M model, A heads of queries and K heads
of keys and values, of width D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.moe.layers import Params, wide_dtype


class KeysValues(NamedTuple):
    """What attention looks at, both [G, n, K, T', D]."""

    keys: jax.Array
    values: jax.Array


class Rotary(NamedTuple):
    """Rotary positions (RoFormer, Su et al. 2021, section 3.2.2): entries i and i + D / 2 of a head
    are turned by the angle place * base ** (-2 i / D), so that the product of a query and a key
    depends on how far apart they are.

    Attributes:
      places: [T] or [G, n, T], of each token.
      base: what makes the wavelengths; 10,000 in the paper.
    """

    places: jax.Array
    base: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Heads [G, n, A, T, D], turned; in float32 at least.

        >>> rotary = Rotary(jnp.array([0, 1]), 10_000.0)
        >>> rotary(jnp.ones((1, 1, 1, 2, 2)))[0, 0, 0].round(2).tolist()[0]
        [1.0, 1.0]
        """
        wide, half = wide_dtype(x.dtype), x.shape[-1] // 2
        rates = jnp.asarray(self.base ** -(np.arange(half) / half), wide)
        angles = self.places[..., None, :, None].astype(wide) * rates
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def keys_values(
    params: Params, memory: jax.Array, sequences: int, rotary: Rotary | None = None
) -> KeysValues:
    """Keys and values of tokens [G, S', M], with n sequences in a group; keys turned by their
    places."""
    groups, size, width = memory.shape
    rows = memory.reshape(groups, sequences, size // sequences, width)
    keys = jnp.einsum("gnum,mad->gnaud", rows, params["key"])
    values = jnp.einsum("gnum,mad->gnaud", rows, params["value"])
    return KeysValues(rotary(keys) if rotary else keys, values)


def attention(
    params: Params,
    x: jax.Array,
    memory: KeysValues,
    allowed: jax.Array,
    *,
    rotary: Rotary | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Multi-head attention inside each sequence.

    Each head of keys and values serves A / K heads of queries, one behind the other (grouped-query
    attention, Ainslie et al. 2023). There is no 1/sqrt(D): it is
    folded into the initial scale of `query`.

    Arguments:
      params: query [M, A, D], output [A, D, M].
      x: [G, S, M] queries.
      memory: keys and values of T' tokens of each sequence.
      allowed: [G, n, T or 1, T'], true where a query may look; n is the sequences per group.
      rotary: the places of the queries; None without rotary positions.
      drop: dropout, of the attention weights.

    Returns:
      [G, S, M].
    """
    (groups, size, width), sequences = x.shape, allowed.shape[1]
    queries = x.reshape(groups, sequences, size // sequences, width)
    q = jnp.einsum("gntm,mad->gnatd", queries, params["query"])
    q = rotary(q) if rotary else q
    heads, shared = q.shape[2], memory.keys.shape[2]
    a = "a" if heads == shared else "ar"  # r: the queries of one head of keys
    if heads != shared:
        q = q.reshape(*q.shape[:2], shared, heads // shared, *q.shape[3:])
    wide = wide_dtype(x.dtype)
    scores = jnp.einsum(f"gn{a}td,gnaud->gn{a}tu", q, memory.keys, preferred_element_type=wide)
    # A finite minimum: a row of padding alone stays finite (uniform), where -inf would give NaN.
    seen = jnp.expand_dims(allowed, range(2, 2 + len(a)))
    scores = jnp.where(seen, scores, jnp.asarray(-1e9, scores.dtype))
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    weights = drop(weights) if drop else weights
    mixed = jnp.einsum(f"gn{a}tu,gnaud->gn{a}td", weights, memory.values)
    if heads != shared:
        mixed = mixed.reshape(*mixed.shape[:2], heads, *mixed.shape[4:])
    return jnp.einsum("gnatd,adm->gntm", mixed, params["output"]).reshape(groups, size, width)


def positions(length: int, width: int) -> np.ndarray:
    """Sinusoidal position signal [T, M] (sines, then cosines; wavelengths 2 pi to 10 000 * 2 pi),
    float64. An odd width has a last column of zeros, as in Tensor2Tensor."""
    rates = 10_000.0 ** -(np.arange(width // 2) / max(width // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates[None, :]
    zeros = np.zeros((length, width % 2))
    return np.concatenate([np.sin(angles), np.cos(angles), zeros], axis=-1)
