"""What an operation makes of exactness: which results are free of rounding, hence equal in every
order of evaluation.

A law takes the draw of an operation and the shape and dtype of one result, and returns (exact,
bound, grid) of that result. Floats that are exact are multiples of 2**-grid no larger than bound;
while bound * 2**grid fits the mantissa, sums and products of them are exact too. Integers and
booleans are always exact, since operations that decide from floats (`Want("e")`) take exact ones
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.fuzz.program import INTEGERS, MANTISSA, Info

if TYPE_CHECKING:
    from tests.fuzz.draw import Draw

Known = tuple[bool, float, int]
Law = Callable[["Draw", Sequence[Info]], Sequence[Known]]


_operands = lambda d: [i for i in d.infos.values() if i.kind in "fibc"] or [Info((), "float32")]


_each = lambda one: lambda d, outs: [one(d)] * len(outs)


def _joined(d: Draw) -> Known:
    ins = _operands(d)
    return all(i.exact for i in ins), max(i.bound for i in ins), max(i.grid for i in ins)


moves: Law = _each(lambda d: (_joined(d)[0], max(1.0, _joined(d)[1]), _joined(d)[2]))
"""Each element of the result is an element of an operand, or a constant no larger than 1."""


def sums(count: Callable[[Draw], float]) -> Law:
    """Each element is a sum of `count` elements of the operands."""

    def law(d: Draw) -> Known:
        exact, bound, grid = _joined(d)
        n = max(1.0, float(count(d)))
        return exact, max(1.0, bound) * (n if exact else math.sqrt(n)), grid

    return _each(law)


def products(count: Callable[[Draw], float] = lambda d: 1) -> Law:
    """Each element is a sum of `count` products of an element of every operand."""

    def law(d: Draw) -> Known:
        ins = [
            i for i in _operands(d) if i.kind in "fc" or all(o.kind in "ib" for o in _operands(d))
        ]
        exact = all(i.exact for i in _operands(d))
        n = max(1.0, float(count(d)))
        return (
            exact,
            math.prod(max(1.0, i.bound) for i in ins) * (n if exact else math.sqrt(n)),
            sum(i.grid for i in ins),
        )

    return _each(law)


def smooth(bound: float = 1.0) -> Law:
    """A continuous function that rounds, of the given magnitude."""
    return _each(lambda d: (False, bound, 0))


def like(scale: float = 1.0) -> Law:
    """A continuous function that rounds, of the operands' magnitude times `scale`."""
    return _each(lambda d: (False, max(1.0, _joined(d)[1]) * scale, 0))


def whole(bound: float | Callable[[Draw], float], grid: int = 0) -> Law:
    """Exact, with its own bound."""
    return _each(lambda d: (True, float(bound(d)) if callable(bound) else bound, grid))


def returned(slot: str = "body") -> Law:
    """What the block returns."""
    return lambda d, outs: [(i.exact, i.bound, i.grid) for i in d.returned[slot]]


def branches(*slots: str) -> Law:
    """Exact where every branch is."""
    return lambda d, outs: [
        (all(i.exact for i in g), max(i.bound for i in g), max(i.grid for i in g))
        for g in zip(*(d.returned[s] for s in slots), strict=True)
    ]


def settled(out: Info, known: Known, spoiled: bool) -> Info:
    """The result's info: what the law says, as far as the dtype can hold it."""
    exact, bound, grid = known
    made = Info(out.shape, out.dtype, weak=out.weak)
    match made.kind:
        case "b" | "r":
            return made
        case "i":
            info = np.iinfo(out.dtype)
            bound = min(bound, float(info.max)) if bound == bound else float(info.max)
            return Info(out.shape, out.dtype, True, bound, 0, out.weak)
        case "c":
            return Info(out.shape, out.dtype, False, bound, 0, out.weak, spoiled)
        case _:
            exact = (
                exact
                and not spoiled
                and bound * 2.0**grid <= 2.0 ** (MANTISSA[out.dtype] - 1)
                and bound <= 2**14
                and grid <= 24
            )
            return Info(out.shape, out.dtype, exact, bound, grid if exact else 0, out.weak, spoiled)


def largest(dtype: str) -> float:
    """The bound of an integer dtype of which nothing is known."""
    return float(np.iinfo(dtype).max) if dtype in INTEGERS else 1.0
