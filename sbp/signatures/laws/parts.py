"""The definition of S, B and P on lists of parts, without devices.

`combine(parts(x, atom, n), atom, ..)` is x for every atom. The parts are adversarial: sums are
uneven and cancel, only one device has the maximum, padding is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.types import Atom, Broadcast, Split, Unreduced

_JOIN: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
"""How two parts are joined under each monoid."""

TOLERANCE = {8: 1e-12, 4: 2e-5, 2: 3e-2, 1: 2e-1}
"""Relative tolerance of `difference`, by the bytes of one real number."""


def _real_itemsize(dtype: np.dtype) -> int:
    return dtype.itemsize // (2 if jnp.issubdtype(dtype, np.complexfloating) else 1)


def noise(shape: Sequence[int], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Values that must not matter: NaN and large numbers, any integers, any booleans.

    Arguments:
      shape: shape of the result.
      dtype: its dtype.
      rng: draws the values.
    """
    shape = tuple(shape)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if jnp.issubdtype(dtype, np.integer):
        info = jnp.iinfo(dtype)
        return rng.integers(
            int(info.min),
            int(info.max),
            shape,
            dtype=np.int64 if info.min < 0 else np.uint64,
            endpoint=True,
        ).astype(dtype)
    return np.where(rng.random(shape) < 0.5, np.nan, rng.integers(-99, 99, shape)).astype(dtype)


