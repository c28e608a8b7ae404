"""Budgets that no plan keeps, and the nearest ones that a plan does."""

from __future__ import annotations

import dataclasses

from sbp.errors import Diagnostic, Help, OptionEdit, bytes_text
from sbp.explain.edits import Case, priced
from sbp.infer.problem import Demand
from sbp.infer.regime import regime_of
from sbp.limits import Budget
from sbp.plan.program import Program
from sbp.plan.verify import over_budget

ROUNDS = 10
"""Plans that are made to find the least budget."""


def nearest_budget(case: Case, number: int) -> tuple[Budget, Program, bool] | None:
    """The least size that makes a budget possible while the others hold.

    Arguments:
      case: a program that no plan of its budgets fits.
      number: which budget.

    Returns:
      The budget with that size, its plan, and whether a byte less was tried and gave no plan; None
      when the other budgets are impossible, too.
    """
    budget = case.demand.budgets[number]

    def within(above: float | None) -> Program | None:
        budgets = list(case.demand.budgets)
        if above is None:
            del budgets[number]
        else:
            budgets[number] = dataclasses.replace(budget, above=above)
        return dataclasses.replace(
            case, demand=dataclasses.replace(case.demand, budgets=tuple(budgets))
        ).plan()

    best = within(None)
    if best is None:
        return None
    low, size = budget.above, largest(best, budget)
    for turn in range(ROUNDS):
        below = (
            turn % 2 == 0
        )  # in turn: whether any smaller one is possible, and whether one half as far is
        trial = size - 1 if below else (low + size) / 2
        program = within(trial) if trial > budget.above else None
        if program is not None:
            best, size = program, max(largest(program, budget), budget.above)
        elif below:
            return dataclasses.replace(budget, above=size), best, True
        else:
            low = trial
    return dataclasses.replace(budget, above=size), best, False


def largest(program: Program, budget: Budget) -> float:
    """The most bytes that one device sends in one run of a collective that a budget is about."""
    demand = Demand(inputs=(), outputs=(), budgets=(dataclasses.replace(budget, above=0.0),))
    regime = regime_of(program.graph, program.mesh, program.typing.boxing, demand)
    return max((sent.bytes for sent in over_budget(program.block, regime)), default=0.0)


def impossible_budgets(case: Case) -> Diagnostic | None:
    """What to say when the budgets are possible on each mesh axis alone, though not on all
    together; None when they are not to blame."""
    if (
        not case.demand.budgets
        or dataclasses.replace(case, demand=dataclasses.replace(case.demand, budgets=())).plan()
        is None
    ):
        return None
    helps = [h for number in range(len(case.demand.budgets)) if (h := budget_help(case, number))]
    return Diagnostic(
        code="budget",
        severity="error",
        title="no typing over all mesh axes keeps within the budgets",
        notes=tuple(f"the budget: {b}" for b in case.demand.budgets),
        helps=tuple(sorted(helps, key=lambda h: h.bytes_per_device)[:3]),
    )


def budget_help(case: Case, number: int) -> Help | None:
    """The nearest budget as a help."""
    found = nearest_budget(case, number)
    if found is None:
        return None
    budget, program, least = found
    what = "which is possible"
    if least:
        what = (
            "the least that is possible"
            if _is_least(case, number, budget.above)
            else "the least that was found"
        )
    text = f"allow {bytes_text(budget.above)} in `{case.demand.budgets[number]}`, {what}"
    edit = OptionEdit(option="budgets", position=number, value=budget.above)
    return priced(text, (edit,), program, clears_all_errors=True)


def _is_least(case: Case, number: int, size: float) -> bool:
    """Whether nothing below a size is shown to be possible: that the chooser finds nothing is no
    proof on several mesh axes."""
    budgets = list(case.demand.budgets)
    budgets[number] = dataclasses.replace(budgets[number], above=size - 1)
    tighter = dataclasses.replace(
        case, demand=dataclasses.replace(case.demand, budgets=tuple(budgets))
    )
    return size >= 1 and tighter.checker().check(explain=False).status == "unsat"
