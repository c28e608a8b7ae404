"""A type error in the full GShard step (36 layers, 2048 experts on 2048 cores) names its line, and
the work of finding it is counted. `benchmarks/blame_speed.py` measures the seconds."""

import pytest
import z3

from benchmarks.blame_speed import WRONG_STEPS, WrongStep, check

MOST_CHECKS = 600
"""Satisfiability checks by Z3 for one report: the fault, its minimal core and the helps."""


@pytest.mark.parametrize("wrong", WRONG_STEPS, ids=lambda w: f"{w.boxing}-{w.dispatched}")
def test_the_error_names_its_line(wrong: WrongStep, monkeypatch: pytest.MonkeyPatch):
    checks = count_checks(monkeypatch)
    report, _ = check(wrong)
    assert any(f"`{wrong.line}`" in d.title for d in report.diagnostics), report.text()
    assert all(d.helps for d in report.diagnostics)
    assert len(checks) <= MOST_CHECKS


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that gets one entry for each satisfiability check."""
    made: list[None] = []
    checked = z3.Solver.check

    def check(self, *assumptions):
        made.append(None)
        return checked(self, *assumptions)

    monkeypatch.setattr(z3.Solver, "check", check)
    return made