def _offset(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Offsets larger than the values. Those of floats are quarters, so that their sums are exact;
    integers wrap."""
    if jnp.issubdtype(dtype, np.integer):
        return noise(shape, dtype, rng)
    size = 24 if dtype.itemsize > 2 else 4
    real = rng.integers(-4 * size, 4 * size, shape) / 4
    return (
        real + 1j * rng.integers(-9, 9, shape)
        if jnp.issubdtype(dtype, np.complexfloating)
        else real
    ).astype(dtype)


def _sum_parts(x: np.ndarray, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Parts of a sum. Each element is on one device, or shared in 5/8 and 3/8 by two devices, or
    changed by random offsets whose sum is 0."""
    way = rng.integers(0, 3, x.shape)
    holder, second = (
        rng.integers(0, n, x.shape),
        (rng.integers(1, n, x.shape) if n > 1 else np.zeros(x.shape, int)),
    )
    out, rest = [], np.zeros_like(x)
    integer = jnp.issubdtype(x.dtype, np.integer)
    big, small = (
        (x - x // 2, x // 2) if integer else (x * x.dtype.type(0.625), x * x.dtype.type(0.375))
    )
    scattered = [_offset(x.shape, x.dtype, rng) for _ in range(n - 1)]
    for i in range(n):
        on_one = np.where(holder == i, x, np.zeros_like(x))
        shares = np.where(
            holder == i, big, np.where((holder + second) % n == i, small, np.zeros_like(x))
        )
        if n == 1:
            shares = x
        cancelling = scattered[i] if i < n - 1 else x - rest
        rest = rest + cancelling if i < n - 1 else rest
        out.append(np.select([way == 0, way == 1], [on_one, shares], cancelling).astype(x.dtype))
    return out


def _ordered_parts(x: np.ndarray, n: int, sign: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Parts of a maximum (`sign` -1) or minimum (`sign` 1). One device has the element; the others
    have the neutral element, an equal element, or one in between."""
    holder = rng.integers(0, n, x.shape)
    out = []
    for i in range(n):
        if jnp.issubdtype(x.dtype, np.integer):
            info = jnp.iinfo(x.dtype)
            end = int(info.min) if sign < 0 else int(info.max)
            wide = x.astype(object)
            step = np.array(
                [int(rng.integers(0, min(abs(end - int(v)), 9), endpoint=True)) for v in x.ravel()],
                object,
            ).reshape(x.shape)
            beyond = np.where(rng.random(x.shape) < 0.3, end, wide + sign * step).astype(x.dtype)
        else:
            base = x.astype(np.float64)
            step = (
                np.where(
                    rng.random(x.shape) < 0.5,
                    rng.integers(0, 3, x.shape),
                    rng.integers(0, 24, x.shape),
                )
                / 4
            )
            near = np.where(np.isnan(base), rng.integers(-9, 9, x.shape), base) + sign * step
            beyond = np.where(rng.random(x.shape) < 0.2, sign * np.inf, near).astype(x.dtype)
        out.append(np.where(holder == i, x, beyond).astype(x.dtype))
    return out


def _prod_parts(x: np.ndarray, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Parts of a product. Those of floats are powers of two and units; the last part makes up for
    them. Those of integers are odd numbers, which have an inverse modulo 2**k."""
    if jnp.issubdtype(x.dtype, np.integer):
        out = [noise(x.shape, x.dtype, rng) | np.ones((), x.dtype) for _ in range(n - 1)]
        last = x
        for p in out:
            inverse = p  # right modulo 2**3; each step of Newton's method doubles the bits
            for _ in range(5):
                inverse = inverse * (np.array(2, x.dtype) - p * inverse)
            last = last * inverse
        return [*out, last.astype(x.dtype)]
    units = [0.5, 1, 2, -1, -2, *([1j, -2j] if jnp.issubdtype(x.dtype, np.complexfloating) else [])]
    choices = np.array(units).astype(x.dtype)
    out = [choices[rng.integers(0, len(choices), x.shape)] for _ in range(n - 1)]
    last = x
    for p in out:
        last = (last / p).astype(x.dtype)
    return [*out, last]


def _bit_parts(x: np.ndarray, n: int, monoid: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Parts of a bitwise `or`. Either one device has all bits of an element and the others have
    some of them, or each bit is on one device.

    Parts of a bitwise `and` are the complements of parts of the complement.
    """
    if monoid == "and":
        return [~p for p in _bit_parts(~x, n, "or", rng)]
    holder, spread = rng.integers(0, n, x.shape), rng.random(x.shape) < 0.5
    out, left = [], x
    for i in range(n):
        mine = left if i == n - 1 else left & noise(x.shape, x.dtype, rng)
        left = left & ~mine
        out.append(
            np.where(spread, mine, np.where(holder == i, x, x & noise(x.shape, x.dtype, rng)))
        )
    return out


def parts(x: np.ndarray, atom: Atom, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Adversarial parts of a value on n devices.

    Arguments:
      x: the whole value.
      atom: the type of the value.
      n: number of devices.
      rng: draws what the type leaves open.

    Returns:
      One part for each device. Parts of S along a dim of length L have ceil(L/n) elements there,
          with noise as padding.
    """
    match atom:
        case Broadcast():
            return [x] * n
        case Split(dim=d):
            size = -(-x.shape[d] // n)
            out = []
            for i in range(n):
                part = noise((*x.shape[:d], size, *x.shape[d + 1 :]), x.dtype, rng)
                real = np.take(x, range(i * size, min((i + 1) * size, x.shape[d])), d)
                part[(slice(None),) * d + (slice(0, real.shape[d]),)] = real
                out.append(part)
            return out
        case Unreduced(monoid="sum"):
            return _sum_parts(x, n, rng)
        case Unreduced(monoid="max" | "min" as m):
            return _ordered_parts(x, n, -1 if m == "max" else 1, rng)
        case Unreduced(monoid="prod"):
            return _prod_parts(x, n, rng)
        case Unreduced(monoid=m):
            return _bit_parts(x, n, m, rng)


def combine(
    values: Sequence[np.ndarray], atom: Atom, shape: Sequence[int], reader: int = 0
) -> np.ndarray:
    """The value that parts stand for.

    Arguments:
      values: the parts, one for each device.
      atom: the type of the value.
      shape: the shape of the value, without padding.
      reader: the device whose part of a B value is the result; a type is right if every reader
          gives the same value.
    """
    match atom:
        case Broadcast():
            return values[reader]
        case Split(dim=d):
            return np.take(np.concatenate(values, d), range(shape[d]), d)
        case Unreduced(monoid=m):
            total = values[0]
            for v in values[1:]:
                total = _JOIN[m](total, v)
            return total


# ---- several mesh axes --------------------------------------------------------------------------

Types = tuple[Atom, ...]
"""The type of a value on several mesh axes: one atom for each axis, outer axes first. An inner axis
splits what the outer axes leave."""


def localised(shape: Sequence[int], atoms: Types, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of one device's part.

    Arguments:
      shape: shape of the whole value.
      atoms: its type.
      sizes: sizes of the mesh axes.
    """
    out = list(shape)
    for atom, n in zip(atoms, sizes, strict=True):
        if isinstance(atom, Split):
            out[atom.dim] = -(-out[atom.dim] // n)
    return tuple(out)


def place(
    x: np.ndarray, atoms: Types, sizes: Sequence[int], rng: np.random.Generator
) -> dict[tuple[int, ...], np.ndarray]:
    """The part of each device of a mesh, by the device's index on each axis.

    Arguments:
      x: the whole value.
      atoms: its type.
      sizes: sizes of the mesh axes.
      rng: draws what the type leaves open.
    """
    if not sizes:
        return {(): x}
    outer = parts(x, atoms[0], sizes[0], rng)
    return {
        (i, *rest): p
        for i, part in enumerate(outer)
        for rest, p in place(part, atoms[1:], sizes[1:], rng).items()
    }


def assemble(
    values: dict[tuple[int, ...], np.ndarray],
    atoms: Types,
    sizes: Sequence[int],
    shape: Sequence[int],
    reader: Sequence[int],
) -> Any:
    """The value that the parts of all devices of a mesh stand for.

    Arguments:
      values: the parts, by the device's index on each axis.
      atoms: the type of the value.
      sizes: sizes of the mesh axes.
      shape: shape of the whole value.
      reader: for each axis, the device whose part of a B value is the result.
    """
    if not sizes:
        return values[()]
    inner = localised(shape, atoms[:1], sizes[:1])
    outer = [
        assemble(
            {k[1:]: v for k, v in values.items() if k[0] == i},
            atoms[1:],
            sizes[1:],
            inner,
            reader[1:],
        )
        for i in range(sizes[0])
    ]
    return combine(outer, atoms[0], shape, reader[0])


def difference(got: np.ndarray, want: np.ndarray, scale: np.ndarray | float = 0.0) -> str:
    """How two values differ; empty if they are equal.

    Floats are equal within `TOLERANCE`; any two non-finite floats are equal.

    Arguments:
      got: a value.
      want: the value to compare with.
      scale: the sum of the magnitudes that were added to each element; the rounding error of
          numbers that cancel is relative to it.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    if not jnp.issubdtype(want.dtype, np.inexact):
        return "" if np.array_equal(got, want) else f"{got} instead of {want}"
    tolerance = TOLERANCE[_real_itemsize(want.dtype)]
    wide = np.complex128 if jnp.issubdtype(want.dtype, np.complexfloating) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= tolerance * (np.abs(want) + np.maximum(1.0, scale))
    good = np.where(finite, near, ~np.isfinite(got))
    return "" if good.all() else f"{got} instead of {want}"
