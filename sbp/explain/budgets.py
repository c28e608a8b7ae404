"""Budgets that no plan keeps, and the nearest ones that a plan does."""

from __future__ import annotations

from dataclasses import replace

from sbp.errors import Diagnostic, Help, OptionEdit, bytes_text
from sbp.explain.edits import priced
from sbp.infer.check import Checker
from sbp.infer.request import Request
from sbp.limits import Budget
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.plan.verify import over_budget

ROUNDS = 10
"""Plans that are made to find the least budget."""


def nearest_budget(request: Request, number: int) -> tuple[Budget, Program, bool] | None:
    """The least size that makes a budget possible while the others hold.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.

    Returns:
      The budget with that size, its plan, and whether a byte less was tried and gave no plan; None
      when the other budgets are impossible, too.
    """
    budget = request.budgets[number]

    def within(above: float | None) -> Program | None:
        budgets = list(request.budgets)
        if above is None:
            del budgets[number]
        else:
            budgets[number] = replace(budget, above=above)
        return best_program(replace(request, budgets=tuple(budgets)))

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
            return replace(budget, above=size), best, True
        else:
            low = trial
    return replace(budget, above=size), best, False


def largest(program: Program, budget: Budget) -> float:
    """The most bytes that one device sends in one run of a collective that a budget is about."""
    request = replace(program.typing.graph_request, budgets=(replace(budget, above=0.0),))
    return max((sent.bytes for sent in over_budget(program.block, request)), default=0.0)


def impossible_budgets(request: Request) -> Diagnostic | None:
    """What to say when the budgets are possible on each mesh axis alone, though not on all
    together; None when they are not to blame."""
    if not request.budgets or best_program(replace(request, budgets=())) is None:
        return None
    helps = [h for number in range(len(request.budgets)) if (h := budget_help(request, number))]
    return Diagnostic(
        code="budget",
        severity="error",
        title="no typing over all mesh axes keeps within the budgets",
        notes=tuple(f"the budget: {b}" for b in request.budgets),
        helps=tuple(sorted(helps, key=lambda h: h.bytes_per_device)[:3]),
    )


def budget_help(request: Request, number: int) -> Help | None:
    """The nearest budget as a help."""
    found = nearest_budget(request, number)
    if found is None:
        return None
    budget, program, least = found
    what = "which is possible"
    if least:
        what = (
            "the least that is possible"
            if _is_least(request, number, budget.above)
            else "the least that was found"
        )
    text = f"allow {bytes_text(budget.above)} in `{request.budgets[number]}`, {what}"
    edit = OptionEdit(option="budgets", position=number, value=budget.above)
    return priced(text, (edit,), program, clears_all_errors=True)


def _is_least(request: Request, number: int, size: float) -> bool:
    """Whether nothing below a size is shown to be possible: that the chooser finds nothing is no
    proof on several mesh axes."""
    budgets = list(request.budgets)
    budgets[number] = replace(budgets[number], above=size - 1)
    tighter = replace(request, budgets=tuple(budgets))
    return size >= 1 and Checker(tighter).check(explain=False).status == "unsat"
