"""Several sentence pairs in one row of a batch, so that less of it is padding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sbp.moe.packing import Segments

_OPEN = 32
"""Rows that wait for more pairs while the others are full."""


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
