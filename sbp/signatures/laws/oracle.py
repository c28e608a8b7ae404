"""The definition of S, B and P on lists of parts, without devices, and the check of rows on
numbers.

`combine(parts(x, atom, n), atom, ..)` is x for every atom. The parts are adversarial: sums are
uneven and cancel, only one device has the maximum, padding is NaN. A row is right if, for every way
to cut the operands into parts, the kernel's results on those parts combine to the result of the
primitive on whole operands.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.rule import LocalContext, Op, Row, SplitAxes, kernel_named, rule_for
from sbp.types import Atom, Broadcast, P, Split, Unreduced

# ---- parts ---------------------------------------------------------------------------------------


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
    if n == 1:
        return [x]
    way, holder = rng.integers(0, 3, x.shape), rng.integers(0, n, x.shape)
    second, zero = (holder + rng.integers(1, n, x.shape)) % n, np.zeros_like(x)
    integer = jnp.issubdtype(x.dtype, np.integer)
    small = x // 2 if integer else x * x.dtype.type(0.375)
    big = x - small if integer else x * x.dtype.type(0.625)
    offsets = [_offset(x.shape, x.dtype, rng) for _ in range(n - 1)]
    cancelling = [*offsets, x - sum(offsets, zero)]
    shares = [np.where(holder == i, big, np.where(second == i, small, zero)) for i in range(n)]
    return [
        np.select(
            [way == 0, way == 1], [np.where(holder == i, x, zero), shares[i]], cancelling[i]
        ).astype(x.dtype)
        for i in range(n)
    ]


def _ordered_parts(x: np.ndarray, n: int, sign: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Parts of a maximum (`sign` -1) or minimum (`sign` 1). One device has the element; the others
    have the neutral element, an equal element, or one in between."""
    holder = rng.integers(0, n, x.shape)
    out = []
    for i in range(n):
        if jnp.issubdtype(x.dtype, np.integer):
            info = jnp.iinfo(x.dtype)
            end = int(info.min) if sign < 0 else int(info.max)
            steps = rng.integers(0, 9, x.shape, endpoint=True)
            near = np.clip(x.astype(object) + sign * steps, int(info.min), int(info.max))
            beyond = np.where(rng.random(x.shape) < 0.3, end, near).astype(x.dtype)
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
            return functools.reduce(_JOIN[m], values)


# ---- several mesh axes --------------------------------------------------------------------------

Types = tuple[Atom, ...]
"""The type of a value on several mesh axes: one atom for each axis, outer axes first. An inner axis
splits what the outer axes leave."""


