"""All rows that hold for an equation on small shapes, found by trying every assignment of atoms,
and the rows among them that a rule lacks.

The primitive itself runs on the parts. Parameters that are sizes of a whole operand or result
become the sizes of its part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxlib.mlir.ir import MLIRError
from samples import Equation, rows

from sbp import _jax
from sbp.signatures import Row
from sbp.signatures.factors import admissible
from sbp.signatures.laws.oracle import keys_like, words_of
from sbp.signatures.laws.parts import combine, difference, parts
from sbp.signatures.rule import names
from sbp.types import Atom, B, Broadcast, Split, Unreduced

SEEDS = range(12)

INDICES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        names("gather scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub"), (1,)
    ),
    **dict.fromkeys(
        names(
            "random_bits random_clone random_fold_in random_gamma random_seed random_split"
            " random_wrap rng_bit_generator"
        ),
        (0, 1),
    ),
    "dynamic_slice": (1, 2, 3),
    "dynamic_update_slice": (2, 3, 4),
    "geqp3": (1,),
    "lu_pivots_to_permutation": (0,),
    "ragged_dot_general": (2,),
    "select_n": (0,),
}
"""For each primitive, the operands that are indices, counts or seeds. They are never partial, and
other draws stay in the range of the sample's values."""

AS_THEY_ARE = frozenset(
    names("""
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu qr random_bits
    random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
    rng_bit_generator schur svd tridiagonal
""")
)
"""Primitives whose operands need a special form: only the sample's values are used."""


DENSITY = {"reduce_and": 0.85, "reduce_or": 0.15}
"""The fraction of booleans that are true. With half of them true, an `and` of all would hardly ever
be true."""


def redrawn(eqn: Equation, seed: int) -> tuple[Any, ...]:
    """Other operands of an equation: quarters, booleans, indices in the sample's range, integers up
    to the ends of their range.

    Arguments:
      eqn: the equation.
      seed: seed of the draw; 0 gives the sample's own operands.
    """
    if seed == 0 or eqn.op.name in AS_THEY_ARE:
        return eqn.args
    rng = np.random.default_rng(seed)
    out = []
    for position, x in enumerate(eqn.args):
        if _jax.is_extended(x.dtype) or x.size == 0:
            out.append(x)
        elif x.dtype == np.bool_:
            out.append(rng.random(x.shape) < DENSITY.get(eqn.op.name, 0.5))
        elif not np.issubdtype(x.dtype, np.integer):
            drawn = rng.integers(-32, 32, x.shape) / 8
            drawn = (
                drawn + 1j * rng.integers(-32, 32, x.shape) / 8
                if np.issubdtype(x.dtype, np.complexfloating)
                else drawn
            )
            # A triangular matrix stays well away from a singular one.
            out.append(
                (
                    np.asarray(x) if position == 0 and eqn.op.name.endswith("_solve") else drawn
                ).astype(x.dtype)
            )
        elif position in INDICES.get(eqn.op.name, ()):
            drawn = rng.integers(np.min(x), np.max(x), x.shape, endpoint=True)
            out.append(np.where(rng.random(x.shape) < 0.7, drawn % 3, drawn).astype(x.dtype))
        else:
            info = np.iinfo(x.dtype)
            small = rng.integers(max(info.min, -9), 9, x.shape).astype(x.dtype)
            ends = rng.choice(np.array([info.min, info.max], x.dtype), x.shape)
            often = 0.1 if eqn.op.name.startswith("reduce_") else 0.5
            drawn = np.where(rng.random(x.shape) < often, ends, small).astype(x.dtype)
            base = rng.integers(info.min, info.max, dtype=x.dtype)
            full = {
                "reduce_and": drawn | base,
                "reduce_or": drawn & base,
                "reduce_prod": drawn | np.ones((), x.dtype),
            }
            out.append(full.get(eqn.op.name, drawn))
    return tuple(out)


def atoms(aval: Any) -> list[Atom]:
    """B, a split of each dim with more than one element, and the partial atoms of the dtype."""
    splits = [Split(d) for d, size in enumerate(aval.shape) if size > 1]
    return [B, *splits, *(Unreduced(m) for m in admissible(aval.dtype))]


