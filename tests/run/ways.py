"""What the cheapest conversions cost, from the formulae and by brute force; nothing here is taken
from the planner.

A way is a sequence of steps. A step changes one mesh axis, or all-reduces or all-gathers over
several. In a step, the split of a dim by one axis may come or go only if no axis inside it splits
the same dim, or goes with it: its blocks are blocks of that axis's.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from sbp.types import Atom, B, Broadcast, Split, Unreduced

Type = tuple[Atom, ...]
Shape = tuple[int, ...]


def types_of(ndim: int, mesh_axes: int, monoids: Sequence[str]) -> list[Type]:
    """All types of a tensor: each axis splits a dim, broadcasts or is partial, under one monoid at
    most."""
    atoms = [B, *map(Split, range(ndim)), *map(Unreduced, monoids)]
    return [
        t
        for t in itertools.product(atoms, repeat=mesh_axes)
        if len({a for a in t if isinstance(a, Unreduced)}) <= 1
    ]


def buffer(shape: Shape, t: Type, sizes: Shape) -> list[int]:
    """The dims of one device's buffer: an axis of size n cuts a dim of size c into blocks of ceil(c
    / n), outer axes first."""
    dims = list(shape)
    for atom, n in zip(t, sizes, strict=True):
        if isinstance(atom, Split):
            dims[atom.dim] = (dims[atom.dim] + n - 1) // n
    return dims


def steps(
    shape: Shape, t: Type, sizes: Shape, types: Sequence[Type], itemsize: int = 4
) -> Iterator[tuple[Type, float, int]]:
    """Each type that is one step away, with the bytes that a device sends, and 1 if it takes a
    collective.

    A ring all-reduce of x bytes over n devices sends 2 (n-1)/n x. An all-gather and a
    reduce-scatter send (n-1)/n of what is whole, an all-to-all (n-1)/n of what is exchanged: each
    with the padding that makes its dim n blocks. To slice, mask or pad sends nothing.
    """
    dims = buffer(shape, t, sizes)
    here = itemsize * math.prod(dims)
    partial = [axis for axis, a in enumerate(t) if isinstance(a, Unreduced)]
    for count in range(1, len(partial) + 1):
        for axes in itertools.combinations(partial, count):
            n = math.prod(sizes[axis] for axis in axes)
            yield (
                tuple(B if axis in axes else a for axis, a in enumerate(t)),
                2 * (n - 1) / n * here,
                1,
            )
    split = [axis for axis, a in enumerate(t) if isinstance(a, Split)]
    for count in range(2, len(split) + 1):
        for axes in itertools.combinations(split, count):
            if any(
                t[outer] == t[inner]
                for outer in axes
                for inner in split
                if inner > outer and inner not in axes
            ):
                continue
            n = math.prod(sizes[axis] for axis in axes)
            yield tuple(B if axis in axes else a for axis, a in enumerate(t)), (n - 1) * here, 1
    for axis, new in itertools.product(range(len(t)), {a for u in types for a in u}):
        old, n, inside = t[axis], sizes[axis], t[axis + 1 :]
        target = (*t[:axis], new, *inside)
        if (
            old == new
            or target not in types
            or any(isinstance(a, Split) and a in inside for a in (old, new))
        ):
            continue
        if isinstance(new, Split):
            padded = (
                here
                if dims[new.dim] == 0
                else here // dims[new.dim] * n * math.ceil(dims[new.dim] / n)
            )
            yield (
                target,
                0.0 if isinstance(old, Broadcast) else (n - 1) / n * padded,
                int(not isinstance(old, Broadcast)),
            )
        elif isinstance(new, Broadcast) and isinstance(old, Split):
            yield target, (n - 1) / n * (n * here), 1
        elif isinstance(new, Unreduced) and not isinstance(old, Unreduced):
            yield target, 0.0, 0


def cheapest(
    shape: Shape, sizes: Shape, types: Sequence[Type], per_byte: float, per_collective: float
) -> np.ndarray:
    """The price of the cheapest way between every two types, from a row's to a column's.

    Arguments:
      shape: the global shape.
      sizes: sizes of the mesh axes.
      types: the types, which ways lead through, too.
      per_byte: price of a byte that a device sends.
      per_collective: price of a collective, whatever it sends.
    """
    price = np.full((len(types), len(types)), np.inf)
    np.fill_diagonal(price, 0.0)
    known = set(types)
    index = {t: k for k, t in enumerate(types)}
    for t in types:
        for target, sent, collective in steps(shape, t, sizes, tuple(known)):
            price[index[t], index[target]] = min(
                price[index[t], index[target]], sent * per_byte + collective * per_collective
            )
    while True:  # ways of twice as many steps, until that helps no more
        longer = np.stack([(price[i, :, None] + price).min(0) for i in range(len(types))])
        if np.array_equal(longer, price):
            return price
        price = longer
