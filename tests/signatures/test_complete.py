"""Rules are complete: a rule with free conversions gives every row that holds, or the row has a
reason.

The test tries every assignment of atoms to find the rows that hold for an equation on small shapes.
It runs the primitive itself on the parts. A parameter that is a size of a whole operand or result
becomes the size of its part.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jaxlib.mlir.ir import MLIRError
from samples import SAMPLES, Equation, b, bf, c, equation, f, i, rows, skip_where_jax_lacks, u

from sbp import _jax
from sbp.signatures import Row
from sbp.signatures.factors import admissible
from sbp.signatures.families.elementwise import ELEMENTWISE
from sbp.signatures.laws.oracle import combine, difference, keys_like, parts, words_of
from sbp.signatures.rule import names
from sbp.types import Atom, B, Broadcast, P, S, Split, Unreduced
from tests.slices import sliced

pytestmark = pytest.mark.laws

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
    changed = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
    for name, value in params.items():
        if not (isinstance(value, tuple) and value and all(isinstance(v, int) for v in value)):
            continue
        for aval, shape in zip(whole, local, strict=True):
            if len(aval.shape) == len(value) and shape != tuple(aval.shape):
                changed[name] = tuple(
                    s if v == w else v for v, w, s in zip(value, aval.shape, shape, strict=True)
                )
    return changed


LAPACK = frozenset(names("geqp3 householder_product ormqr"))
"""Calls of LAPACK with several operands, whose sizes JAX does not compare."""


@dataclass
class Enumeration:
    """The assignments of atoms to one equation.

    Arguments:
      eqn: the equation, with values.
      redraw: gives its operands by a seed; a row must hold for all seeds.
    """

    eqn: Equation
    redraw: Callable[[Equation, int], tuple[Any, ...]] = redrawn

    def __post_init__(self) -> None:
        for kept in ("values", "kernel", "parts", "want"):  # as long as the enumeration lives
            setattr(self, kept, functools.cache(getattr(self, kept)))

    def values(self, seed: int) -> tuple[Any, ...]:
        return self.redraw(self.eqn, seed)

    def kernel(self, ins: tuple[tuple[int, ...], ...], outs: tuple[tuple[int, ...], ...]) -> Any:
        """The primitive on parts of some shapes; None where JAX's shape rules refuse them or give
        others."""
        op = self.eqn.op
        if op.name in LAPACK and (
            len({s[0] for s in ins}) > 1 or [s[1:] for s in ins] != [s[1:] for s in self.whole()[0]]
        ):
            return None  # it would read beyond the shorter operand, which JAX lets pass
        variants = [
            dict(op.params),
            localised(op.params, op.outs, outs),
            localised(op.params, op.ins, ins),
        ]
        for params in variants if (ins, outs) != self.whole() else variants[:1]:
            run = jax.jit(lambda *args, params=params: _jax.bind(self.eqn.primitive, args, params))
            specs = [
                jax.ShapeDtypeStruct(shape, a.dtype) for shape, a in zip(ins, op.ins, strict=True)
            ]
            try:
                results = run.lower(*specs).out_info
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
                return run
        return None

    def whole(self) -> tuple[Any, Any]:
        return tuple(tuple(a.shape) for a in self.eqn.op.ins), tuple(
            tuple(a.shape) for a in self.eqn.op.outs
        )

    def parts(self, position: int, atom: Atom, n: int, seed: int) -> list[Any]:
        value = self.values(seed)[position]
        rng = np.random.default_rng([seed, position, n])
        return [keys_like(p, value) for p in parts(words_of(value), atom, n, rng)]

    def want(self, seed: int) -> list[np.ndarray]:
        return [words_of(x) for x in self.kernel(*self.whole())(*self.values(seed))]

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


# ---- samples and reasons ------------------------------------------------------------------------

SIZE = 48

KINDS = 6
"""The number of samples of a primitive that are enumerated, each with other dtypes, ranks and
parameters; of elementwise primitives, all samples are."""

ITERATED = frozenset(
    names("igamma igamma_grad_a igammac polygamma regularized_incomplete_beta zeta")
)
"""Primitives that take seconds to compile. None is linear, and none is defined on all reals."""

CIPHERS = frozenset(names("philox2x32 philox4x32 threefry2x32 threefry4x32"))
"""Ciphers, which are made so that no law holds for them."""

CALLBACKS = frozenset(names("debug_callback debug_print io_callback pure_callback"))
"""Callbacks: an enumeration cannot see what the host does with parts."""

_CLOSE = (
    "holds within the tolerance of the narrow dtype, but rounds every part before the reduction"
)
_SMALL = "a product may underflow to 0 though no factor is 0"

REASONS: tuple[tuple[str, str, str], ...] = (
    ("convert_element_type", r"P\((sum|prod)\) -> P\((sum|prod)\)", _CLOSE),
    ("convert_element_type", r"P\(prod\) -> P\(and\)", _SMALL),
    ("dot_general scaled_dot", r".*P\((sum|max|min)\).* -> .*", _CLOSE),
    (
        "exp exp2",
        r"P\(sum\) -> P\(prod\)",
        "parts of a small sum may overflow, and infinity times 0 is NaN",
    ),
    (
        "gather",
        r"P\(sum\), B -> P\(sum\)",
        (
            "on an odd number of devices: the integer that fills, -2**31, is its own threefold"
            " modulo 2**32"
        ),
    ),
    ("is_finite", r".*", "parts of a finite sum may overflow, and the oracle's are small"),
    (
        "le_to lt_to",
        r".*",
        "the total order of keys, inside comparators of sorts, that no type is given to",
    ),
    ("neg", r"P\(prod\) -> P\(prod\)", "on an odd number of devices alone"),
    ("nextafter", r".*", "what it changes is too little for the oracle to see"),
    (
        "ragged_dot_general",
        r".*, S\(0\) -> .*",
        "a ragged batch dim: the CPU's kernel does not look at the sizes, others may",
    ),
    ("reduce_precision", r"P\(prod\) -> P\(prod\)", _CLOSE),
    (
        "reduce_window select_and_scatter",
        r".*",
        "by any function: this sample's is linear, or takes windows one by one",
    ),
    (
        "reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add",
        r".*",
        "the sample's windows do not overlap, or have one element; rows with others are refuted",
    ),
    (
        "scatter",
        r"(P\(\w+\)), B, \1 -> \1",
        (
            "which of two writes to an element wins is open, and parts in which different ones won"
            " do not belong together"
        ),
    ),
    (
        "scatter-add scatter-sub",
        r"P\((max|min)\), B, B -> .*",
        "integers wrap, which these seldom do",
    ),
    (
        "scatter-add scatter-max scatter-sub",
        r"B, B, P\((max|min)\) -> .*",
        "where no element is written twice; a scatter that says so sets",
    ),
    ("sign", r"P\(prod\) -> P\(prod\)", _SMALL),
    (
        "symmetric_product",
        r"B, P\((max|min)\) -> .*",
        "by the sign of a factor: no program takes such maxima",
    ),
    (
        "tie",
        r".*",
        (
            "what a value waits for has no type of its own; B costs nothing there in the program,"
            " which is traced without it"
        ),
    ),
)
"""Primitives, rows that hold on small shapes and are not in the table, and why."""


def values(like: np.ndarray, seed: int, first: np.ndarray | None) -> np.ndarray:
    """Data of a dtype: both signs, zeros, ties with the first operand; NaN in floats, the ends of
    the range in integers."""
    if np.ndim(like) == 0:
        return like
    match like.dtype.name:
        case "float32":
            x = f(SIZE, seed=seed)
            x[seed % 7 :: 7] = np.nan
        case "bfloat16":
            x = np.array(bf(SIZE, seed=seed))
        case "bool":
            return b(SIZE, seed=seed)
        case "complex64":
            x = c(SIZE, seed=seed)
        case "uint32":
            x = u(SIZE, seed=seed)
        case _:
            info = np.iinfo(like.dtype)
            ends = np.array([info.max, info.max - 1, info.min, info.min + 1])
            rng = np.random.default_rng(seed)
            x = np.where(rng.random(SIZE) < 0.4, rng.choice(ends, SIZE), i(SIZE, seed=seed)).astype(
                like.dtype
            )
    x[seed % 5 :: 5] = 0
    if x.dtype == np.float32:
        x[seed % 5 :: 10] = -0.0
    if first is not None and first.dtype == x.dtype and first.shape == x.shape:
        x[::4] = first[::4]
        if x.dtype == np.float32:
            x[1::4], x[2::4] = first[1::4] + 0.25, first[2::4] - 0.25
    return x


def enumerations(name: str) -> Iterator[Enumeration]:
    """The samples of a primitive, one of each kind; elementwise ones on longer operands, with
    values that the dtype finds hard."""
    done = set()
    for fn, args in SAMPLES[name]:
        if len(done) == KINDS and name not in ELEMENTWISE:
            return
        eqn = equation(name, fn, args)
        avals = (*eqn.op.ins, *eqn.op.outs)
        kind = (
            tuple((len(a.shape), a.dtype) for a in avals),
            str({k: v for k, v in eqn.op.params.items() if "jaxpr" not in k}),
        )
        if (
            kind in done
            or len(eqn.op.ins) > 3
            or any(0 in a.shape or math.prod(a.shape) > 200 for a in avals)
        ):
            continue
        if name not in ELEMENTWISE:
            done.add(kind)
            yield Enumeration(eqn, redrawn)
            continue
        # Of a literal, the table does not know the sign, and the values would show it.
        if (
            any(a.shape == () for a in eqn.op.ins)
            or eqn.op.outs[0].dtype.name.startswith(("key", "float8"))
            or max(len(a.shape) for a in eqn.op.ins) > 1
        ):
            continue
        done.add(kind)

        def drawn(_: Any, seed: int, args: tuple[Any, ...] = args) -> tuple[Any, ...]:
            operands: list[np.ndarray] = []
            for k, a in enumerate(args):
                operands.append(values(a, 17 * seed + 3 * k + 1, operands[0] if operands else None))
            return tuple(operands)

        yield Enumeration(equation(name, fn, drawn(eqn, 0)), drawn)


@pytest.mark.parametrize(
    "name", sliced([n for n in sorted(SAMPLES) if n not in ITERATED | CIPHERS | CALLBACKS], 1 / 4)
)
def test_no_row_is_missing(name):
    skip_where_jax_lacks(name)
    reasons = [rows for which, rows, _ in REASONS if name in which.split()]
    found = [f"{row}" for enumeration in enumerations(name) for _, row in missing(enumeration)]
    unexplained = [row for row in found if not any(re.fullmatch(rows, row) for rows in reasons)]
    assert not unexplained, unexplained
    idle = [rows for rows in reasons if not any(re.fullmatch(rows, row) for row in found)]
    assert not idle or name in MANY, f"a reason without a row: {idle}"


MANY = frozenset(names("dot_general scaled_dot scatter-add scatter-sub scatter-max"))
"""Primitives whose reasons are for rows that hold on some draws alone."""


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("neg", Row((P,), (P,))),
        ("transpose", Row((S(0),), (S(1),))),
        ("scatter-add", Row((P, S(0), S(0)), (P,))),
    ],
)
def test_a_missing_row_is_found(name, row, monkeypatch):
    """The enumeration can say no: without one of its rows, a table is incomplete."""
    every = rows
    monkeypatch.setitem(
        globals(), "rows", lambda eqn, n: tuple(r for r in every(eqn, n) if r != row)
    )
    assert any(row in (r for _, r in missing(e)) for e in enumerations(name))
