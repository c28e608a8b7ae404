"""What is not decided for all sizes is said in the report."""

import itertools
import math

import numpy as np
import pytest

import sbp
from sbp import _jax
from sbp.sizes import scope
from sbp.sizes.claims import Claim, decide
from sbp.sizes.scope import Scope, explore, numbers, value_of
from tests.same import registered
from tests.sizes.oracle import MESH, W, dims, f32, holds_there, mlp, sized


def test_products_of_symbols_are_decided():
    def program(m, k):
        return sbp.jit(
            lambda x: sbp.split(x.reshape(k + m, m, 16), 0, "data") * 2,
            MESH,
            in_types=("B",),
            out_types="B",
        )

    m, k = dims("m, k")
    report = sized(program(m, k), f32(m * m + m * k, 16))
    assert report.program is not None and not report.ok
    (said,) = [d for d in report.diagnostics if d.severity == "note"]
    assert said.notes == (
        "JAX cannot trace it with numbers: the function uses the symbolic sizes k and m from"
        " outside of its arguments; take them from the shapes of its arguments",
    )
    assert not [
        (m, k)
        for m, k in itertools.product(range(1, 13), repeat=2)
        if report.sizes.holds_at(m=m, k=k)
        != holds_there(program(m, k), report.program.typing, (f32(m * m + m * k, 16),))
    ]


def of_rule(name, splits):
    """The report on a primitive that splits rows of the lengths of which a function says so."""
    named_p = _jax.Primitive(name)
    named_p.def_abstract_eval(lambda x: x)
    _jax.mlir.register_lowering(named_p, lambda ctx, x: [x])
    rows = lambda op: ["S(0) -> S(0)"] if splits(op.ins[0].shape[0]) else []
    with registered(named_p, rows, samples=[(named_p.bind, (f32(48, 2),))]):
        (b,) = dims("b")
        f = sbp.jit(
            named_p.bind, MESH, in_types=("data:S(0)",), out_types="data:S(0)", boxing="explicit"
        )
        return sized(f, f32(b, 4))


def test_a_rule_that_wants_numbers_is_not_proved():
    report = of_rule("sized_test", lambda n: n in dict.fromkeys(range(0, 10**4, 8)))
    (said,) = [d for d in report.diagnostics if d.code == "sizes-unproved"]
    assert (
        "there are more than 128 cases: sized_test on (b, 4) takes data:S(0) to data:S(0)"
        in said.notes[0]
    )
    assert report.sizes.holds_at(b=40) is True


def test_another_program_with_numbers_is_said():
    (b,) = dims("2*b + 1")
    report = sbp.jit(lambda x: sbp.split(x, 0, "data")[1:] * 2, MESH, in_types=("B",)).check(
        f32(b, 8)
    )
    (said,) = [d for d in report.diagnostics if d.code == "sizes-unproved"]
    assert said.notes == ("the first difference: gather with symbolic sizes, slice with b = 40",)


def test_budgets_are_of_the_sizes_that_are_planned():
    (b,) = dims("8*b")
    report = sized(
        sbp.jit(mlp, MESH, budgets=[sbp.forbid("all_gather", above=2**20)]), W, f32(b, 16)
    )
    assert (
        report.limits == ("budgets",)
        and "met for b = 40; sbp did not check other sizes" in report.text()
    )


# ---- limits of the search -----------------------------------------------------------------------


def claimed(*moduli: int) -> tuple[Claim, ...]:
    """Claims that b has the rest 1 or 2 modulo each number."""
    (b,) = dims("b")
    return tuple(
        Claim(text=f"b fits {m}", key=m, holds=lambda lift, m=m: lift(b) % m in (1, 2))
        for m in moduli
    )


def test_some_claims_are_listed():
    found = decide(claimed(5, 7, 11, 13), Scope(("b",), ()), {"b": 1})
    assert found.status == "some"
    assert found.holds == "b fits 5 and b fits 7 and b fits 11 and 1 more condition"


@pytest.mark.parametrize(
    "claim,rlimit,said",
    [
        (lambda b: hash(b) % 8 == 0, scope.RLIMIT, "there are more than 128 cases"),
        (lambda b: b % 8 == 0, 1, "Z3 gave up"),
    ],
)
def test_an_undecided_claim_is_said(claim, rlimit, said, monkeypatch):
    monkeypatch.setattr(scope, "RLIMIT", rlimit)
    (b,) = dims("b")
    claims = (Claim(text="b is round", key=0, holds=lambda lift: claim(lift(b))),)
    found = decide(claims, Scope(("b",), ()), {"b": 8})
    ((_, why),) = found.undecided
    assert found.status == "open"
    assert why == f"sbp could not prove this, because {said}: b is round"
    assert found.holds_at(b=8) is True


