"""The table of elementwise rows is complete: no assignment of atoms holds that the table and free conversions do not give.

Splits are left out: operands of one shape split together or their shards do not fit, which the laws enumerate.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from samples import SAMPLES, b, bf, c, equation, f, i, primitives, u

from sbp.signatures import Op, Row, rule_for
from sbp.signatures.elementwise import ELEMENTWISE
from sbp.signatures.factors import admissible
from sbp.signatures.oracle import Oracle
from sbp.signatures.rule import names
from sbp.types import Atom, B, P, Unreduced

SIZE = 48

ITERATED = frozenset(names("igamma igamma_grad_a igammac polygamma regularized_incomplete_beta zeta threefry2x32"))
"""Compiled for seconds each; none is linear, and none is defined on all of the reals."""

BELOW_TOLERANCE = frozenset({"nextafter"})
"""What they change is too little for the oracle to see."""

EXCEPTIONS: dict[str, str] = {
    "clamp": "two bounds, or a bound and the operand, partial at once: no program makes such bounds",
    "clz": "falls on unsigned integers: no program takes the maximum of bits first",
    "convert_element_type": "a float cast to no more bytes holds within its tolerance, but rounds every part before the reduction",
    "is_finite": "parts of a finite sum may overflow, and the oracle's are small",
    "le_to": "the total order of keys, inside comparators of sorts, that no type is given to",
    "lt_to": "as le_to",
    "mulhi": "rises on unsigned integers: no program takes the maximum of words first",
    "polynomial": "linear in its coefficients, and rises in the constant one: they are literals",
    "shift_right_arithmetic": "rises: a floor division, that JAX writes as other primitives",
    "tie": "what a value waits for has no type of its own; B costs nothing there in the program, which is traced without it",
}
"""Primitives with true rows that the table leaves out, with the reason."""


def values(like: np.ndarray, seed: int, first: np.ndarray | None) -> np.ndarray:
    """Data of a dtype: both signs, zeros, ties with the first operand; NaN in floats, the ends of the range in integers."""
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
            x = np.where(rng.random(SIZE) < 0.4, rng.choice(ends, SIZE), i(SIZE, seed=seed)).astype(like.dtype)
    x[seed % 5 :: 5] = 0
    if x.dtype == np.float32:
        x[seed % 5 :: 10] = -0.0
    if first is not None and first.dtype == x.dtype and first.shape == x.shape:
        x[::4] = first[::4]
        if x.dtype == np.float32:
            x[1::4], x[2::4] = first[1::4] + 0.25, first[2::4] - 0.25
    return x


def atoms(dtype: np.dtype) -> list[Atom]:
    wanted = ("and", "or") if dtype == np.bool_ else ("sum", "max", "min")
    return [B, *(P(m) for m in wanted if m in admissible(dtype))]


def free(source: Atom, target: Atom) -> bool:
    """Whether a conversion moves no data: none at all, or from B."""
    return source == target or (source == B and isinstance(target, Unreduced))


def given(row: Row, table: tuple[Row, ...]) -> bool:
    """Whether a row of the table gives this one with free conversions before and after."""
    return any(all(map(free, row.ins, t.ins)) and all(map(free, t.outs, row.outs)) for t in table)


@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if n not in ITERATED | BELOW_TOLERANCE and n in primitives()])
def test_no_row_is_missing(name):
    found = rule_for(name)
    assert found is not None
    done = set()
    missing = []
    for fn, args in SAMPLES[name]:
        first = equation(name, fn, args)
        if first.op.outs[0].dtype.name.startswith(("key", "float8")) or max(len(a.shape) for a in first.op.ins) > 1:
            continue
        kind = tuple((len(a.shape), a.dtype) for a in (*first.op.ins, *first.op.outs)), str(first.op.params.get("y"))
        if kind in done:
            continue
        done.add(kind)
        if any(a.shape == () for a in first.op.ins) and name not in ("clamp", "polynomial"):
            continue  # a literal: the table does not know its sign, the values would show it
        operands: list[np.ndarray] = []
        for k, a in enumerate(args):
            operands.append(values(a, 3 * k + 1, operands[0] if operands else None))
        eqn = equation(name, fn, tuple(operands))
        oracle = Oracle(eqn.op, eqn.primitive, eqn.args)
        table = tuple(found.rows(Op(name, eqn.op.params, eqn.op.ins, eqn.op.outs, 2)))
        for ins in itertools.product(*(atoms(a.dtype) for a in eqn.op.ins)):
            for out in atoms(eqn.op.outs[0].dtype):
                row = Row(ins, (out,))
                if not given(row, table) and not any(
                    oracle.refute_row(row, n, np.random.default_rng(seed)) for n, seed in ((2, 0), (3, 1), (2, 2), (3, 3))
                ):
                    missing.append(f"{name} {', '.join(a.dtype.name for a in eqn.op.ins)}: {row}")
    assert bool(missing) == (name in EXCEPTIONS), "\n".join(missing)


def test_a_missing_row_is_found():
    """The enumeration can say no: without its linear row, neg is incomplete."""
    eqn = equation("neg", *SAMPLES["neg"][0])
    found = rule_for("neg")
    assert found is not None
    table = tuple(r for r in found.rows(Op("neg", eqn.op.params, eqn.op.ins, eqn.op.outs, 2)) if P not in r.ins)
    row = Row((P,), (P,))
    assert not given(row, table) and not Oracle(eqn.op, eqn.primitive, eqn.args).refute_row(row, 2, np.random.default_rng(0))