def axis_sizes(avals: Sequence[Any], chosen: Sequence[Atom]) -> tuple[int, ...]:
    """Sizes of mesh axes for which all splits are even: 2 and 3 without a split, otherwise the
    smallest one that divides the dims; none if there is none."""
    sizes = [
        a.shape[atom.dim] for a, atom in zip(avals, chosen, strict=True) if isinstance(atom, Split)
    ]
    if not sizes:
        return (2, 3)
    common = math.gcd(*sizes)
    return tuple(k for k in (2, 3, 5, 7) if common % k == 0)[:1]


def shard(shape: Sequence[int], atom: Atom, n: int) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(size // n if atom == Split(d) else size for d, size in enumerate(shape))


def free(source: Atom, target: Atom) -> bool:
    """Whether a conversion moves no data: none at all, or from B."""
    return source == target or isinstance(source, Broadcast)


def given(row: Row, table: Sequence[Row]) -> bool:
    """Whether a row of the table gives this one with free conversions before and after it."""
    return any(all(map(free, row.ins, t.ins)) and all(map(free, t.outs, row.outs)) for t in table)


def localised(
    params: dict[str, Any], whole: Sequence[Any], local: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Parameters with the sizes of whole values replaced by those of the parts.

    Arguments:
      params: the parameters.
      whole: avals of the whole values.
      local: shapes of their parts.
    """
    changed = dict(params)
    for name, value in params.items():
        if not (isinstance(value, tuple) and value and all(isinstance(v, int) for v in value)):
            continue
        for aval, shape in zip(whole, local, strict=True):
            if len(aval.shape) == len(value) and shape != tuple(aval.shape):
                moved = tuple(
                    s if v == w else v for v, w, s in zip(value, aval.shape, shape, strict=True)
                )
                changed[name] = moved
    for name in ("sharding", "out_sharding"):
        if name in changed:
            changed[name] = None
    return changed


LAPACK = frozenset(names("geqp3 householder_product ormqr"))
"""Calls of LAPACK with several operands, whose sizes JAX does not compare."""


@dataclass
class Enumeration:
    """The assignments of atoms to one equation.

    Arguments:
      eqn: the equation, with values.
      redraw: gives its operands by a seed; a row must hold for all seeds.
      compiled: kernels, by the shapes of the parts.
      cache: operands, parts and results, by their seed.
    """

    eqn: Equation
    redraw: Callable[[Equation, int], tuple[Any, ...]] = redrawn
    compiled: dict[Any, Any] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)

    def values(self, seed: int) -> tuple[Any, ...]:
        key = "values", seed
        if key not in self.cache:
            self.cache[key] = self.redraw(self.eqn, seed)
        return self.cache[key]

    def kernel(self, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> Any:
        """The primitive on parts of some shapes; None where JAX's shape rules refuse them or give
        others."""
        op = self.eqn.op
        if (ins, outs) not in self.compiled:
            found = None
            if op.name in LAPACK and (
                len({s[0] for s in ins}) > 1
                or [s[1:] for s in ins] != [s[1:] for s in self.whole()[0]]
            ):
                self.compiled[ins, outs] = (
                    None  # it would read beyond the shorter operand, which JAX lets pass
                )
                return None
            variants = [
                dict(op.params),
                localised(op.params, op.outs, outs),
                localised(op.params, op.ins, ins),
            ]
            for params in variants if (ins, outs) != self.whole() else variants[:1]:

                def run(*args: Any, params: dict[str, Any] = params) -> list[Any]:
                    return _jax.bind(self.eqn.primitive, args, params)

                specs = [
                    jax.ShapeDtypeStruct(shape, a.dtype)
                    for shape, a in zip(ins, op.ins, strict=True)
                ]
                try:
                    results = jax.jit(run).lower(*specs).out_info
                except (
                    TypeError,
                    ValueError,
                    AssertionError,
                    ZeroDivisionError,
                    IndexError,
                    MLIRError,
                ):
                    continue
                if tuple(tuple(r.shape) for r in results) == outs:
                    found = jax.jit(run)
                    break
            self.compiled[ins, outs] = found
        return self.compiled[ins, outs]

    def whole(self) -> tuple[Any, Any]:
        return tuple(tuple(a.shape) for a in self.eqn.op.ins), tuple(
            tuple(a.shape) for a in self.eqn.op.outs
        )

    def parts(self, position: int, atom: Atom, n: int, seed: int) -> list[Any]:
        key = position, atom, n, seed
        if key not in self.cache:
            value = self.values(seed)[position]
            rng = np.random.default_rng([seed, position, n])
            self.cache[key] = [keys_like(p, value) for p in parts(words_of(value), atom, n, rng)]
        return self.cache[key]

    def want(self, seed: int) -> list[np.ndarray]:
        key = "want", seed
        if key not in self.cache:
            self.cache[key] = [words_of(x) for x in self.kernel(*self.whole())(*self.values(seed))]
        return self.cache[key]

    def holds(
        self, ins: tuple[Atom, ...], outs_of: Sequence[Sequence[Atom]], n: int
    ) -> list[list[Atom]]:
        """For each result, the atoms that hold on these parts of the operands.

        Arguments:
          ins: the atoms of the operands.
          outs_of: for each result, the atoms to try, all with parts of one shape.
          n: number of devices.
        """
        op = self.eqn.op
        local_ins = tuple(shard(a.shape, atom, n) for a, atom in zip(op.ins, ins, strict=True))
        local_outs = tuple(
            shard(a.shape, atoms[0], n) for a, atoms in zip(op.outs, outs_of, strict=True)
        )
        kernel = self.kernel(local_ins, local_outs)
        left = [list(atoms) for atoms in outs_of]
        if kernel is None:
            return [[] for _ in left]
        for seed in SEEDS:
            operand_parts = [self.parts(i, atom, n, seed) for i, atom in enumerate(ins)]
            results = [
                [words_of(x) for x in kernel(*(p[k] for p in operand_parts))] for k in range(n)
            ]
            for position, (atoms, want) in enumerate(zip(left, self.want(seed), strict=True)):
                values = [r[position] for r in results]
                left[position] = [atom for atom in atoms if self.right(values, atom, want, n)]
            if not all(left):
                return [[] for _ in left]
        return left

    def right(self, values: list[np.ndarray], atom: Atom, want: np.ndarray, n: int) -> bool:
        scale = 0.0
        if atom == Unreduced("sum") and np.issubdtype(want.dtype, np.inexact):
            with np.errstate(invalid="ignore"):
                scale = sum(
                    np.abs(np.where(np.isfinite(v), v, 0)).astype(np.float64) for v in values
                )
        readers = range(n) if isinstance(atom, Broadcast) else (0,)
        with np.errstate(all="ignore"):
            return all(
                not difference(np.asarray(combine(values, atom, want.shape, r)), want, scale)
                for r in readers
            )

    def rows(self) -> Iterator[tuple[int, Row]]:
        """The rows that hold, each with its axis size. Rows that free conversions give from another
        row need not be among them."""
        op = self.eqn.op
        observed = INDICES.get(op.name, ())
        possible = [
            [a for a in atoms(x) if not (k in observed and isinstance(a, Unreduced))]
            for k, x in enumerate(op.ins)
        ]
        for ins in itertools.product(*possible):
            for n in axis_sizes(op.ins, ins):
                grouped = [self.by_shape(a, n) for a in op.outs]
                for shapes in itertools.product(*(g.values() for g in grouped)):
                    table = rows(self.eqn, n)
                    asked = [list(s) for s in shapes]
                    if all(given(Row(ins, outs), table) for outs in itertools.product(*asked)):
                        continue
                    found = self.holds(ins, asked, n)
                    for outs in itertools.product(*found):
                        yield n, Row(ins, tuple(outs))

    def by_shape(self, aval: Any, n: int) -> dict[tuple[int, ...], list[Atom]]:
        grouped: dict[tuple[int, ...], list[Atom]] = {}
        for atom in atoms(aval):
            if not (isinstance(atom, Split) and aval.shape[atom.dim] % n):
                grouped.setdefault(shard(aval.shape, atom, n), []).append(atom)
        return grouped


def missing(enumeration: Enumeration) -> list[tuple[int, Row]]:
    """Rows that hold and that the rule does not give."""
    found = [(n, row) for n, row in enumeration.rows() if not given(row, rows(enumeration.eqn, n))]
    return [
        (n, row)
        for n, row in found
        if not any(n == k and other != row and given(row, [other]) for k, other in found)
    ]
