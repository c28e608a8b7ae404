"""Batches of token ids: deterministic, shuffled anew each epoch, with a state that can be saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grain
import numpy as np

from examples.gshard.corpus import Pair
from examples.gshard.tokenizer import Tokenizer, pad_rows
from sbp.errors import SbpError
from sbp.moe.config import BOS, PAD, ModelConfig
from sbp.moe.layers import Segments
from sbp.moe.model import Batch

# ---- rows of several pairs ----------------------------------------------------------------------

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A corpus part as ids.

    Attributes:
      source: [N, T_source], a row for each pair, or for several of them.
      target: [N, T_target], each pair ending in EOS.
      kept: which pairs they are, ascending; a long plain text has several rows.
      languages: [N], the number of the language of each row; of rows of several pairs None.
      segments: which pair of its row each token is of, where rows have several.
    """

    source: np.ndarray
    target: np.ndarray
    kept: tuple[int, ...]
    languages: np.ndarray | None = None
    segments: Segments | None = None

    def packed(self, seed: int) -> Encoded:
        """Several pairs in each row, the same in every epoch."""
        rows = pack(self.source, self.target, seed)
        return Encoded(
            source=rows.source, target=rows.target, kept=self.kept, segments=rows.segments
        )

    @property
    def filled(self) -> float:
        """The share of the rows that is not padding."""
        real = np.count_nonzero(self.source) + np.count_nonzero(self.target)
        return real / (self.source.size + self.target.size)

    def batch(self, rows: Any, cfg: ModelConfig) -> Batch:
        """Some rows as a batch."""
        segments = self.segments and Segments(*(side[rows] for side in self.segments))
        return make_batch(self.source[rows], self.target[rows], cfg, segments)


def encode_pairs(
    pairs: Sequence[Pair], source: Tokenizer, target: Tokenizer, cfg: ModelConfig
) -> Encoded:
    """Token ids of `pairs`. Pairs with a side longer than the model's length are left out; plain
    text is cut there.

    Raises:
      SbpError: `bad-corpus` when none fits.
    """
    sources = source.encode([pair.source for pair in pairs])
    targets = target.encode([pair.target for pair in pairs])
    rows: list[tuple[int, list[int]]] = []
    for i, pair in enumerate(pairs):
        most = cfg.target_length if pair.source == "" else len(targets[i])
        cut = [targets[i][k : k + most] for k in range(0, len(targets[i]), most)]
        if len(sources[i]) <= cfg.source_length and most <= cfg.target_length:
            rows += [(i, row) for row in cut]
    kept = tuple(i for i, _ in rows)
    if not kept:
        raise SbpError(
            f"no sentence pair fits {cfg.source_length} source and {cfg.target_length} target"
            " tokens",
            code="bad-corpus",
        )
    return Encoded(
        source=pad_rows([sources[i] for i in kept], cfg.source_length),
        target=pad_rows([row for _, row in rows], cfg.target_length),
        kept=kept,
        languages=np.unique([pairs[i].language for i in kept], return_inverse=True)[1],
    )


def language_shares(counts: np.ndarray, temperature: float) -> np.ndarray:
    """The probability of each language, proportional to its number of pairs to the power of 1 / T
    (GShard, section 4.2; Arivazhagan et al. 2019, section 4).

    Arguments:
      counts: [L], pairs of each language, at least 1.
      temperature: T, at least 1: 1 takes languages by their pairs, a large one all alike.

    >>> language_shares(np.asarray([100, 1]), 2.0).round(3).tolist()
    [0.909, 0.091]
    """
    weights = np.exp((np.log(counts) - np.log(counts.max())) / temperature)
    return weights / weights.sum()


def sampled_order(
    languages: np.ndarray, temperature: float, rng: np.random.Generator
) -> np.ndarray:
    """The order of an epoch in which languages have the shares of `language_shares`.

    A language has its share of the N places of the epoch, rounded at random to one of the two
    numbers beside it. Its pairs fill them in turn: no pair comes twice more often than another one
    of its language.

    Arguments:
      languages: [N], the number of the language of each pair, from 0 without gaps.
      temperature: T of `language_shares`.
      rng: of the order and of the rounding.

    Returns:
      [N], numbers of pairs.
    """
    counts = np.bincount(languages)
    ends = np.cumsum(language_shares(counts, temperature)) * len(languages)
    ends[-1] = len(languages)
    places = np.diff(np.floor(ends + rng.random()), prepend=0).astype(int)
    chosen = []
    for language, many in enumerate(places):
        rows = rng.permutation(np.flatnonzero(languages == language))
        chosen.append(np.resize(rows, many))
    return rng.permutation(np.concatenate(chosen))


