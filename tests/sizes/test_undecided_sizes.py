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
from tests.sizes.oracle import MESH, TP, W, dims, f32, holds_there, mlp, sized


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
    assert "it does not hold for b = 2" in said.notes[0] and report.sizes.holds_at(b=40) is True


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

RESIDUES = (0, 6, 10, 14, 18, 22, 26, 30, 40, 46)


def test_claims_without_a_formula_are_shown():
    """A rule that splits rows of ten lengths modulo 48: no conjunction of facts says that."""
    report = of_rule("lengths_test", lambda n: n % 48 in RESIDUES)
    found = report.sizes
    assert (found.status, found.terms) == ("some", ())
    assert "lengths_test on (b, 4)" in found.holds and found.holds in report.text(400)
    assert all(found.holds_at(b=b) == (b % 48 in RESIDUES) for b in range(1, 100))


def claimed(*moduli: int) -> tuple[Claim, ...]:
    """Claims of which no facts say the same: b has the rest 1 or 2 modulo each number."""
    (b,) = dims("b")
    return tuple(
        Claim(text=f"b fits {m}", key=m, holds=lambda lift, m=m: lift(b) % m in (1, 2))
        for m in moduli
    )


def test_some_claims_without_a_formula_are_listed():
    found = decide(claimed(5, 7, 11, 13), Scope(("b",), ()), {"b": 1})
    assert (found.status, found.terms) == ("some", ())
    assert found.holds == "b fits 5 and b fits 7 and b fits 11 and 1 more condition"


def test_a_counterexample_behind_the_small_sizes_is_found():
    """The smallest 4,096 sizes are tried in order; this scope starts behind them."""
    (b,) = dims("b", "b >= 5000")
    found = sized(
        sbp.jit(mlp, MESH, in_types=(TP, "data:S(0)"), out_types="data:S(0)"), W, f32(b, 16)
    ).sizes
    assert found.counterexample is not None and found.holds_at(**found.counterexample) is False


@pytest.mark.parametrize(
    "claim,rlimit,said",
    [
        (lambda b: hash(b) % 8 == 0, scope.RLIMIT, "there are more than 128 cases"),
        (lambda b: b % 8 == 0, 1, "Z3 gave up"),
    ],
)
def test_an_undecided_claim_is_tried_at_small_sizes(claim, rlimit, said, monkeypatch):
    monkeypatch.setattr(scope, "RLIMIT", rlimit)
    (b,) = dims("b")
    claims = (Claim(text="b is round", key=0, holds=lambda lift: claim(lift(b))),)
    found = decide(claims, Scope(("b",), ()), {"b": 8})
    ((_, why),) = found.undecided
    assert found.status == "open" and why == (
        f"sbp could not prove this, because {said}: b is round; it does not hold for b = 1"
    )
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
    assert (found.status, found.holds) == ("some", "b >= 10 and mod(b, 2) == 0")
    assert found.counterexample == {"b": 1}


# ---- numbers of elements -------------------------------------------------------------------------

RESHAPES = {
    "a number": (lambda x, b, s: x.reshape(8, s), (lambda b, s: (b, s)), "b == 8"),
    "a quotient": (lambda x, b, s: x.reshape(b, 8, s // 8), (lambda b, s: (b, s)), "mod(s, 8)"),
    "a product": (lambda x, b, s: x.reshape(24), (lambda b, s: (b, s)), "b*s == 24"),
    "a sum": (lambda x, b, s: x.reshape(8, 4), (lambda b, s: (b + s, 4)), "s == - b + 8"),
    "two": (lambda x, b, s: x.reshape(4, s).reshape(b, 6), (lambda b, s: (b, s)), "b == 4"),
}


@pytest.mark.parametrize(("program", "shape", "condition"), RESHAPES.values(), ids=RESHAPES)
def test_sizes_of_other_numbers_of_elements_are_left_out(program, shape, condition):
    b, s = dims("b, s")
    jitted = sbp.jit(lambda x: program(x, b, s) * 2, MESH, in_types="B", out_types="B")
    report = sized(jitted, f32(*shape(b, s)))
    found = report.sizes
    assert found.status == "some" and condition in found.holds
    assert "keeps the number of elements" in report.text(400)
    assert program(np.zeros(shape(**found.point)), **found.point) is not None
    for point in itertools.product(range(1, 13), repeat=2):
        claimed, here = found.holds_at(b=point[0], s=point[1]), shape(*point)
        try:
            program(np.zeros(here), *point)
            assert claimed is not False, point
        except ValueError:  # other numbers of elements
            assert claimed is False, point


def test_the_help_is_accepted():
    b, s = dims("b, s")
    report = sized(sbp.jit(lambda x: x.reshape(8, s) * 2, MESH, in_types="B"), f32(b, s))
    (error,) = [d for d in report.diagnostics if d.severity == "error"]
    assert error.primary is not None and "x.reshape(8, s)" in report.text(400)
    (help_,) = error.helps
    assert "b == 8" in help_.text
    b, s = dims("b, s", *report.sizes.terms)
    assert sized(sbp.jit(lambda x: x.reshape(8, s) * 2, MESH, in_types="B"), f32(b, s)).ok


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


def test_small_points_of_many_symbols_are_few():
    found = list(Scope(tuple("abc"), ("a == 1",)).points(1000))
    assert len(found) == len({tuple(p.values()) for p in found}) == 100
    assert found == sorted(found, key=lambda p: (max(p.values()), tuple(p.values())))
    for count in (18, 24):
        names = tuple(f"s{k}" for k in range(count))
        assert list(Scope(names, ()).points()) == [dict.fromkeys(names, 1)]
