"""Theorems about the places of elements, on which split rows and their kernels rest. They are in
linear arithmetic, for all sizes.

A dim of length L is on n devices in blocks of c = ceil(L / n) elements: device i has the elements
from index i * c on, and the last blocks are padded. Each theorem is stated for a given n; every
other number is any integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import z3

from sbp.signatures.laws.theorems import Theorem

Term = Any
"""A term of Z3, whose classes have no useful types."""


def _ints(names: str) -> tuple[Term, ...]:
    return tuple(z3.Ints(names))


def _minimum(a: Term, b: Term) -> Term:
    return z3.If(a <= b, a, b)


def _maximum(a: Term, b: Term) -> Term:
    return z3.If(a >= b, a, b)


def _clip(x: Term, low: Term, high: Term) -> Term:
    return _minimum(_maximum(x, low), high)


class _Blocks:
    """A dim of any length, split over n devices.

    Arguments:
      n: number of devices.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.length, self.chunk = _ints("length chunk")
        self.premises = [
            self.length >= 1,
            n * self.chunk >= self.length,
            n * (self.chunk - 1) < self.length,
        ]

    def start(self, device: int) -> Term:
        """The global index of a block's first element."""
        return device * self.chunk

    def extent(self, device: int) -> Term:
        """How many elements of a block are not padding."""
        return _clip(self.length - self.start(device), 0, self.chunk)

    def owns(self, device: int, index: Term) -> Term:
        """Whether a device's block has the element at a global index."""
        here = index - self.start(device)
        return z3.And(here >= 0, here < self.extent(device))


def _total(values: Sequence[Term]) -> Term:
    return z3.Sum(list(values))


def one_holder(n: int) -> Theorem:
    """Each element is on exactly one device, within its block. So concatenation commutes with any
    function of one index."""
    b = _Blocks(n)
    k: Term = z3.Int("k")
    owned = [z3.And(b.owns(i, k), k - b.start(i) < b.chunk) for i in range(n)]
    return Theorem(
        (*b.premises, k >= 0, k < b.length), _total([z3.If(o, 1, 0) for o in owned]) == 1
    )


def one_reader(n: int) -> Theorem:
    """A masked lookup. The index is clipped to the dim; its owner reads the element and the other
    devices have zero; the sum of the parts is the element."""
    b = _Blocks(n)
    x: Term = z3.Function("x", z3.IntSort(), z3.IntSort())
    index: Term = z3.Int("index")
    inside = _clip(index, 0, b.length - 1)
    # Position j of a shard has the element start + j. The position is clipped before it is read.
    parts = [
        z3.If(b.owns(i, inside), x(b.start(i) + _clip(inside - b.start(i), 0, b.chunk - 1)), 0)
        for i in range(n)
    ]
    return Theorem(tuple(b.premises), _total(parts) == x(inside))


def one_reader_of_windows(n: int) -> Theorem:
    """Windows that reach across shards. Each shard has margins of zeros as long as a window, and
    the start of the window is clipped; the sum of the parts is the window."""
    b = _Blocks(n)
    x: Term = z3.Function("x", z3.IntSort(), z3.IntSort())
    start, window, k = _ints("start window k")
    premises = [
        *b.premises,
        window >= 1,
        window <= b.length,
        start >= 0,
        start <= b.length - window,
        k >= 0,
        k < window,
    ]

    def read(i: int) -> Term:
        position = _clip(start - b.start(i) + window, 0, b.chunk + window) + k - window
        return z3.If(z3.And(position >= 0, position < b.extent(i)), x(b.start(i) + position), 0)

    return Theorem(tuple(premises), _total([read(i) for i in range(n)]) == x(start + k))


def own_update(_: int) -> Theorem:
    """An update of a window. A device writes a position of its shard if and only if the window
    covers it, and with the right element.

    The device rewrites `min(window, chunk)` positions: from the start of the window on, moved so
    that they are inside of the shard.
    """
    first, chunk, start, window, k = _ints("first chunk start window k")
    size = _minimum(window, chunk)
    here = _clip(start - first, 0, chunk - size)
    looks = z3.And(k >= here, k < here + size)
    element = (k - here) + here - (start - first)
    written = z3.And(looks, element >= 0, element < window)
    covered = z3.And(first + k >= start, first + k < start + window)
    premises = (chunk >= 1, window >= 1, k >= 0, k < chunk)
    return Theorem(
        premises, z3.And(written == covered, z3.Implies(written, element == first + k - start))
    )


def window_products(dilation: int) -> Theorem:
    """The products of an image element and an element of an uneven shard of a window, of which
    `real` elements are no padding. Each product of a real element is in exactly one of the two
    convolutions of `kernels.window_sums`, and the first has zeros where padding reads.

    Result o reads, with element k of the shard, position `dilation * k + start` of the image; here
    `start` is `stride * o`, and `last` is that of the last result.
    """
    chunk, real, k, start, last = _ints("chunk real k start last")
    position = dilation * k + start
    first = position < dilation * real
    count = _minimum(last / dilation, chunk)
    second = z3.And(k >= real - count, k < real, dilation * (k - real) + start >= 0)
    premises = (
        *(chunk >= 1, real >= 0, real <= chunk, k >= 0, k < chunk),
        *(start >= 0, start <= last),
    )
    once = z3.Implies(k < real, z3.Xor(first, second))
    return Theorem(premises, z3.And(once, z3.Implies(k >= real, z3.Not(z3.Or(first, second)))))


