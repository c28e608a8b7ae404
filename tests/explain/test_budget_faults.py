"""The diagnosis of a program that no plan keeps within its budgets: the line, and the nearest
budget."""

import pytest

import sbp
from sbp.errors import SbpTypeError
from sbp.explain import faults
from sbp.explain.change import DiagnosisLimits, left_out
from sbp.explain.faults import explain
from sbp.explain.relaxations import nearest_budget
from tests.edits import check_helps
from tests.explain.budgeted import ACROSS, MESH, ROWS, SQUARE, W, X, crossed, loss


def test_rows_of_a_budget_say_what_does_not_fit():
    f = sbp.jit(
        crossed, MESH, in_types=ACROSS, out_types="dcn:P(sum)", budgets=[sbp.forbid(axis="dcn")]
    )
    (found,) = f.check(SQUARE, SQUARE).diagnostics
    assert found.code == "budget"
    assert {(r.inputs, r.remark) for r in found.rows} >= {
        (("S(1)", "S(0)"), "a fits, b does not"),
        (("B", "S(1)"), "b fits, a does not"),
    }


def test_what_no_plan_keeps_is_a_type_error_with_the_nearest_budget():
    f = sbp.jit(loss, MESH, in_types=ROWS, budgets=[sbp.forbid(above=1000, where="forward")])
    with pytest.raises(SbpTypeError) as caught:
        f.plan(X, W)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "budget"
    budgets = [sbp.forbid(above=1000, where="forward")]
    check_helps(loss, MESH, {"in_types": ROWS, "budgets": budgets}, (X, W), [diagnostic])
    traced = f.trace(X, W)
    found = nearest_budget(traced.request, 0, plans=DiagnosisLimits().plans)
    assert found is not None
    budget, program = found
    (help_,) = diagnostic.helps
    assert help_.bytes_per_device == program.cost.bytes_per_device
    # What it names is possible, and a byte less is not.
    nearest = sbp.forbid(above=budget.above, where="forward")
    assert sbp.jit(loss, MESH, in_types=ROWS, budgets=[nearest]).plan(X, W).cost == program.cost
    assert (
        not sbp.jit(
            loss, MESH, in_types=ROWS, budgets=[sbp.forbid(above=budget.above - 1, where="forward")]
        )
        .check(X, W)
        .ok
    )


@pytest.mark.parametrize("named", [False, True])
def test_a_result_that_may_not_be_reduced_is_told_at_its_line(named):
    def product(x, w):
        return x @ w

    def assigned(x, w):
        y = x @ w
        return y

    (diagnostic,) = (
        sbp.jit(
            assigned if named else product, MESH, in_types=ROWS, budgets=[sbp.forbid(axis="model")]
        )
        .check(X, W)
        .diagnostics
    )
    assert diagnostic.code == "budget" and diagnostic.primary is not None
    assert (
        diagnostic.title
        == "`x @ w`, which is returned, needs what a budget forbids on mesh axis `model`"
    )
    assert diagnostic.primary.text == "P(sum) here, and returned"
    (help_,) = diagnostic.helps
    assert help_.bytes_per_device > 0


@pytest.mark.parametrize("nearest", [True, False])
def test_the_nearest_budget_takes_the_place_of_one_help(nearest, monkeypatch):
    """Where there is none, because other budgets are impossible, too, that place is free."""
    f = sbp.jit(
        crossed, MESH, in_types=ACROSS, out_types="dcn:P(sum)", budgets=[sbp.forbid(axis="dcn")]
    )
    request = f.trace(SQUARE, SQUARE).request
    if not nearest:
        monkeypatch.setattr(faults, "budget_help", lambda *_, **__: None)
    (every,) = explain(request, limits=DiagnosisLimits(helps=100))
    (few,) = explain(request, limits=DiagnosisLimits(helps=2))
    left = len(every.helps) - 2
    assert len(few.helps) == 2 and left > 0
    assert few.helps[-1].text.startswith("allow ") == nearest
    assert left_out(left, 0)[0] in few.notes
