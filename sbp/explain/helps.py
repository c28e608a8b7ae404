"""Helps: edits after which a program without a typing has one.

Each edit is planned before it is offered; the plan gives its price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sbp.errors import Help
from sbp.explain.change import Accepted, Change, Tried, priced, tried
from sbp.explain.edits import drop_pin, site_in
from sbp.explain.frames import Frames
from sbp.explain.insertions import Insertions
from sbp.explain.loosening import Looser, blamed, loosened
from sbp.explain.names import Names
from sbp.explain.pin_changes import PinChanges
from sbp.explain.pin_pairs import PinPairs
from sbp.explain.ranking import RankedHelp, chosen
from sbp.explain.trials import Trials
from sbp.infer.check import CheckResult
from sbp.infer.constraints import System
from sbp.infer.request import Request
from sbp.infer.space import decode
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.source.reader import users_span
from sbp.trace.graph import Node

CLEARS_ALL = ", which clears every error"
"""What is added to a help that is tried on the whole program, its other faults in it."""

_OF_ONE_PIN = frozenset({"pin", "other pin", "drop"})
"""Kinds of helps that change one pin."""

ChangeKind = Literal["annotation", "new split", "pair", "policy"]
"""Changes of which some are not tried in a large program: any change of the annotations, a new
annotation that splits a value, changes of two pins, another policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHelps:
    """The helps of a fault, and what the limits on the search left out.

    Arguments:
      helps: the helps that are shown, in the order of `chosen`.
      unshown: the number of accepted changes that are not shown.
      untried: the number of changes that were not planned because `plans` were made.
      plans: the most plans that were made.
      unsearched: the changes of which some were not tried because the program is large.
    """

    helps: tuple[Help, ...] = ()
    unshown: int = 0
    untried: int = 0
    plans: int = 0
    unsearched: tuple[ChangeKind, ...] = ()


