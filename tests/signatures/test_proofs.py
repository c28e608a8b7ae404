"""Scalar laws are theorems; wrong ones are refuted; contradictory premises and limits do not count
as proofs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import z3
from jax import lax
from samples import SAMPLES, b, equation, equations, f, i, skip_where_jax_lacks

from sbp.signatures import Op, Row, rule_for
from sbp.signatures.laws.proofs import SCALAR, ScalarOperand, contraction, law, status, theorem
from sbp.signatures.laws.theorems import Theorem, counterexample, decide
from sbp.types import B, P, S, Unreduced

PMAX = P("max")
FLOAT, INT = np.dtype(np.float32), np.dtype(np.int32)


def op_of(name: str, sample: int = 0, n: int = 2) -> Op:
    op = equations(name, SAMPLES[name])[sample].op
    return Op(op.name, op.params, op.ins, op.outs, n)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_no_theorem_of_a_row_is_refuted(name):
    """Every row that has a scalar theorem is proved: none refuted, vacuous or undecided."""
    skip_where_jax_lacks(name)
    seen = set()
    for k in range(len(SAMPLES[name])):
        op = op_of(name, k)
        kind = tuple(a.dtype for a in (*op.ins, *op.outs)), str(op.params.get("y"))
        if kind in seen:
            continue
        seen.add(kind)
        found = rule_for(name)
        assert found is not None
        assert set(status(op)) == set(found.rows(op))
        for row, known in status(op).items():
            law_of_row = theorem(op, row)
            assert known != "assumed", (
                f"{name}: {row} is not proved:"
                f" {law_of_row and (counterexample(law_of_row) or decide(law_of_row))}"
            )


def test_what_is_proved():
    """The classes of partial rows, by an example of each."""
    proved = {
        row
        for name in ("add", "mul", "div", "neg", "max", "floor", "tanh", "not", "select_n")
        for row, s in status(op_of(name)).items()
        if s == "proved"
    }
    assert {
        Row((P, P), (P,)),
        Row((P, B), (P,)),
        Row((P,), (P,)),
        Row((PMAX,), (PMAX,)),
        Row((PMAX,), (P("min"),)),
        Row((PMAX, PMAX), (PMAX,)),
    } <= proved
    assert Row((B, P, P), (P,)) in proved
    assert status(op_of("reduce_sum"))[Row((S(0),), (P,))] == "proved"
    assert status(op_of("dot_general"))[Row((P, B), (P,))] == "proved"
    assert status(op_of("transpose"))[Row((S(0),), (S(1),))] == "proved"
    assert status(op_of("cholesky"))[Row((S(0),), (S(0),))] == "enumerated"


@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min", "and", "or"])
def test_contractions(monoid):
    assert decide(contraction(monoid)) == "proved"


WRONG = [
    ("mul", (f(2), f(2)), Row((P, P), (P,))),
    ("mul", (i(2), i(2)), Row((P, P), (P,))),
    ("add", (f(2), f(2)), Row((P, B), (P,))),
    ("div", (f(2), f(2)), Row((B, P), (P,))),
    ("div", (i(2), i(2)), Row((P, B), (P,))),
    ("max", (f(2), f(2)), Row((P, P), (P,))),
    ("min", (f(2), f(2)), Row((PMAX, PMAX), (PMAX,))),
    ("mul", (f(2), f(2)), Row((PMAX, B), (PMAX,))),
    ("add", (i(2), i(2)), Row((PMAX, B), (PMAX,))),
    ("neg", (i(2),), Row((PMAX,), (P("min"),))),
    ("abs", (f(2),), Row((P,), (P,))),
    ("square", (f(2),), Row((P,), (P,))),
    ("floor", (f(2),), Row((P,), (P,))),
    ("sign", (f(2),), Row((P,), (P,))),
    ("and", (b(2), b(2)), Row((P("and"), P("or")), (P("and"),))),
]


@pytest.mark.parametrize(
    ("name", "args", "row"), WRONG, ids=[f"{w[0]} {w[2]} {w[1][0].dtype}" for w in WRONG]
)
def test_wrong_rows_are_refuted(name, args, row):
    fn = {"and": lax.bitwise_and}.get(name) or getattr(lax, name)
    found = theorem(equation(name, fn, args).op, row)
    assert found is not None and decide(found) == "refuted"
    assert "=" in counterexample(found)


def test_a_cast_to_integers_is_not_linear():
    assert decide(law([ScalarOperand(FLOAT, P)], P, SCALAR["truncate"])) == "refuted"


def test_contradictory_premises_prove_nothing():
    x = z3.Real("x")
    assert decide(Theorem((x > 0, x < 0), x == x + 1)) == "vacuous"


def test_a_limit_is_not_a_proof():
    x: Any
    y: Any
    x, y = z3.Reals("x y")
    hard = Theorem((), x * x * x + y * y * y != z3.RealVal(3) / 7 * x * y + 11)
    assert decide(hard, rlimit=1) == "unknown"


def test_a_monotone_function_has_to_be_monotone():
    """The theorem about rising functions uses its premises: without them it is refuted."""
    found = theorem(op_of("tanh"), Row((PMAX,), (PMAX,)))
    assert found is not None and decide(found) == "proved" and found.premises
    assert decide(Theorem((), found.claim)) == "refuted"
    falling = theorem(op_of("erfc"), Row((PMAX,), (PMAX,)))
    assert falling is not None and decide(falling) == "refuted"
    assert isinstance(PMAX, Unreduced)
