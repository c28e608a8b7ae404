"""Attention inside each sequence, and the positions of tokens.

Dims: G groups, n sequences of a group, T tokens of one, M model, A heads of width D.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.moe.layers import Params, dropout, wide_dtype


class KeysValues(NamedTuple):
    """What attention looks at, both [G, n, A, T', D]."""

    keys: jax.Array
    values: jax.Array


def keys_values(params: Params, memory: jax.Array, sequences: int) -> KeysValues:
    """Keys and values of tokens [G, S', M], with n sequences in a group."""
    groups, size, width = memory.shape
    rows = memory.reshape(groups, sequences, size // sequences, width)
    return KeysValues(
        jnp.einsum("gnum,mad->gnaud", rows, params["key"]),
        jnp.einsum("gnum,mad->gnaud", rows, params["value"]),
    )


def attention(
    params: Params,
    x: jax.Array,
    memory: KeysValues,
    allowed: jax.Array,
    *,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Multi-head attention inside each sequence.

    There is no 1/sqrt(D): it is folded into the initial scale of `query`.

    Arguments:
      params: query [M, A, D], output [A, D, M].
      x: [G, S, M] queries.
      memory: keys and values of T' tokens of each sequence.
      allowed: [G, n, T or 1, T'], true where a query may look; n is the sequences per group.
      rate, key: dropout on the attention weights.

    Returns:
      [G, S, M].
    """
    (groups, size, width), sequences = x.shape, allowed.shape[1]
    queries = x.reshape(groups, sequences, size // sequences, width)
    q = jnp.einsum("gntm,mad->gnatd", queries, params["query"])
    wide = wide_dtype(x.dtype)
    scores = jnp.einsum("gnatd,gnaud->gnatu", q, memory.keys, preferred_element_type=wide)
    # A finite minimum: a row of padding alone stays finite (uniform), where -inf would give NaN.
    scores = jnp.where(allowed[:, :, None], scores, jnp.asarray(-1e9, scores.dtype))
    weights = dropout(jax.nn.softmax(scores, axis=-1).astype(x.dtype), rate, key)
    mixed = jnp.einsum("gnatu,gnaud->gnatd", weights, memory.values)
    return jnp.einsum("gnatd,adm->gntm", mixed, params["output"]).reshape(groups, size, width)


def positions(length: int, width: int) -> np.ndarray:
    """Sinusoidal position signal [T, M] (sines, then cosines; wavelengths 2 pi to 10 000 * 2 pi),
    float64."""
    rates = 10_000.0 ** -(np.arange(width // 2) / max(width // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
