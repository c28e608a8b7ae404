"""Budgets that no plan meets, and the nearest budgets that a plan meets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbp.errors import Diagnostic, Help, OptionEdit, bytes_text
from sbp.explain.change import priced
from sbp.explain.fault_notes import unshown_text
from sbp.explain.limits import DiagnosisLimits
from sbp.infer.check import Checker
from sbp.infer.request import Request
from sbp.limits import Budget
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.plan.verify import over_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestBudget:
    """The least size that was found for a budget.

    Arguments:
      budget: the budget with that size.
      program: the plan under it.
      is_least: whether one byte less was tried and gave no plan. Otherwise the search ended at its
        limit.
      plans: the number of plans that were tried.
    """

    budget: Budget
    program: Program
    is_least: bool
    plans: int


def nearest_budget(request: Request, number: int, *, plans: int) -> NearestBudget | None:
    """The least size of a budget under which a plan exists. The other budgets stay.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.
      plans: the most plans that are made.

    Returns:
      None when the other budgets are impossible, too.
    """
    budget = request.budgets[number]

    def within(above: float | None) -> Program | None:
        """The plan with another size of the budget; None for the plan without the budget."""
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
    for turn in range(plans):
        # One turn tries the next smaller size, the next turn halves the distance to the lower end.
        below = turn % 2 == 0
        trial = size - 1 if below else (low + size) / 2
        program = within(trial) if trial > budget.above else None
        if program is not None:
            best, size = program, max(largest(program, budget), budget.above)
        elif below:
            found = replace(budget, above=size)
            return NearestBudget(budget=found, program=best, is_least=True, plans=turn + 1)
        else:
            low = trial
    found = replace(budget, above=size)
    return NearestBudget(budget=found, program=best, is_least=False, plans=plans)


def largest(program: Program, budget: Budget) -> float:
    """The most bytes that one device sends in one run of a collective that a budget covers."""
    request = replace(program.typing.graph_request, budgets=(replace(budget, above=0.0),))
    return max((sent.bytes for sent in over_budget(program.block, request)), default=0.0)


def impossible_budgets(request: Request, limits: DiagnosisLimits) -> Diagnostic | None:
    """The diagnostic of budgets that each mesh axis can keep, but not all axes together; None when
    the budgets are not to blame.

    Arguments:
      request: a program without a plan.
      limits: on the work and on what is shown.
    """
    if not request.budgets or best_program(replace(request, budgets=())) is None:
        return None
    numbers = range(len(request.budgets))
    found = (budget_help(request, number, plans=limits.budget_plans) for number in numbers)
    helps = sorted((h for h in found if h is not None), key=lambda h: h.bytes_per_device)
    rest = len(helps) - limits.helps
    return Diagnostic(
        code="budget",
        severity="error",
        title="no typing over all mesh axes keeps within the budgets",
        notes=(
            *(f"the budget: {b}" for b in request.budgets),
            *((unshown_text(rest),) if rest > 0 else ()),
        ),
        helps=tuple(helps[: limits.helps]),
    )


def budget_help(request: Request, number: int, *, plans: int) -> Help | None:
    """The nearest budget as a help; None when there is none.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.
      plans: the most plans that are made.
    """
    found = nearest_budget(request, number, plans=plans)
    if found is None:
        return None
    size = found.budget.above
    if not found.is_least:
        what = f"the least in {found.plans} plan{'s' * (found.plans > 1)}"
    elif _is_least(request, number, size):
        what = "the least that is possible"
    else:
        what = "the least that was found"
    text = f"allow {bytes_text(size)} in `{request.budgets[number]}`, {what}"
    edit = OptionEdit(option="budgets", position=number, value=size)
    return priced(text, (edit,), found.program)


def _is_least(request: Request, number: int, size: float) -> bool:
    """Whether the checker proves that no smaller size is possible. A search of the chooser without
    result is no proof on several mesh axes.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.
      size: its size in bytes.
    """
    budgets = list(request.budgets)
    budgets[number] = replace(budgets[number], above=size - 1)
    tighter = replace(request, budgets=tuple(budgets))
    return size >= 1 and Checker(tighter).check(explain=False).status == "unsat"
