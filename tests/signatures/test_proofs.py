"""Scalar laws and laws about indices are theorems; wrong ones are refuted; contradictory premises
and limits do not count as proofs."""

from typing import Any

import numpy as np
import pytest
import z3
from jax import lax
from samples import SAMPLES, b, equation, equations, f, i, on, rule_of, skip_where_jax_lacks

from sbp.signatures import Op, Row, known_kernels, rule_for
from sbp.signatures.laws.proofs import (
    INDEX_THEOREMS,
    OF_KERNEL,
    RLIMIT,
    Status,
    Theorem,
    contraction,
    decide,
    index_theorem,
    law,
    neutral_padding,
    one_holder,
    one_reader,
    own_update,
    ragged_shard,
    row_status,
    theorem,
    window_products,
)
from sbp.types import MONOIDS, B, P

PMAX = P("max")


op_of = lambda name, sample=0, n=2: on(equations(name, SAMPLES[name])[sample], n)


def status(op: Op) -> dict[Row, Status]:
    """For each row of an equation, how it is known."""
    found = rule_for(op.name)
    return {} if found is None else {row: row_status(op, row) for row in found.rows(op)}


def counterexample(stated: Theorem) -> str:
    """Values for which a theorem's claim is wrong; empty if Z3 finds none."""
    solver = z3.Solver()
    solver.set(rlimit=RLIMIT)
    solver.add(*stated.premises, z3.Not(stated.claim))
    if solver.check() != z3.sat:
        return ""
    model = solver.model()
    return ", ".join(sorted(f"{d.name()} = {model[d]}" for d in model.decls()))


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
        assert set(status(op)) == set(rule_of(name).rows(op))
        for row, known in status(op).items():
            law_of_row = theorem(op, row)
            assert known != "assumed", (
                f"{name}: {row} is not proved:"
                f" {law_of_row and (counterexample(law_of_row) or decide(law_of_row))}"
            )


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
    assert found is not None and decide(found) == "refuted" and "=" in counterexample(found)


terms: Any = (*z3.Reals("x y"), *z3.Ints("length chunk"))
x, y, length, chunk = terms
whole: Any = lambda x: z3.ToReal(z3.ToInt(x))
truncated = lambda x: z3.If(x >= 0, whole(x), -whole(-x))
DECIDED = {
    "a cast to integers is not linear": (
        law([(np.dtype(np.float32), P, 0)], P, truncated),
        RLIMIT,
        "refuted",
    ),
    "contradictory premises prove nothing": (
        Theorem((x > 0, x < 0), x == x + 1),
        RLIMIT,
        "vacuous",
    ),
    "a limit is not a proof": (
        Theorem((), x * x * x + y * y * y != z3.RealVal(3) / 7 * x * y + 11),
        1,
        "unknown",
    ),
    "blocks too small for the dim": (
        Theorem(
            (length >= 1, chunk >= 1, 3 * chunk < length, *one_holder(3).premises[-2:]),
            one_holder(3).claim,
        ),
        RLIMIT,
        "refuted",
    ),
}


@pytest.mark.parametrize(("stated", "rlimit", "outcome"), DECIDED.values(), ids=DECIDED)
def test_what_is_not_proved(stated, rlimit, outcome):
    assert decide(stated, rlimit) == outcome


def test_a_monotone_function_has_to_be_monotone():
    """The theorem about rising functions uses its premises: without them it is refuted."""
    found = theorem(op_of("tanh"), Row((PMAX,), (PMAX,)))
    assert found is not None and decide(found) == "proved" and found.premises
    assert decide(Theorem((), found.claim)) == "refuted"
    falling = theorem(op_of("erfc"), Row((PMAX,), (PMAX,)))
    assert falling is not None and decide(falling) == "refuted"


# ---- indices -------------------------------------------------------------------------------------
# Theorems about indices: all are proved, each claim is refuted without its premises, and each
# kernel names its theorem.


@pytest.mark.parametrize(
    ("state", "argument"),
    [
        *((state, n) for state, sizes in INDEX_THEOREMS.values() for n in sizes),
        *((state, monoid) for state in (contraction, neutral_padding) for monoid in MONOIDS),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_theorems_hold(state, argument):
    assert decide(state(argument)) == "proved"


@pytest.mark.parametrize(
    ("state", "argument"),
    [
        *(
            (state, 2)
            for state in (one_holder, one_reader, own_update, ragged_shard, window_products)
        ),
        *((neutral_padding, monoid) for monoid in MONOIDS),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_no_premise_is_idle_as_a_whole(state, argument):
    """Without its premises each claim is refuted. So the claim says something, and it holds for
    blocks only, or for the value of the padding."""
    assert decide(Theorem((), state(argument).claim)) == "refuted"


def test_local_kernels_name_their_theorem():
    """A kernel without collectives is the primitive itself, or rests on a theorem."""
    themselves = {"local", "rounded_parts"}
    assert {k.name for k in known_kernels() if not k.communicates} - themselves <= set(OF_KERNEL)
    assert set(OF_KERNEL) <= {k.name for k in known_kernels()} and set(OF_KERNEL.values()) <= set(
        INDEX_THEOREMS
    )


def test_every_row_of_these_is_proved():
    """Elementwise, reducing and contracting: of real dtypes, nothing is left to enumeration
    alone."""
    for name in (
        "add",
        "mul",
        "max",
        "neg",
        "and",
        "not",
        "shift_left",
        "lt",
        "select_n",
        "tanh",
        "reduce_sum",
        "reduce_max",
        "iota",
    ):
        assert {row: s for row, s in status(op_of(name)).items() if s != "proved"} == {}, name


def test_the_theorem_of_a_row_is_that_of_its_kernel():
    (masked,) = (row for row in status(op_of("gather")) if row.kernel == "masked_gather")
    assert (
        index_theorem(op_of("gather"), masked) == "one_reader"
        and row_status(op_of("gather"), masked) == "proved"
    )
    halo = [row for row in status(op_of("rev")) if row.kernel == "halo"]
    assert halo and all(index_theorem(op_of("rev"), row) is None for row in halo)
