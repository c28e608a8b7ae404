"""Layers of the GShard Transformer as plain functions of plain pytrees; activations are [G, S, M].

Dims: G groups, n sequences per group, T tokens per sequence, S = n * T, M model, A heads of width
D, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

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


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    """Dense feed-forward: relu(x @ w_in) @ w_out, for x [G, S, M]; no biases."""
    return jax.nn.relu(x @ params["w_in"]) @ params["w_out"]
