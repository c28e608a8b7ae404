"""What is not decided for all sizes is said in the report."""

import itertools

import sbp
from sbp import _jax
from sbp.signatures import registered
from sbp.sizes.claims import Claim
from sbp.sizes.conditions import SizeLimits, decide
from sbp.sizes.scope import Scope
from tests.sizes.oracle import MESH, TP, W, dims, f32, holds_there, mlp, sized


def test_what_z3_does_not_decide_is_not_claimed():
    def program(m, k):
        return sbp.jit(
            lambda x: sbp.split(x.reshape(k + m, m, 16), 0, "data") * 2,
            MESH,
            in_types=("B",),
            out_types="B",
        )

    m, k = dims("m, k")
    report = sized(program(m, k), f32(m * m + m * k, 16))
    assert report.program is not None
    found = report.sizes
    assert found.status == "open" and not report.ok
    (undecided,) = [d for d in report.diagnostics if d.severity == "warning"]
    (said,) = [d for d in report.diagnostics if d.severity == "note"]
    assert said.notes == (
        "it cannot be traced with numbers: the function uses the symbolic sizes k and m from"
        " outside of its arguments; take them from the shapes of its arguments",
    )
    assert undecided.notes == (
        (
            "not proved, since Z3 gives up: reshape on (k*m + m^2, 16) takes data:S(0) model:S(1)"
            " to data:S(0) model:S(2); tried at 512 small sizes: not so where k = 1 and m = 2"
        ),
    )
    answers = {True: 0, False: 0, None: 0}
    for m, k in itertools.product(range(1, 13), repeat=2):
        claimed = found.holds_at(m=m, k=k)
        answers[claimed] += 1
        if claimed is not None:
            assert claimed == holds_there(
                program(m, k), report.program.typing, (f32(m * m + m * k, 16),)
            ), (m, k)
    assert all(answers.values()), answers


def test_a_rule_that_wants_numbers_is_not_proved():
    named_p = _jax.Primitive("sized_test")
    named_p.def_abstract_eval(lambda x: x)
    _jax.mlir.register_lowering(named_p, lambda ctx, x: [x])
    rows = lambda op: (
        ["S(0) -> S(0)"] if op.ins[0].shape[0] in dict.fromkeys(range(0, 10**4, 8)) else []
    )
    with registered(named_p, rows, samples=[(named_p.bind, (f32(8, 2),))]):
        (b,) = dims("b")
        f = sbp.jit(
            named_p.bind, MESH, in_types=("data:S(0)",), out_types="data:S(0)", boxing="explicit"
        )
        report = sized(f, f32(b, 4))
    (said,) = [d for d in report.diagnostics if d.code == "sizes-unproved"]
    assert (
        "there are more than 128 cases: sized_test on (b, 4) takes data:S(0) to data:S(0)"
        in said.notes[0]
    )
    assert "not so where b = 2" in said.notes[0] and report.sizes.holds_at(b=40) is True


def test_another_program_with_numbers_is_said():
    (b,) = dims("2*b + 1")
    report = sbp.jit(lambda x: sbp.split(x, 0, "data")[1:] * 2, MESH, in_types=("B",)).check(
        f32(b, 8)
    )
    (said,) = [d for d in report.diagnostics if d.code == "sizes-unproved"]
    assert said.notes == (
        "the first difference: gather with symbols, slice with numbers where b = 40",
    )


def test_budgets_are_of_the_sizes_that_are_planned():
    (b,) = dims("8*b")
    report = sized(
        sbp.jit(mlp, MESH, budgets=[sbp.forbid("all_gather", above=2**20)]), W, f32(b, 16)
    )
    assert (
        report.limits == ("budgets",)
        and "met where b = 40; not decided for other sizes" in report.text()
    )


# ---- limits of the search -----------------------------------------------------------------------

RESIDUES = (0, 6, 10, 14, 18, 22, 26, 30, 40, 46)


def test_claims_without_a_formula_are_shown():
    """A rule that splits rows of ten lengths modulo 48: no conjunction of facts says that."""
    named_p = _jax.Primitive("lengths_test")
    named_p.def_abstract_eval(lambda x: x)
    _jax.mlir.register_lowering(named_p, lambda ctx, x: [x])
    rows = lambda op: ["S(0) -> S(0)"] if op.ins[0].shape[0] % 48 in RESIDUES else []
    with registered(named_p, rows, samples=[(named_p.bind, (f32(48, 2),))]):
        (b,) = dims("b")
        f = sbp.jit(
            named_p.bind, MESH, in_types=("data:S(0)",), out_types="data:S(0)", boxing="explicit"
        )
        report = sized(f, f32(b, 4))
    found = report.sizes
    assert (found.status, found.terms) == ("some", ())
    assert "lengths_test on (b, 4)" in found.holds and found.holds in report.text(400)
    assert all(found.holds_at(b=b) == (b % 48 in RESIDUES) for b in range(1, 100))


def claimed(*moduli: int) -> tuple[Claim, ...]:
    """Claims that each modulus divides b."""
    (b,) = dims("b")
    return tuple(
        Claim(text=f"{m} divides b", key=m, holds=lambda lift, m=m: lift(b) % m == 0)
        for m in moduli
    )


def test_claims_are_shown_where_z3_finds_no_formula():
    scope, claims = Scope(("b",), ()), claimed(2, 3, 5, 7)
    found = decide(claims, scope, {"b": 210}, SizeLimits(formula_rlimit=1))
    assert (found.status, found.terms) == ("some", ())
    assert found.holds == "2 divides b and 3 divides b and 5 divides b and 1 more condition"
    found = decide(claims, scope, {"b": 210})
    assert found.terms and found.holds == " and ".join(found.terms)


def test_a_counterexample_that_need_not_be_the_smallest_is_said():
    """The smallest 4,096 sizes are tried in order; this scope starts behind them."""
    (b,) = dims("b", "b >= 5000")
    report = sized(
        sbp.jit(mlp, MESH, in_types=(TP, "data:S(0)"), out_types="data:S(0)"), W, f32(b, 16)
    )
    found = report.sizes
    assert found.counterexample is not None and found.holds_at(**found.counterexample) is False
    assert not found.is_smallest and "Z3 found these sizes; smaller ones may fail, too" in (
        report.text(400)
    )
    (b,) = dims("b")
    first = sized(
        sbp.jit(mlp, MESH, in_types=(TP, "data:S(0)"), out_types="data:S(0)"), W, f32(b, 16)
    )
    assert first.sizes.is_smallest and "Z3 found these sizes" not in first.text(400)


def test_the_number_of_sizes_tried_for_an_undecided_claim_is_said():
    (b,) = dims("b")
    claim = Claim(text="b is round", key=0, holds=lambda lift: hash(lift(b)) % 8 == 0)
    (undecided,) = decide((claim,), Scope(("b",), ()), {"b": 8}, SizeLimits(tried=16)).undecided
    assert (undecided.tried, undecided.fails) == (16, {"b": 1})
    assert undecided.why == "there are more than 128 cases"
