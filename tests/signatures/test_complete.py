"""Rules are complete: every row that holds is given by a rule with free conversions, or has a
reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from enumeration import Enumeration, missing, redrawn
from samples import SAMPLES, b, bf, c, equation, f, i, rows, skip_where_jax_lacks, u

from sbp.signatures import Row
from sbp.signatures.families.elementwise import ELEMENTWISE
from sbp.signatures.rule import names
from sbp.types import P, S
from tests.slices import sliced

pytestmark = pytest.mark.laws

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
_ONE = "the sample's windows do not overlap, or have one element; those that do are refuted"
_OPEN = (
    "which of two writes to an element wins is open, and parts in which different ones won do not"
    " belong together"
)
_SMALL = "a product may underflow to 0 though no factor is 0"
_TOTAL = "the total order of keys, inside comparators of sorts, that no type is given to"

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
    ("le_to lt_to", r".*", _TOTAL),
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
    ("reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add", r".*", _ONE),
    ("scatter", r"(P\(\w+\)), B, \1 -> \1", _OPEN),
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
        literal = any(
            a.shape == () for a in eqn.op.ins
        )  # the table does not know its sign, the values would show it
        if (
            literal
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
    monkeypatch.setattr(
        "enumeration.rows", lambda eqn, n: tuple(r for r in rows(eqn, n) if r != row)
    )
    assert any(row in (r for _, r in missing(e)) for e in enumerations(name))
