"""Drawing one operation: which values it reads, with which parameters, and the functions it calls;
and which of its results are exact."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fuzz.program import FLOATS, INTEGERS, MANTISSA, Block, Info, fill

SIZES = (1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8, 12, 13, 16)
MAX_ELEMENTS = 2048
MAX_RANK = 5


class Skip(Exception):
    """The values at hand do not suit the operation."""


@dataclass(frozen=True, slots=True)
class Want:
    """A value that an operation reads.

    Arguments:
      kinds: letters of what suits it: f floats, k floats that may have a kink there (exact ones
        where a gradient is taken), e exact floats, s smooth use of float32 alone, i integers, u
        unsigned or signed integers, b booleans, c complex, r new-style keys.
      low, high: bounds on its rank.
      shape: its shape, from what was drawn before; None for any.
      dtype: its dtype likewise.
      fits: further condition.
      empty: whether a dim of size 0 suits.
    """

    kinds: str = "f"
    low: int = 0
    high: int = 4
    shape: Callable[[Draw], tuple[int, ...]] | None = None
    dtype: Callable[[Draw], str] | None = None
    fits: Callable[[Info], bool] | None = None
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """A function that an operation calls.

    Arguments:
      params: what it takes.
      results: the infos its outputs must have (shape and dtype), or None for any one to three
          values of its own.
      takes, unpack, returns: its source, see `Block`; in `takes` and `unpack` {0}, {1} stand for
      parameters.
      gradient: whether it is differentiated.
    """

    params: Callable[[Draw], Sequence[Info]]
    results: Callable[[Draw], Sequence[Info] | None] = lambda d: None
    takes: Callable[[Draw], str] | None = None
    unpack: Callable[[Draw], str] | None = None
    returns: Callable[[Draw], str] | None = None
    gradient: bool = False


Slot = Want | Body | Callable[["Draw"], Any]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of the tables.

    Arguments:
      name: for coverage and for weights.
      text: its source, slots in braces; lines before the last are statements; {me} is a number of
          its own.
      slots: what to draw, in order: values, functions and parameters.
      law: exactness of its results.
      weight: how often, relative to others.
      stops: whether no gradient can pass: floats are read through stop_gradient where one is taken.
    """

    name: str
    text: str
    slots: Mapping[str, Slot]
    law: Law
    weight: float = 1.0
    stops: bool = False


@dataclass(slots=True, eq=False)
class Draw:
    """One operation being drawn: what its later slots may look at."""

    rng: random.Random
    scope: Any
    infos: dict[str, Info] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)
    returned: dict[str, list[Info]] = field(default_factory=dict)
    closed: bool = False

    def __getitem__(self, slot: str) -> Any:
        return self.infos[slot] if slot in self.infos else self.params[slot]

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options; none to choose from is a Skip."""
        if not options:
            raise Skip
        return self.rng.choice(options)

    def chance(self, p: float = 0.5) -> bool:
        """True with probability p."""
        return self.rng.random() < p

    def dim(self, slot: str) -> int:
        """A dim of a value."""
        return self.choice(range(self.infos[slot].ndim))

    def dims(self, slot: str, least: int = 1) -> tuple[int, ...]:
        """Some dims of a value, in order."""
        n = self.infos[slot].ndim
        if n < least:
            raise Skip
        return tuple(sorted(self.rng.sample(range(n), self.rng.randint(least, n))))

    def size(self) -> int:
        """A size from the pool."""
        return self.rng.choice(SIZES)

    def int(self, low: int, high: int) -> int:
        """An integer between two, both included."""
        if high < low:
            raise Skip
        return self.rng.randint(low, high)


def draw_op(op: Op, draw: Draw) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Draws the slots of an operation; returns its text and the values it reads."""
    draw.closed = op.stops and draw.scope.gradient
    for slot, want in op.slots.items():
        match want:
            case Want():
                name, info = draw.scope.pick(want, draw)
                draw.names[slot], draw.infos[slot] = name, info
            case Body():
                draw.blocks[slot], draw.returned[slot] = draw.scope.block(want, draw)
            case _:
                draw.params[slot] = want(draw)
    text = fill(op.text, {k: v if isinstance(v, str) else repr(v) for k, v in draw.params.items()})
    if op.stops and draw.scope.gradient:
        floats = [slot for slot, info in draw.infos.items() if info.kind in "fc"]
        text = fill(text, {slot: f"lax.stop_gradient({{{slot}}})" for slot in floats})
    return text, tuple(draw.names.items())