def localise(shape: Sequence[int], atoms: Types, sizes: Sequence[int]) -> tuple[int, ...]:
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
    return (
        {(): x}
        if not sizes
        else {
            (i, *rest): p
            for i, part in enumerate(parts(x, atoms[0], sizes[0], rng))
            for rest, p in place(part, atoms[1:], sizes[1:], rng).items()
        }
    )


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
    inner = localise(shape, atoms[:1], sizes[:1])
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
    is_complex = jnp.issubdtype(want.dtype, np.complexfloating)
    tolerance = TOLERANCE[want.dtype.itemsize // (2 if is_complex else 1)]
    wide = np.complex128 if is_complex else np.float64
    got, want = got.astype(wide), want.astype(wide)
    good = np.isclose(got, want, tolerance, tolerance * np.maximum(1.0, scale)) | ~(
        np.isfinite(got) | np.isfinite(want)
    )
    return "" if good.all() else f"{got} instead of {want}"


# ---- kernels on parts ----------------------------------------------------------------------------


Parts = dict[tuple[int, ...], np.ndarray]
"""Each device's part of a value, by the device's index on each mesh axis."""


@dataclass(frozen=True, slots=True)
class OpTypes:
    """The types of an equation's operands and results on a mesh: one atom for each mesh axis.

    Arguments:
      ins: types of the operands.
      outs: types of the results.
      sizes: sizes of the mesh axes.
      communicates: whether the kernel has collectives, so that all devices must run together.
    """

    ins: tuple[Types, ...]
    outs: tuple[Types, ...]
    sizes: tuple[int, ...]
    communicates: bool = False

    @property
    def whole(self) -> list[bool]:
        """For each operand, whether every device has all of it."""
        return [all(isinstance(a, Broadcast) for a in t) for t in self.ins]

    def devices(self) -> list[tuple[int, ...]]:
        """The devices, as indices on each mesh axis."""
        return list(itertools.product(*(range(n) for n in self.sizes)))

    def shapes(self, avals: Sequence[Any], types: Sequence[Types]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parts."""
        return tuple(localise(a.shape, t, self.sizes) for a, t in zip(avals, types, strict=True))

    def splits(self, avals: Sequence[Any], types: Sequence[Types]) -> SplitAxes:
        """For each value and dim, the names and sizes of the mesh axes that split it."""
        return tuple(
            tuple(
                tuple((f"axis{k}", n) for k, n in enumerate(self.sizes) if atoms[k] == Split(dim))
                for dim in range(len(aval.shape))
            )
            for aval, atoms in zip(avals, types, strict=True)
        )


def permute_batches(x: Any, axis: str, pairs: Sequence[tuple[int, int]]) -> Any:
    """Sends `x` along an axis of `jax.vmap`, as `jax.lax.ppermute` does along a mesh axis.

    JAX permutes a batch dim only as a whole, so devices without a pair are paired with each other.

    Arguments:
      x: what each device sends.
      axis: the axis.
      pairs: (source, destination) devices.
    """
    size = lax.axis_size(axis)
    sources, targets = (sorted(set(range(size)) - {p[k] for p in pairs}) for k in (0, 1))
    found = lax.ppermute(x, axis, [*pairs, *zip(sources, targets, strict=True)])
    receives = np.isin(range(size), targets, invert=True)
    return jnp.where(jnp.asarray(receives)[lax.axis_index(axis)], found, jnp.zeros_like(found))


@dataclass(slots=True, eq=False)
class ListPlace(LocalContext):
    """The `LocalContext` of one device of a list. It adds a field:

    Arguments:
      index: this device's index along each mesh axis, which is an argument of the compiled kernel,
        as it is in a plan.
    """

    index: dict[str, Any]

    def axis_index(self, axis: str) -> Any:
        """This device's index along a mesh axis."""
        return self.index[axis]

    def permute(self, x: Any, axis: str, pairs: Sequence[tuple[int, int]]) -> Any:
        """The `x` of the device that sends to this one; zeros for no pair."""
        return permute_batches(x, axis, pairs)

    def is_first_device(self) -> Any:
        """True on the device with index 0 on every mesh axis."""
        return sum(self.index.values()) == 0


def words_of(x: Any) -> np.ndarray:
    """An array in NumPy; keys as their words."""
    return np.asarray(jax.random.key_data(x) if _jax.is_extended(x.dtype) else x)


def keys_like(data: np.ndarray, x: Any) -> Any:
    """Words as keys of the same kind as `x`; other data unchanged."""
    return (
        jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(x))
        if _jax.is_extended(x.dtype)
        else data
    )


class Oracle:
    """One equation on given operands; `refute` checks types of its operands and results.

    Arguments:
      op: the equation on whole values.
      primitive: the JAX primitive.
      args: the whole operands.
    """

    def __init__(self, op: Op, primitive: Any, args: tuple[Any, ...]) -> None:
        self.op, self.primitive, self.args = op, primitive, args
        # A user's primitive may have a lowering and no evaluation rule.
        self._plain = jax.jit(lambda *xs: _jax.bind(primitive, xs, op.params))
        self.whole = [words_of(x) for x in self._plain(*args)]
        self._kernels: dict[Any, Any] = {}

    def _kernel(self, types: OpTypes) -> Any:
        """The rule's kernel, compiled once for each way to split operands and results; all devices
        share it."""
        shapes = types.shapes(self.op.ins, types.ins), types.shapes(self.op.outs, types.outs)
        axes = types.splits(self.op.ins, types.ins), types.splits(self.op.outs, types.outs)
        key = axes, (types.sizes, *types.whole) if types.communicates else ()
        if key not in self._kernels:
            found = rule_for(self.op.name)

            def run(args: Any, index: dict[str, Any]) -> list[Any]:
                if found is None or found.local is None:
                    return self._plain(*args)
                place = ListPlace(
                    self.op.params,
                    self.op.ins,
                    self.op.outs,
                    *shapes,
                    self.primitive,
                    *axes,
                    tuple(index),
                    index,
                )
                return found.local(place, args)

            compiled: Any = run
            if types.communicates:
                varying = [None if whole else 0 for whole in types.whole]
                for axis in reversed(range(len(types.sizes))):
                    compiled = jax.vmap(compiled, (varying, 0), axis_name=f"axis{axis}")
            self._kernels[key] = jax.jit(compiled)
        return self._kernels[key]

    def refute(self, types: OpTypes, rng: np.random.Generator) -> str:
        """A counterexample to the types; empty if these parts give none.

        Arguments:
          types: the types of operands and results.
          rng: draws the parts.
        """
        placed = [
            place(words_of(x), t, types.sizes, rng)
            for x, t in zip(self.args, types.ins, strict=True)
        ]
        ins, expected = (
            types.shapes(self.op.ins, types.ins),
            types.shapes(self.op.outs, types.outs),
        )
        try:
            results = (
                self._together(types, placed)
                if types.communicates
                else self._one_by_one(types, placed)
            )
        except (TypeError, ValueError) as error:  # JAX's shape rules and lowering
            return f"the kernel does not run on {(ins, expected)}: {error}"
        for device in types.devices():
            shapes = tuple(
                result[device].shape[: len(want)]
                for result, want in zip(results, expected, strict=True)
            )
            if shapes != expected:
                return f"device {device} gives shapes {shapes}, the types say {expected}"
        for position, (result, atoms, want) in enumerate(
            zip(results, types.outs, self.whole, strict=True)
        ):
            scale = _scale(result, types, atoms, want.shape)
            readers = [
                range(n if isinstance(a, Broadcast) else 1)
                for a, n in zip(atoms, types.sizes, strict=True)
            ]
            for reader in itertools.product(*readers):
                with np.errstate(all="ignore"):
                    value = assemble(result, atoms, types.sizes, want.shape, reader)
                wrong = difference(np.asarray(value), want, scale)
                if wrong:
                    return f"result {position} as {atoms}: {wrong}"
        return ""

    def _one_by_one(self, types: OpTypes, placed: list[Parts]) -> list[Parts]:
        """The results of a kernel without collectives, one device after another."""
        kernel = self._kernel(types)
        found = {
            d: kernel(
                [keys_like(p[d], x) for p, x in zip(placed, self.args, strict=True)], _index(d)
            )
            for d in types.devices()
        }
        return [
            {d: words_of(value) for d, value in zip(found, values, strict=True)}
            for _, values in zip(types.outs, zip(*found.values(), strict=True), strict=True)
        ]

    def _together(self, types: OpTypes, placed: list[Parts]) -> list[Parts]:
        """The results of a kernel with collectives: each mesh axis is a batch dim of `jax.vmap`,
        with the name of the axis."""
        devices = types.devices()

        def stacked(values: Sequence[Any]) -> Any:
            whole = np.stack(values)
            return whole.reshape(*types.sizes, *whole.shape[1:])

        args = [
            x if whole else keys_like(stacked([p[d] for d in devices]), x)
            for p, x, whole in zip(placed, self.args, types.whole, strict=True)
        ]
        index = jax.tree.map(lambda *each: stacked(each), *map(_index, devices))
        got = self._kernel(types)(args, index)
        return [{d: words_of(value)[d] for d in devices} for value in got]

    def refute_row(self, row: Row, n: int, rng: np.random.Generator) -> str:
        """A counterexample to a row on one mesh axis; empty if these parts give none.

        Arguments:
          row: the row.
          n: number of devices along the axis.
          rng: draws the parts.
        """
        ins, outs = (tuple((a,) for a in atoms) for atoms in (row.ins, row.outs))
        types = OpTypes(ins, outs, (n,), kernel_named(row.kernel).communicates)
        return self.refute(types, rng)


def _index(device: tuple[int, ...]) -> dict[str, Any]:
    """A device's index along each mesh axis."""
    return {f"axis{k}": np.int32(i) for k, i in enumerate(device)}


def _scale(
    values: dict[tuple[int, ...], np.ndarray], types: OpTypes, atoms: Types, shape: Sequence[int]
) -> np.ndarray | float:
    """For each element of a sum, the sum of the magnitudes of its parts; 0 for a value that is no
    sum."""
    if P not in atoms or not jnp.issubdtype(next(iter(values.values())).dtype, np.inexact):
        return 0.0
    sizes = {
        k: np.abs(np.where(np.isfinite(v), v, 0)).astype(np.float64) for k, v in values.items()
    }
    return assemble(sizes, atoms, types.sizes, shape, (0,) * len(atoms))