def test_a_claim_is_decided_where_the_others_hold():
    """A claim that wants numbers outside of the sizes that another one leaves."""
    (b,) = dims("b")
    two = Claim(text="2 divides b", key=2, holds=lambda lift: lift(b) % 2 == 0)
    hard = Claim(
        text="b is large",
        key=3,
        holds=lambda lift: lift(b) >= 10 if lift(b) % 2 == 0 else hash(lift(b)) % 8 == 0,
    )
    found = decide((two, hard), Scope(("b",), ()), {"b": 12})
    assert (found.status, found.holds) == ("some", "2 divides b and b is large")
    assert [found.holds_at(b=b) for b in (8, 9, 10, 11, 12)] == [False, False, True, False, True]


# ---- numbers of elements -------------------------------------------------------------------------

RESHAPES = {
    "a number": (lambda x, b, s: x.reshape(8, s), (lambda b, s: (b, s))),
    "a quotient": (lambda x, b, s: x.reshape(b, 8, s // 8), (lambda b, s: (b, s))),
    "a product": (lambda x, b, s: x.reshape(24), (lambda b, s: (b, s))),
    "a sum": (lambda x, b, s: x.reshape(8, 4), (lambda b, s: (b + s, 4))),
    "two": (lambda x, b, s: x.reshape(4, s).reshape(b, 6), (lambda b, s: (b, s))),
}


@pytest.mark.parametrize(("program", "shape"), RESHAPES.values(), ids=RESHAPES)
def test_sizes_of_other_numbers_of_elements_are_left_out(program, shape):
    b, s = dims("b, s")
    jitted = sbp.jit(lambda x: program(x, b, s) * 2, MESH, in_types="B", out_types="B")
    report = sized(jitted, f32(*shape(b, s)))
    found = report.sizes
    assert found.status == "some"
    (error,) = [d for d in report.diagnostics if d.severity == "error"]
    assert error.primary is not None and "reshape" in found.holds
    assert "keeps the number of elements" in report.text(400)
    assert program(np.zeros(shape(**found.point)), **found.point) is not None
    for point in itertools.product(range(1, 13), repeat=2):
        claimed, here = found.holds_at(b=point[0], s=point[1]), shape(*point)
        try:
            program(np.zeros(here), *point)
            assert claimed is not False, point
        except ValueError:  # other numbers of elements
            assert claimed is False, point


# ---- exploration ---------------------------------------------------------------------------------
# Predicates on symbolic sizes are decided exactly, and Z3 counts as Python does.


def test_z3_counts_as_python_does():
    texts = (
        "- floordiv(- b, 2)",
        "mod(b - 9, 4)",
        "floordiv(b - 9, s)",
        "mod(7 - b, s)",
        "max(b, 2*s) - min(b, s)",
        "b^2*s - 3",
        "floordiv(3, b)",
    )
    scope = Scope(("b", "s"), ())
    for text, b, s in itertools.product(texts, range(1, 12), range(1, 6)):
        value = str(value_of(text, {"b": b, "s": s})).replace("-", "- ")
        there = scope.narrow([f"b == {b}", f"s == {s}"])
        assert there.always((f"{text} == {value}",)), (text, b, s)
        assert not there.always((f"{text} != {value}",))


def test_exploration_is_exact():
    b, s = dims("b, s")
    cases = [
        lambda lift: lift(b) % 3 == 1 or lift(s) * 2 > lift(b),
        lambda lift: math.prod([lift(b), 4]) % 16 == 0 and max(lift(b), lift(s)) > 5,
        lambda lift: -(-lift(b) // 4) >= 2 and bool(lift(s) - 1),
        lambda lift: [6, 7][lift(b) % 2] < lift(s),
        lambda lift: lift(b) in (3, 5, 8),
        lambda lift: abs(lift(b) - 9) < lift(s) and lift(s) / 2 <= 10,
    ]
    for predicate in cases:
        found = explore(predicate, Scope(("b", "s"), ("s <= 30",)), {"b": 16, "s": 5})
        assert not found.open
        points = ({"b": b, "s": s} for b in range(1, 40) for s in range(1, 30))
        assert not [p for p in points if found.holds_at(p) != bool(predicate(numbers(p)))]


def test_what_wants_numbers_is_not_explored():
    (b,) = dims("b")
    found = explore(lambda lift: hash(lift(b)) % 8 == 0, Scope(("b",), ()), {"b": 16})
    assert (
        "more than 128 cases" in found.open
        and found.holds_at({"b": 16}) is True
        and found.holds_at({"b": 10**6}) is None
    )
    found = explore(lambda lift: isinstance(lift(b), int), Scope(("b",), ()), {"b": 16})
    assert found.open == "it decides otherwise for numbers" and found.holds_at({"b": 16}) is True
