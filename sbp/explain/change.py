"""Changes that a user may make to a program, and the plans after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sbp.errors import Edit, Help, Label
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