@dataclass(frozen=True, slots=True)
class Repair:
    """Looks for the helps of one fault.

    Arguments:
      trials: the program.
      fault: the fault.
      node: the node at which it shows.
      names: the names of the program's values.
      shown: the number of faults that are shown.
    """

    trials: Trials
    fault: CheckResult
    node: Node
    names: Names
    shown: int

    @property
    def position(self) -> int:
        """The position of the fault's mesh axis."""
        return self.trials.request.mesh.names.index(self.fault.mesh_axis)

    @property
    def system(self) -> System:
        """The constraints of the fault's mesh axis."""
        return self.trials.system(self.fault.mesh_axis)

    @property
    def inserts(self) -> bool:
        """Whether annotations before the line of the fault are tried. Budgets hold there, too."""
        if self.fault.budgets:
            return False
        return users_span(self.node) is not None and not self.node.in_gradient

    def found(self) -> FoundHelps:
        """Edits that give the program a typing. The pins that are to blame for its other faults are
        left out of the program."""
        trials = self.trials
        base, gone = self.base()
        policies, skips = self.by_policy(base) if trials.huge else ([], False)
        edits = Tried() if policies else self.by_annotation(base, gone)
        if not trials.huge and trials.large and edits.accepted:
            skips = next(self.policies(), None) is not None
        elif not trials.huge:
            policies, skips = self.by_policy(base)
        unsearched: list[ChangeKind] = []
        if trials.huge and policies:
            unsearched.append("annotation")
        elif trials.large and self.inserts:
            unsearched.append("new split")
        pairs = Tried()
        one_pin = any(one.change.kind in _OF_ONE_PIN for one in edits.accepted)
        if not one_pin and "annotation" not in unsearched:
            if not trials.large:
                pairs = self.by_pairs(base, gone)
            elif len(self.pairs(base).pins) > 1:
                unsearched.append("pair")
        if skips:
            unsearched.append("policy")
        found = [*map(self.ranked, (*edits.accepted, *pairs.accepted)), *policies]
        shown = chosen(found, trials.limits.helps)
        return FoundHelps(
            helps=tuple(f.help for f in shown),
            unshown=len(found) - len(shown),
            untried=edits.untried + pairs.untried,
            plans=edits.plans + pairs.plans,
            unsearched=tuple(unsearched),
        )

    def ranked(self, accepted: Accepted) -> RankedHelp:
        """An accepted change of the annotations, as a help."""
        one, program = accepted
        more, whole = self.became(program), not self.trials.several
        weaker = "pair" if len(one.pinned) > 1 else "other pin"
        kind = weaker if one.kind == "pin" and _nested(one, program) else one.kind
        return RankedHelp(
            one.help(program, more=more, clears_all_errors=whole), kind, program.cost.seconds
        )

    def by_annotation(self, base: Request, gone: set[tuple[str, str]]) -> Tried:
        """Annotations and pins changed, until the plans for this fault are made.

        Arguments:
          base: the program without the pins of its other faults.
          gone: (mesh axis, name) of the constraints of those pins.
        """
        enough, most = self.trials.limits.plans_of(self.trials.size, self.shown)
        axis, may_hold = self.fault.mesh_axis, self.trials.may_hold
        return tried(
            self.changes(base),
            plans=most,
            enough=enough,
            screen=lambda one: may_hold(axis, gone | one.without, one.assumed),
        )

    def by_pairs(self, base: Request, gone: set[tuple[str, str]]) -> Tried:
        """Changes of two pins, where no change of one gives a typing: one help for two pins.

        Arguments:
          base: the program without the pins of its other faults.
          gone: (mesh axis, name) of the constraints of those pins.
        """
        changes = self.pairs(base).changes_of_two(self.trials, gone)
        return tried(changes, plans=self.trials.limits.pair_plans)

    def by_policy(self, base: Request) -> tuple[list[RankedHelp], bool]:
        """Policies that allow more, and whether some were left out because the program is large. In
        a large program the first that gives a typing, and only with all faults in the program.

        Arguments:
          base: the program without the pins of its other faults.
        """
        found: list[RankedHelp] = []
        large, several = self.trials.large, self.trials.several
        wide = skips = False
        for looser in self.policies():
            if found and (large or looser.wide > wide):
                return found, skips or large
            program, whole = self.trials.policy(looser), True
            if program is None and several:
                skips = skips or large
                program, whole = None if large else best_program(looser.make(base)), False
            if program is not None:
                text = looser.text + (CLEARS_ALL if several and whole else "")
                help_ = priced(text, looser.edits, program, clears_all_errors=whole)
                found.append(RankedHelp(help_, "policy", program.cost.seconds))
                wide = looser.wide
        return found, skips

    def base(self) -> tuple[Request, set[tuple[str, str]]]:
        """The program without the pins that are to blame for its other faults, and (mesh axis,
        name) of the constraints of those pins."""
        base, gone = self.trials.request, set[tuple[str, str]]()
        faults = self.trials.faults
        own = (self.fault, *faults.others(self.fault))
        mine = {(r.mesh_axis, c.name) for r in own for c in r.pins}
        others = [
            r
            for f, same in zip(faults.first, faults.same, strict=True)
            if f is not self.fault
            for r in (f, *same)
        ]
        for other in others:
            position = base.mesh.names.index(other.mesh_axis)
            for c in other.pins:
                if c.site is not None and (other.mesh_axis, c.name) not in mine | gone:
                    site = site_in(base, c.site)
                    base = drop_pin(base, site, position) if site else base
                    gone.add((other.mesh_axis, c.name))
        return base, gone

    def became(self, program: Program) -> str:
        """The type of the node's result after the edit, as the end of a help's text."""
        if (
            self.fault.sink[0].kind == "region" or self.node.is_batched
        ):  # of many results, or in dims that the user does not see
            return ""
        name = self.names.value(self.node.outputs[0]) if self.node.outputs else ""
        code = program.typing.values.get(self.node.outputs[0]) if self.node.outputs else None
        return (
            f"; {name or 'the result'} becomes"
            f" {decode(Frames(self.names, self.node).result(0, code[self.position]))!r}"
            if code is not None
            else ""
        )

    def policies(self) -> Iterator[Looser]:
        """The policies that allow more than the one that is to blame."""
        found = blamed(self.trials.request, self.fault)
        yield from loosened(self.trials.request, found, self.position) if found else ()

    # ---- changes --------------------------------------------------------------------------------

    def pin_changes(self, base: Request) -> PinChanges:
        """The changes of single pins."""
        own = self.trials.request
        return PinChanges(own, base, self.fault, self.node, self.names, self.system)

    def pairs(self, base: Request) -> PinPairs:
        """The changes of two pins of the fault, or of findings that end in the same place."""
        return PinPairs(
            self.pin_changes(base), (self.fault, *self.trials.faults.others(self.fault))
        )

    def changes(self, base: Request) -> Iterator[Change]:
        """The edits to try: other atoms for a pin, an annotation before the line, a pin dropped."""
        pins = self.pin_changes(base)
        yield from pins.moved()
        if self.inserts:
            made = self.trials.arriving(self.fault).made
            yield from Insertions(
                base, self.fault, made, self.node, self.names, self.system, self.trials.large
            ).changes()
        yield from pins.drops()


def _nested(one: Change, program: Program) -> bool:
    """Whether a pin splits a dim that another mesh axis splits, too, which is seldom meant."""
    each = ([c for c in program.typing.values.get(v, ()) if c > 0] for v in one.pinned)
    return any(len(set(splits)) < len(splits) for splits in each)