def make_batch(
    source: np.ndarray, target: np.ndarray, cfg: ModelConfig, segments: Segments | None = None
) -> Batch:
    """A batch of G groups from G * n rows of ids; fewer rows are filled up with padding.

    Each pair's target is shifted right behind BOS: EOS is predicted, never read.
    """
    numbers = np.ones_like(target) if segments is None else segments.target
    starts = np.diff(numbers, axis=1, prepend=0) != 0
    shifted = np.pad(target[:, :-1], ((0, 0), (1, 0)))
    target_in = np.where(target == PAD, PAD, np.where(starts, BOS, shifted)).astype(target.dtype)

    def grouped(rows: np.ndarray) -> np.ndarray:
        filled = np.pad(rows, ((0, cfg.sequences - len(rows)), (0, 0)), constant_values=PAD)
        return filled.reshape(cfg.groups, cfg.sequences_per_group, -1)

    return Batch(
        source=grouped(source),
        target_in=grouped(target_in),
        target_out=grouped(target),
        segments=Segments(*map(grouped, segments)) if segments else None,
    )


class _Batches:
    """Random access to whole batches, so that a batch costs one fancy index and not one Python
    object per sentence.

    Epoch e visits the pairs in an order of its own, drawn from (seed, e) once.
    """

    def __init__(
        self,
        encoded: Encoded,
        cfg: ModelConfig,
        seed: int,
        groups: np.ndarray | None,
        temperature: float,
    ) -> None:
        self._encoded, self._cfg, self._seed = encoded, cfg, seed
        self._temperature = temperature
        groups = np.arange(cfg.groups) if groups is None else groups
        self._part = dataclasses.replace(cfg, groups=len(groups))
        within = np.arange(cfg.sequences_per_group)
        self._places = (groups[:, None] * cfg.sequences_per_group + within).ravel()
        self._per_epoch = max(1, len(encoded.source) // cfg.sequences)
        # Of the epoch that is read: a batch then costs no pass over the corpus.
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int) -> Batch:
        epoch, place = divmod(int(index), self._per_epoch)
        last, order = self._order
        if last != epoch:
            rng, languages = np.random.default_rng((self._seed, epoch)), self._encoded.languages
            if self._temperature == 1 or languages is None:
                order = rng.permutation(len(self._encoded.source))
            else:
                order = sampled_order(languages, self._temperature, rng)
            self._order = epoch, order
        rows = order[place * self._cfg.sequences : (place + 1) * self._cfg.sequences]
        mine = self._places[self._places < len(rows)]  # a small corpus does not fill a batch
        return self._encoded.batch(rows[mine], self._part)


def batches(
    encoded: Encoded,
    cfg: ModelConfig,
    seed: int,
    groups: np.ndarray | None = None,
    *,
    temperature: float = 1.0,
) -> grain.DatasetIterator[Batch]:
    """An endless iterator of numpy batches.

    Arguments:
      encoded: the text.
      cfg: the model.
      seed: of the order.
      groups: numbers of the groups of each batch that are made, ascending; all when left out. What
        a group has does not depend on it.
      temperature: of the languages, see `sampled_order`; 1 takes each pair once in an epoch.

    Its `get_state()` is a small JSON object; after `set_state` it goes on as if it had never
    stopped.
    """
    rows: Any = _Batches(encoded, cfg, seed, groups, temperature)  # grain takes it by its protocol
    dataset = grain.MapDataset.source(rows)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(dataset.to_iter_dataset(options))


def evaluation_batches(encoded: Encoded, cfg: ModelConfig) -> Iterator[tuple[slice, Batch]]:
    """All pairs once, in order, with the rows each batch holds; the last is filled up with
    padding."""
    for start in range(0, len(encoded.source), cfg.sequences):
        rows = slice(start, min(start + cfg.sequences, len(encoded.source)))
        yield rows, encoded.batch(rows, cfg)
