"""A type error in the full GShard step (36 layers, 2048 experts on 2048 cores) names its line, and
the work of finding it is counted. `benchmarks/blame_speed.py` measures the seconds."""

import pytest
import z3

from benchmarks.blame_speed import WRONG_STEPS, WrongStep, check

MOST_CHECKS = 500
"""Satisfiability checks by Z3 for one report: the fault, its minimal core and the helps. The three
programs take 311, 340 and 176."""


@pytest.mark.parametrize("wrong", WRONG_STEPS, ids=lambda w: f"{w.boxing}-{w.dispatched}")
def test_the_error_names_its_line(wrong: WrongStep, monkeypatch: pytest.MonkeyPatch):
    checks: list[None] = []
    asked = z3.Z3_solver_check_assumptions

    def ask(*arguments):
        checks.append(None)
        return asked(*arguments)

    # The function of Z3's C interface that `sbp.infer.check` calls.
    monkeypatch.setattr(z3, "Z3_solver_check_assumptions", ask)
    report, _ = check(wrong)
    assert any(f"`{wrong.line}`" in d.title for d in report.diagnostics), report.text()
    assert all(d.helps for d in report.diagnostics)
    assert 0 < len(checks) <= MOST_CHECKS
