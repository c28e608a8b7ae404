"""Rows of a batch that hold several pairs of sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.moe.attention import positions
from sbp.moe.config import ModelConfig

Array = Any  # a jax.Array inside a step, a numpy array outside


class Segments(NamedTuple):
    """Which pair of its row each token belongs to, int32: 1 for the first, 0 where padded.

    Attributes:
      source: [..., T_source].
      target: [..., T_target].
    """

    source: Array
    target: Array


def same_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether two tokens are of one pair: [..., T] and [..., T'] to [..., T, T']."""
    return queries[..., :, None] == keys[..., None, :]


def places(segments: jax.Array) -> jax.Array:
    """The place of each token in its own segment [..., T], from 0.

    >>> places(np.array([1, 1, 1, 2, 2, 0]))[:5].tolist()
    [0, 1, 2, 0, 1]
    """
    before = np.tri(segments.shape[-1], k=-1, dtype=bool)
    return jnp.sum(same_segment(segments, segments) & before, axis=-1, dtype=jnp.int32)


def signal_of(cfg: ModelConfig, length: int, segments: jax.Array | None) -> jax.Array | None:
    """What is added to embeddings, None with rotary positions: the position signal of T tokens,
    [T, M]; of packed ones [..., T], counted from the start of each segment: [..., T, M]."""
    if cfg.position == "rotary":
        return None
    table = jnp.asarray(positions(length, cfg.model_dim))
    return table if segments is None else jnp.take(table, places(segments), axis=0)
