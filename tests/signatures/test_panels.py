"""Products in which both operands go round, each on a mesh axis of its own."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from samples import Equation, equation, f, i, rows

from sbp.signatures import Row
from sbp.signatures.laws.oracle import OpTypes, Oracle
from sbp.types import Split

SIZES = (2, 3)


def pairs(eqn: Equation) -> list[tuple[Row, Row]]:
    """Rows of the two mesh axes in which the right operand goes round on the first one and the left
    operand on the second one, and no dim is split twice."""
    outer, inner = (
        [r for r in rows(eqn, n) if r.kernel == kernel]
        for n, kernel in zip(SIZES, ("rotate_rhs", "rotate_lhs"), strict=True)
    )
    return [
        (a, b)
        for a, b in itertools.product(outer, inner)
        if not any(
            x == y and isinstance(x, Split)
            for x, y in zip((*a.ins, *a.outs), (*b.ins, *b.outs), strict=True)
        )
    ]


def assert_hold(eqn: Equation) -> None:
    found = pairs(eqn)
    assert found
    for a, b in found:
        ins, outs = (tuple(zip(*side, strict=True)) for side in ((a.ins, b.ins), (a.outs, b.outs)))
        types = OpTypes(ins, outs, SIZES, communicates=True)
        wrong = Oracle(eqn.op, eqn.primitive, eqn.args).refute(types, np.random.default_rng(0))
        assert not wrong, (a, b, wrong)


@pytest.mark.parametrize("contracted", [24, 6, 7])
def test_both_operands_go_round(contracted: int):
    """In panels where the contracted dim has 6 blocks of one size, and otherwise not."""
    x, y = f(7, contracted), f(contracted, 5, seed=1)
    assert_hold(equation("dot_general", lambda x, y: x @ y, (x, y)))


def test_integers_and_batches():
    """Integers exactly, with a batch dim that stays whole and two contracted dims."""
    x, y = i(2, 5, 2, 12), i(2, 2, 12, 4, seed=1)
    eqn = equation("dot_general", lambda x, y: jnp.einsum("baij,bijc->bac", x, y), (x, y))
    assert_hold(eqn)
