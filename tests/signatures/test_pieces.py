"""Exchange of pieces: what the rounds deliver, compared with brute force, and joins on drawn
pieces."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from samples import equation, f, rows

from sbp.signatures.kernels.exchange import Pieces, rounds, sent
from sbp.signatures.laws.oracle import Oracle
from sbp.trace.slices import join_slices_p
from sbp.types import S


def drawn(rng: np.random.Generator) -> Pieces:
    """Pieces of an array in drawn places of a result; places between them are of others."""
    size, at, parts = int(rng.integers(1, 30)), 0, []
    for _ in range(int(rng.integers(1, 5))):
        at += int(rng.integers(0, 3))
        start = int(rng.integers(0, size))
        count = int(rng.integers(1, size - start + 1))
        parts.append((at, start, count))
        at += count
    return Pieces(size, at + int(rng.integers(0, 3)), int(rng.integers(2, 9)), tuple(parts))


@pytest.mark.parametrize("seed", range(3))
def test_rounds_deliver_the_pieces(seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        need = drawn(rng)
        x, want = np.arange(need.size), np.full(need.out, -1)
        for at, start, count in need.parts:
            want[at : at + count] = x[start : start + count]
        got = np.full((need.n, need.width), -1)
        for r in rounds(need):
            assert len({s for s, _ in r.pairs}) == len({t for _, t in r.pairs}) == len(r.pairs)
            assert all((s == t) == r.is_own for s, t in r.pairs)
            for source, target in r.pairs:
                kept = np.arange(r.low[target], r.high[target])
                got[target, kept] = x[
                    source * need.chunk + r.first[source] + kept - r.place[target]
                ]
        np.testing.assert_array_equal(got.ravel()[: need.out], want)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_a_roll_sends_what_changes_its_device(n: int, shift: int):
    """Of shards of 8 elements, a roll by at most 8 sends `shift` elements in one round."""
    size = 8 * n
    need = Pieces(size, size, n, ((0, size - shift, shift), (shift, 0, size - shift)))
    assert sent(need) == (shift, 1)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_concatenation_sends_no_shard_more_than_needed(n: int):
    """Of the first of two arrays with shards of 4 elements, two shards go to each device of the
    first half, so there are two rounds; device 0 of two devices has one of its two already."""
    first = Pieces(4 * n, 8 * n, n, ((0, 0, 4 * n),))
    assert sent(first) == (4 * min(2, n - 1), min(2, n - 1))


def test_joins_of_drawn_pieces():
    """Two arrays and a scalar, of which each array may be too short to be split."""
    rng, communicating = np.random.default_rng(0), 0
    for _ in range(12):
        sizes = [int(k) for k in rng.integers(1, 14, 2)]
        pieces = []
        for _ in range(int(rng.integers(2, 6))):
            k = int(rng.integers(0, 3))
            start = int(rng.integers(0, sizes[k])) if k < 2 else 0
            pieces.append((k, start, int(rng.integers(1, sizes[k] - start + 1)) if k < 2 else 2))
        fn = functools.partial(join_slices_p.bind, dimension=0, pieces=tuple(pieces))
        args = (f(sizes[0], 2), f(sizes[1], 2, seed=1), np.float32(0.5))
        eqn = equation("join_slices", fn, args)
        for n in (2, 3, 5):
            for row in rows(eqn, n):
                if row.outs == (S(0),):
                    communicating += 1
                    wrong = Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(row, n, rng)
                    assert not wrong, (pieces, sizes, n, row, wrong)
    assert communicating > 20
