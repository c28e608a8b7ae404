"""Several sentence pairs in one row of a batch, so that less of it is padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sbp.moe.attention import positions
from sbp.moe.config import ModelConfig

Array = Any  # a jax.Array inside a step, a numpy array outside

_OPEN = 32
"""Rows that wait for more pairs while the others are full."""


class Segments(NamedTuple):
    """Which pair of its row each token belongs to, int32: 1 for the first, 0 where padded.

    Attributes:
      source: [..., T_source].
      target: [..., T_target].
    """

    source: Array
    target: Array


class Packed(NamedTuple):
    """Rows of token ids, source [R, T_source] and target [R, T_target], and their pairs."""

    source: np.ndarray
    target: np.ndarray
    segments: Segments


@dataclass(slots=True)
class _Row:
    """Pairs of one row, and the tokens that they leave free on either side."""

    source: int
    target: int
    pairs: list[int] = field(default_factory=list)

    def add(self, pair: int, source: int, target: int) -> None:
        self.pairs.append(pair)
        self.source -= source
        self.target -= target


def pack(source: np.ndarray, target: np.ndarray, seed: int) -> Packed:
    """Lay pairs one behind the other, each into the first of the rows still open that has room on
    both sides; pairs come in an order drawn from the seed.

    Arguments:
      source: [N, T_source] ids of a pair's source, 0 behind its end.
      target: [N, T_target], the same.
      seed: of the order.

    >>> import numpy as np
    >>> packed = pack(np.array([[5, 2, 0, 0], [7, 2, 0, 0]]), np.array([[8, 0], [9, 0]]), seed=0)
    >>> packed.segments.source
    array([[1, 1, 2, 2]], dtype=int32)
    """
    sizes = np.stack([(source != 0).sum(axis=1), (target != 0).sum(axis=1)], axis=1).tolist()
    limits = source.shape[1], target.shape[1]
    rows: list[_Row] = []
    waiting: list[_Row] = []
    for pair in np.random.default_rng(seed).permutation(len(source)).tolist():
        need, want = sizes[pair]
        found = next((r for r in waiting if r.source >= need and r.target >= want), None)
        if found is None:
            found = _Row(*limits)
            rows.append(found)
            waiting.append(found)
            if len(waiting) > _OPEN:
                waiting.remove(min(waiting, key=lambda r: min(r.source, r.target)))
        found.add(pair, need, want)
    (sources, of_source), (targets, of_target) = (
        _laid_out(ids, [r.pairs for r in rows], [size[side] for size in sizes])
        for side, ids in enumerate((source, target))
    )
    return Packed(sources, targets, Segments(of_source, of_target))


def _laid_out(
    ids: np.ndarray, rows: list[list[int]], sizes: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of the pairs of each row one behind the other, and the number of each one's pair."""
    out = np.zeros((len(rows), ids.shape[1]), ids.dtype)
    numbers = np.zeros(out.shape, np.int32)
    for row, pairs in enumerate(rows):
        end = 0
        for number, pair in enumerate(pairs, 1):
            start, end = end, end + sizes[pair]
            out[row, start:end] = ids[pair, : sizes[pair]]
            numbers[row, start:end] = number
    return out, numbers


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
