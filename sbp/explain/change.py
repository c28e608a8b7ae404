"""Changes that a user may make to a program, and the plans after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sbp.errors import Edit, Help, Label
from sbp.infer.check import RLIMIT
from sbp.plan.fit import best_program
from sbp.plan.program import Program

HelpKind = Literal["pin", "conversion", "other pin", "drop", "policy", "pair"]
"""What a help changes: the dim that a pin splits, an annotation before the line, the kind of a
pin's atom, a pin that is dropped or left free on a mesh axis, a policy or budget, two pins of which
one no longer splits a dim. Two pins that both split another dim are "pin"."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """A change that may give a program a plan.

    Arguments:
      text: the change in words.
      edits: what the user would edit.
      make: returns the changed program, for `tried`; None when the program cannot have the change.
      without: (mesh axis, name) of the constraints that the change takes away.
      assumed: literals of states on the fault's mesh axis. The program is in one of these states
          after the change; empty for any state.
      kind: what it changes.
      instead: a smaller change; when it is accepted, this one is not tried.
      pinned: the values of the pins that ask another code.
      labels: the places that it changes.
    """

    text: str
    edits: tuple[Edit, ...]
    make: Callable[[], Any]
    without: frozenset[tuple[str, str]] = frozenset()
    assumed: tuple[str, ...] = ()
    kind: HelpKind = "drop"
    instead: Change | None = None
    pinned: tuple[int, ...] = ()
    labels: tuple[Label, ...] = ()

    def help(self, program: Program, *, more: str = "", clears_all_errors: bool = True) -> Help:
        """The change as a help, with the price of the plan after it; `more` ends its text."""
        text = self.text + more
        return priced(text, self.edits, program, clears_all_errors=clears_all_errors)


class Accepted(NamedTuple):
    """A change with the plan after it."""

    change: Change
    program: Program


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of some changes.

    Arguments:
      accepted: those that give a plan.
      seen: how many texts were looked at.
      plans: how many plans were made.
      untried: how many changes a limit left out.
    """

    accepted: tuple[Accepted, ...] = ()
    seen: int = 0
    plans: int = 0
    untried: int = 0


def tried(
    changes: Iterable[Change],
    *,
    plans: int,
    enough: int | None = None,
    helps: int | None = None,
    screen: Callable[[Change], bool] = lambda one: True,
    plan: Callable[[Any], Program | None] | None = None,
) -> Tried:
    """Plans each change, once for each text.

    Arguments:
      changes: the changes, the likeliest first.
      plans: the most plans that are made while no change is accepted.
      enough: the most plans once one is accepted; None for `plans`.
      helps: how many accepted changes end the search; None for no limit.
      screen: whether a change is worth a plan.
      plan: plans what a change makes; None for the cheapest plan of a request.
    """
    accepted: list[Accepted] = []
    seen, untried, made = set[str](), set[str](), 0
    for one in changes:
        if one.text in seen or any(_replaces(a.change, one) for a in accepted):
            continue
        most = enough if accepted and enough is not None else plans
        if made >= most or len(accepted) == helps:
            untried.add(one.text)
            continue
        seen.add(one.text)
        changed = one.make() if screen(one) else None
        if changed is None:
            continue
        made += 1
        program = (plan or best_program)(changed)
        if program is not None:
            accepted.append(Accepted(one, program))
    return Tried(tuple(accepted), len(seen), made, len(untried))


def _replaces(accepted: Change, other: Change) -> bool:
    """Whether an accepted change makes another one needless: a larger one, or another change of the
    same pins, where there are several."""
    same = len(other.pinned) > 1 and other.pinned == accepted.pinned
    return same or other.instead is accepted


def priced(
    text: str, edits: tuple[Edit, ...], program: Program, *, clears_all_errors: bool = True
) -> Help:
    """A help with the price of the plan after it.

    Arguments:
      text: the change in words.
      edits: what the user would edit.
      program: the plan that was made after the change.
      clears_all_errors: whether the plan is that of the whole program, and not of the program
          without the pins of its other errors.
    """
    return Help(
        text=text,
        edits=edits,
        bytes_per_device=program.cost.bytes_per_device,
        peak_memory_bytes=program.cost.peak_memory_bytes,
        clears_all_errors=clears_all_errors,
    )


# ---- limits --------------------------------------------------------------------------------------
# No limit is silent: a diagnosis has a note about what a limit left out.
# `python -m benchmarks.blame_speed` measures the seconds of a diagnosis under these limits.


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisLimits:
    """Limits on the search for the reasons why a program has no typing.

    Arguments:
      solver_resources: Z3's resource count for one check.
      large: operations above which a plan takes a second or more, so that few plans are made.
      huge: operations above which a change of the policy, whose one plan serves all faults, is
        tried before any change of an annotation.
      faults, faults_large: diagnostics of one program, of a large one.
      helps: helps that one diagnostic shows.
      rows: rows of a rule that one diagnostic shows.
      pins: pins that the diagnostic of all mesh axes together shows.
      plans: plans made for the helps of one fault.
      pair_plans: plans made for changes of two pins, where no change of one pin gives a typing.
      plans_large, nodes_planned: in a large program, the most plans for one fault and the most
        operations that all these plans have together. One plan for each fault is always made.
      reused: operations up to which helps are priced with the reuse of forward conversions in the
        backward pass.
      pin_trials: the number of pins times the number of operations up to which pins that are not
        part of a conflict of all mesh axes are sorted out.
      budget_plans: plans made to find the least budget.
    """

    solver_resources: int = RLIMIT
    large: int = 1000
    huge: int = 3000
    faults: int = 5
    faults_large: int = 3
    helps: int = 3
    rows: int = 4
    pins: int = 6
    plans: int = 12
    pair_plans: int = 4
    plans_large: int = 3
    nodes_planned: int = 6000
    reused: int = 500
    pin_trials: int = 4000
    budget_plans: int = 10

    def faults_shown(self, size: int) -> int:
        """The most diagnostics of a program with `size` operations."""
        return self.faults_large if size > self.large else self.faults

    def plans_of(self, size: int, shown: int) -> tuple[int, int]:
        """How many plans are made for the helps of one fault: once one of them gave a typing, and
        while none did.

        Arguments:
          size: the number of the program's operations.
          shown: the number of faults that are shown.
        """
        if size <= self.large:
            return self.plans, self.plans
        share = max(1, self.nodes_planned // (size * shown))
        return min(self.plans_large, share), self.plans_large


def more_text(count: int, noun: str) -> str:
    """The rest of a list.

    >>> more_text(1, "pin"), more_text(2, "pin")
    ('1 more pin', '2 more pins')
    """
    return f"{count} more {noun}{'s' * (count > 1)}"


def unshown_text(count: int) -> str:
    """The note about helps that are not shown."""
    verbs = "give a typing and are" if count > 1 else "gives a typing and is"
    return f"{more_text(count, 'change')} {verbs} not shown"