def suits(
    want: Want, info: Info, shape: tuple[int, ...] | None, dtype: str | None, gradient: bool
) -> bool:
    """Whether a value is what an operation wants."""
    if (shape is not None and info.shape != shape) or (dtype is not None and info.dtype != dtype):
        return False
    if not want.low <= info.ndim <= max(want.high, want.low) or (
        not want.empty and shape is None and info.size == 0
    ):
        return False
    if info.size > MAX_ELEMENTS or (want.fits is not None and not want.fits(info)):
        return False
    return any(
        _KINDS[letter](info, gradient) if letter in _KINDS else info.kind == letter
        for letter in want.kinds
    )


_KINDS: dict[str, Callable[[Info, bool], bool]] = {
    "k": lambda info, gradient: info.kind == "f" and (info.exact or not gradient),
    "e": lambda info, gradient: info.kind == "f" and info.exact,
    "s": lambda info, gradient: info.dtype == "float32",
    "i": lambda info, gradient: info.kind == "i" and not info.dtype.startswith("u"),
    "u": lambda info, gradient: info.kind == "i",
}
"""The kinds that are not those of `Info.kind`."""


_DTYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys("fke", ("float32",) * 8 + FLOATS),
    "i": ("int32",) * 4 + ("int8", "int16"),
    "u": ("int32",) * 4 + ("int8", "uint8", "uint32"),
}
"""Dtypes of new arguments of a kind, some of them more often than others."""


def fresh_info(
    want: Want, rng: random.Random, shape: tuple[int, ...] | None, dtype: str | None, empty: bool
) -> Info:
    """What to make an argument of, where no value suits."""
    kind = rng.choice(want.kinds)
    if shape is None:
        low, high = want.low, max(want.low, min(3, want.high))
        shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(low, high)))
        if empty and want.empty and shape and rng.random() < 0.02:
            spot = rng.randrange(len(shape))
            shape = (*shape[:spot], 0, *shape[spot + 1 :])
    if dtype is None:
        only = {"s": "float32", "b": "bool", "c": "complex64", "r": "key"}
        dtype = only[kind] if kind in only else rng.choice(_DTYPES[kind])
    info = Info(shape, dtype)
    if info.kind == "f":
        exact = kind in "ek" or rng.random() < 0.4
        return Info(
            shape, dtype, exact, 3.0 if exact else 2.0, rng.choice((0, 1, 2)) if exact else 0
        )
    if info.kind == "c":
        return Info(shape, dtype, False, 2.0)
    return Info(shape, dtype, True, 9.0 if info.kind == "i" else 1.0)


def data_of(info: Info, seed: int) -> str:
    """The data of an argument as an expression of NumPy; for keys, of JAX."""
    rng, shape = f"np.random.default_rng({seed})", info.shape
    match info.kind:
        case "r":
            return (
                f"jax.random.key({seed})"
                if not shape
                else f"jax.random.split(jax.random.key({seed}), {shape})"
            )
        case "b":
            return f"{rng}.random({shape}) < 0.5"
        case "c":
            return f"({rng}.normal(size={shape}) + 1j * {rng}.random({shape})).astype(np.complex64)"
        case "i":
            high = int(min(info.bound, 100))
            low = 0 if info.dtype.startswith("u") else -high
            return f"{rng}.integers({low}, {high + 1}, {shape}).astype(np.{info.dtype})"
        case _:
            cast = f"astype(jnp.{info.dtype})"
            if info.exact:
                n = int(min(info.bound, 8) * 2**info.grid)
                scale = f" / {2**info.grid}" if info.grid else ""
                return f"np.asarray({rng}.integers({-n}, {n + 1}, {shape}){scale}).{cast}"
            return f"np.asarray({rng}.normal(size={shape})).{cast}"


# ---- exactness -----------------------------------------------------------------------------------
# What an operation makes of exactness: which results are free of rounding, hence equal in every
# order of evaluation.
#
# A law takes the draw of an operation and the shape and dtype of one result, and returns (exact,
# bound, grid) of that result. Floats that are exact are multiples of 2**-grid no larger than bound;
# while bound * 2**grid fits the mantissa, sums and products of them are exact too. Integers and
# booleans are always exact, since operations that decide from floats (`Want("e")`) take exact ones
# alone.


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
