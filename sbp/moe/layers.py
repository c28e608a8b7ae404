"""Layers of the GShard Transformer as plain functions of plain pytrees; activations are [G, S, M].

Dims: G groups, n sequences per group, T tokens per sequence, S = n * T, M model, A heads of width
D, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = Mapping[str, jax.Array]


def wide_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of statistics over values of a dtype.

    >>> wide_dtype("bfloat16"), wide_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    return jnp.promote_types(dtype, jnp.float32)


_WIDE = ("norm", "gate", "noise", "bias")
"""Weights that are used as they are: of norms and routers."""


def cast_weights(params: Any, dtype: Any) -> Any:
    """The weights of a layer in the dtype in which it computes, but those of norms and routers."""

    def cast(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
        return w if path[-1].key in _WIDE else w.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale-only root-mean-square norm over the last dim, as lingvo's GShard models have it
    (epsilon 1e-6); in float32 at least."""
    wide = x.astype(wide_dtype(x.dtype))
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale
    return y.astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero entries with probability `rate` and scale the others up; the identity when `key` is
    None."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def subkey(key: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """The key of place `index` under `key`; None stays None (not training)."""
    return None if key is None else jax.random.fold_in(key, index)


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


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    """Dense feed-forward: relu(x @ w_in) @ w_out, for x [G, S, M]; no biases."""
    return jax.nn.relu(x @ params["w_in"]) @ params["w_out"]


def positions(length: int, width: int) -> np.ndarray:
    """Sinusoidal position signal [T, M] (sines, then cosines; wavelengths 2 pi to 10 000 * 2 pi),
    float64."""
    rates = 10_000.0 ** -(np.arange(width // 2) / max(width // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