def _prefix(sizes: Sequence[Term], k: int) -> Term:
    """The sum of the first k sizes."""
    return _total(sizes[:k]) if k else z3.IntVal(0)


def ragged_shard(groups: int) -> Theorem:
    """Each device counts how many rows of each group its shard has; then every row of the shard is
    in its own group."""
    sizes = _ints(" ".join(f"s{k}" for k in range(groups)))
    start, extent, row = _ints("start extent row")
    local = []
    for k, size in enumerate(sizes):
        first = _prefix(sizes, k)
        local.append(_maximum(_minimum(first + size, start + extent) - _maximum(first, start), 0))
    same = []
    for k in range(groups):
        whole = z3.And(row >= _prefix(sizes, k), row < _prefix(sizes, k) + sizes[k])
        here = z3.And(row - start >= _prefix(local, k), row - start < _prefix(local, k) + local[k])
        same.append(whole == here)
    return Theorem(
        (*(s >= 0 for s in sizes), start >= 0, extent >= 1, row >= start, row < start + extent),
        z3.And(*same),
    )


def ragged_groups(groups: int) -> Theorem:
    """Each device counts the rows before its groups as part of its first group and leaves them out;
    then every row is in its own group."""
    sizes = _ints(" ".join(f"s{k}" for k in range(groups)))
    row: Term = z3.Int("row")
    claims = []
    for first in range(groups):
        for last in range(first + 1, groups + 1):
            skipped = _prefix(sizes, first)
            counted = [sizes[first] + skipped, *sizes[first + 1 : last]]
            for k in range(first, last):
                whole = z3.And(row >= _prefix(sizes, k), row < _prefix(sizes, k) + sizes[k])
                at = _prefix(counted, k - first)
                claims.append(
                    whole == z3.And(row >= skipped, row >= at, row < at + counted[k - first])
                )
    return Theorem((*(s >= 0 for s in sizes), row >= 0), z3.And(*claims))


WORD = 5
"""Bits of a word in the theorem about counters. The law is the same for every width, and Z3 is slow
on wide multiplications."""


def counter(_: int) -> Theorem:
    """The linear index of an element, computed in words that wrap, is right while the whole array
    has fewer elements than a word has values."""
    values: tuple[Term, ...] = tuple(
        z3.BitVec(name, 2 * WORD) for name in ("r", "c", "at_r", "at_c", "i", "j")
    )
    rows, columns, at_row, at_column, row, column = values
    premises = [
        *(z3.ULT(v, 2**WORD) for v in values),
        z3.ULT(rows * columns, 2**WORD),
        z3.ULT(at_row + row, rows),
        z3.ULT(at_column + column, columns),
    ]
    low: list[Term] = [z3.Extract(WORD - 1, 0, v) for v in values]
    narrow = (low[2] + low[4]) * low[1] + (low[3] + low[5])
    wide = (at_row + row) * columns + (at_column + column)
    return Theorem(tuple(premises), z3.ZeroExt(WORD, narrow) == wide)


def neutral_padding(monoid: str) -> Theorem:
    """A neutral element as padding does not change a reduction."""
    x, e = z3.Reals("x e")
    p, q = z3.BitVecs("p q", WORD)
    match monoid:
        case "sum":
            return Theorem((e == 0,), x + e == x)
        case "prod":
            return Theorem((e == 1,), x * e == x)
        case "max":
            return Theorem((e <= x,), _maximum(x, e) == x)
        case "min":
            return Theorem((e >= x,), _minimum(x, e) == x)
        case "and":
            return Theorem((q == ~z3.BitVecVal(0, WORD),), p & q == p)
        case _:
            return Theorem((q == 0,), p | q == p)


def strided_blocks(stride: int) -> Theorem:
    """Every `stride`-th element of a dim of `stride` times as many: a block of the shorter dim and
    the block of the same device of the longer one have the same elements."""
    first, chunk, at, low = _ints("first chunk at low")
    short = z3.And(first <= at, at < first + chunk)
    place = stride * at + low
    long = z3.And(stride * first <= place, place < stride * (first + chunk))
    return Theorem((chunk >= 1, low >= 0, low < stride), short == long)


INDEX_THEOREMS: dict[str, tuple[Callable[[int], Theorem], tuple[int, ...]]] = {
    "one_holder": (one_holder, (2, 3, 4)),
    "one_reader": (one_reader, (2, 3, 4)),
    "one_reader_of_windows": (one_reader_of_windows, (2, 3, 4)),
    "own_update": (own_update, (2,)),
    "ragged_shard": (ragged_shard, (2, 3)),
    "ragged_groups": (ragged_groups, (2, 3)),
    "window_products": (window_products, (1, 2, 3)),
    "strided_blocks": (strided_blocks, (1, 2, 3)),
    "counter": (counter, (2,)),
}
"""For each theorem, by its name: a function that states it, and the numbers of devices that it is
stated for; for the ragged ones, numbers of groups, for `window_products` dilations, and for
`strided_blocks` strides."""

OF_KERNEL: dict[str, str] = {
    "masked_gather": "one_reader",
    "masked_slice": "one_reader",
    "masked_dynamic_slice": "one_reader",
    "masked_windows": "one_reader_of_windows",
    "owned_update": "own_update",
    "shifted_scatter": "own_update",
    "shifted_windows": "own_update",
    "ragged_shards": "ragged_shard",
    "ragged_groups": "ragged_groups",
    "aligned": "strided_blocks",
}
"""For each kernel, the name of the theorem that its rows rest on."""
