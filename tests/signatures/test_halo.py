"""Halo exchange: the elements that devices need, compared with brute force."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from windows import drawn_windows

from sbp.signatures.kernels.exchange import Need, rounds, sent
from sbp.signatures.kernels.halo import Windows


def read_by(windows: Windows, out: int) -> set[int]:
    """The operand's elements that one result element reads, straight from the definition."""
    positions = (windows.first(out) + windows.dilation * k for k in range(windows.window))
    return {
        p // windows.base
        for p in positions
        if p % windows.base == 0 and 0 <= p // windows.base < windows.size
    }


def test_needs_hold_what_windows_read():
    rng = np.random.default_rng(0)
    for windows in filter(None, (drawn_windows(rng) for _ in range(3000))):
        for n in (2, 3, 5):
            chunk = -(-windows.out // n)
            need = windows.need(n)
            for device in range(n):
                results = range(chunk * device, min(chunk * (device + 1), windows.out))
                wanted = set().union(*(read_by(windows, o) for o in results))
                assert wanted <= set(range(*need.wanted(device))), (windows, n, device)


def halos(windows: Windows, n: int) -> list[tuple[int, int]]:
    """For each device, how many elements it needs from its left and from its right (negative: how
    many of its own it does not)."""
    chunk, shard = -(-windows.out // n), -(-windows.size // n)
    ends = [
        (windows.first(chunk * k) + windows.padded(chunk) - 1) // windows.base + 1 for k in range(n)
    ]
    starts = windows.need(n).starts
    return [
        (shard * k - s, e - shard * (k + 1))
        for k, (s, e) in enumerate(zip(starts, ends, strict=True))
    ]


def test_limits_are_the_corrected_formula():
    """Appendix A.4 of the GSPMD paper with the term that its print lacks, and its Figure 11."""
    rng = np.random.default_rng(1)
    for windows in filter(None, (drawn_windows(rng) for _ in range(1000))):
        n = 4
        chunk, shard = -(-windows.out // n), -(-windows.size // n)
        reach = windows.dilation * (windows.window - 1) + 1
        for device, (left, right) in enumerate(halos(windows, n)):
            a = windows.stride * chunk
            start = (a * device - windows.low + windows.base - 1) // windows.base
            limit = (
                a * device + windows.stride * (chunk - 1) + reach - windows.low + windows.base - 1
            ) // windows.base
            assert (left, right) == (shard * device - start, limit - shard * (device + 1))
    figure = halos(Windows(size=12, out=8, stride=2, low=1, window=3), 4)
    assert [right for _, right in figure] == [1, 2, 3, 4] and [left for left, _ in figure] == [
        1,
        0,
        -1,
        -2,
    ]


def delivered(need: Need) -> Iterator[tuple[int, dict[int, int]]]:
    """For each device, what the rounds put where: position in the window to global index, later
    rounds over earlier ones."""
    for device in range(len(need.starts)):
        window: dict[int, int] = {}
        for r in rounds(need):
            sources = [s for s, t in r.pairs if t == device]
            assert len(sources) <= 1
            for k in range(r.width) if sources or r.covers else ():
                if sources:
                    window[r.place[device] + k] = sources[0] * need.chunk + r.first[sources[0]] + k
                else:
                    window.pop(r.place[device] + k, None)
        yield device, window


@pytest.mark.parametrize("seed", range(4))
def test_rounds_deliver_what_is_needed(seed):
    """Any starts, also far ones, reversed ones and ones outside: each wanted element arrives in its
    place."""
    rng = np.random.default_rng(seed)
    for _ in range(300):
        n, size = int(rng.integers(2, 9)), int(rng.integers(1, 40))
        width = int(rng.integers(1, 12))
        starts = tuple(int(s) for s in rng.integers(-9, size + 9, n))
        need = Need(size, -(-size // n), starts, width)
        for r in rounds(need):
            assert len({s for s, _ in r.pairs}) == len(r.pairs) == len({t for _, t in r.pairs})
            assert all(0 <= r.first[s] <= need.chunk - r.width for s, _ in r.pairs)
        for device, window in delivered(need):
            for k in range(*need.wanted(device)):
                assert window.get(k - starts[device]) == k, (need, device)


def test_what_is_sent():
    """A window of three elements takes one from each neighbour; a reversal sends the shard once;
    what stays is not sent."""
    assert sent(Windows(size=64, out=64, low=1, window=3).need(8)) == (2, 2)
    assert sent(Windows(size=64, out=32, stride=2, window=2).need(8)) == (0, 0)
    assert sent(Need(64, 8, tuple(64 - 8 * (k + 1) for k in range(8)), 8)) == (8, 1)
    assert sent(Windows(size=64, out=63, low=-1).need(8)) == (1, 1)
