"""Helps: edits after which a program without a typing has one.

Each edit is planned before it is offered; the plan gives its price.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sbp.errors import Help
from sbp.explain.edits import drop_pin, priced, site_in
from sbp.explain.frames import Frames
from sbp.explain.insertions import Candidate, Insertions
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
        policies = self.by_policy(base, 0) if trials.huge else _Accepted()
        edits = _Accepted() if policies.found else self.by_annotation(base, gone)
        if not trials.huge:
            if trials.large and edits.found:
                policies = _Accepted(skips=next(self.policies(), None) is not None)
            else:
                policies = self.by_policy(base, edits.seen)
        unsearched: list[ChangeKind] = []
        if trials.huge and policies.found:
            unsearched.append("annotation")
        elif trials.large and self.inserts:
            unsearched.append("new split")
        pairs = _Accepted()
        if not any(f.kind in _OF_ONE_PIN for f in edits.found) and "annotation" not in unsearched:
            pairs = self.by_pairs(base, gone, edits.seen)
        if pairs.skips:
            unsearched.append("pair")
        if policies.skips:
            unsearched.append("policy")
        found = [*edits.found, *pairs.found, *policies.found]
        shown = chosen(found, trials.limits.helps)
        return FoundHelps(
            helps=tuple(f.help for f in shown),
            unshown=len(found) - len(shown),
            untried=edits.untried + pairs.untried,
            plans=edits.plans + pairs.plans,
            unsearched=tuple(unsearched),
        )

    def by_annotation(self, base: Request, gone: set[tuple[str, str]]) -> _Accepted:
        """Annotations and pins changed, until the plans for this fault are made.

        Arguments:
          base: the program without the pins of its other faults.
          gone: (mesh axis, name) of the constraints of those pins.
        """
        enough, most = self.trials.limits.plans_of(self.trials.size, self.shown)
        found: list[RankedHelp] = []
        seen: set[str] = set()
        taken: list[Candidate] = []
        untried: set[str] = set()
        plans = 0
        for number, one in enumerate(self.candidates(base)):
            if one.text in seen or one.instead in taken:
                continue
            if plans >= (enough if found else most):
                untried.add(one.text)
                continue
            seen.add(one.text)
            if not self.trials.may_hold(self.fault.mesh_axis, gone | one.without, one.assumed):
                continue
            request = one.make()
            if request is None:
                continue
            plans += 1
            program = best_program(request)
            if program is not None:
                text = one.text + self.became(program)
                whole = not self.trials.several
                help_ = priced(text, one.edits, program, clears_all_errors=whole)
                found.append(_ranked(number, one, help_, program))
                taken.append(one)
        return _Accepted(tuple(found), seen=len(seen), plans=plans, untried=len(untried))

    def by_pairs(self, base: Request, gone: set[tuple[str, str]], number: int) -> _Accepted:
        """Changes of two pins, where no change of one gives a typing: one help for two pins. In a
        large program none.

        Arguments:
          base: the program without the pins of its other faults.
          gone: (mesh axis, name) of the constraints of those pins.
          number: of the first pair among the candidates.
        """
        pairs = self.pairs(base)
        if self.trials.large:
            return _Accepted(skips=len(pairs.pins) > 1)
        found: list[RankedHelp] = []
        mended = set[tuple[int, ...]]()
        plans = untried = 0
        for one in pairs.candidates(self.trials, gone):
            if one.pinned in mended:
                continue
            if plans >= self.trials.limits.pair_plans:
                untried += 1
                continue
            request = one.make()
            program = best_program(request) if request else None
            plans += request is not None
            if program is not None:
                text, whole = one.text + self.became(program), not self.trials.several
                help_ = priced(text, one.edits, program, clears_all_errors=whole)
                found.append(_ranked(number + len(found), one, help_, program))
                mended.add(one.pinned)
        return _Accepted(tuple(found), plans=plans, untried=untried)

    def by_policy(self, base: Request, number: int) -> _Accepted:
        """Policies that allow more. In a large program the first that gives a typing, and only with
        all faults in the program.

        Arguments:
          base: the program without the pins of its other faults.
          number: of the first policy among the candidates.
        """
        found: list[RankedHelp] = []
        large, several = self.trials.large, self.trials.several
        wide = skips = False
        for looser in self.policies():
            if found and (large or looser.wide > wide):
                skips = skips or large
                break
            program, whole = self.trials.policy(looser), True
            if program is None and several:
                skips = skips or large
                program, whole = None if large else best_program(looser.make(base)), False
            if program is not None:
                text = looser.text + (CLEARS_ALL if several and whole else "")
                help_ = priced(text, looser.edits, program, clears_all_errors=whole)
                last, seconds = number + len(found), program.cost.seconds
                found.append(RankedHelp(last, help_, "policy", seconds))
                wide = looser.wide
        return _Accepted(tuple(found), skips=skips)

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

    # ---- candidates -----------------------------------------------------------------------------

    def changes(self, base: Request) -> PinChanges:
        """The changes of single pins."""
        own = self.trials.request
        return PinChanges(own, base, self.fault, self.node, self.names, self.system)

    def pairs(self, base: Request) -> PinPairs:
        """The changes of two pins of the fault, or of findings that end in the same place."""
        return PinPairs(self.changes(base), (self.fault, *self.trials.faults.others(self.fault)))

    def candidates(self, base: Request) -> Iterator[Candidate]:
        """The edits to try: other atoms for a pin, an annotation before the line, a pin dropped."""
        pins = self.changes(base)
        yield from pins.moved()
        if self.inserts:
            made = self.trials.arriving(self.fault).made
            yield from Insertions(
                base, self.fault, made, self.node, self.names, self.system, self.trials.large
            ).candidates()
        yield from pins.drops()


def _nested(one: Candidate, program: Program) -> bool:
    """Whether a pin splits a dim that another mesh axis splits, too, which is seldom meant."""
    each = ([c for c in program.typing.values.get(v, ()) if c > 0] for v in one.pinned)
    return any(len(set(splits)) < len(splits) for splits in each)


def _ranked(number: int, one: Candidate, help_: Help, program: Program) -> RankedHelp:
    """An accepted change of the annotations."""
    weaker = "pair" if len(one.pinned) > 1 else "other pin"
    kind = weaker if one.kind == "pin" and _nested(one, program) else one.kind
    return RankedHelp(number, help_, kind, program.cost.seconds)


@dataclass(frozen=True, slots=True)
class _Accepted:
    """The result of one search for helps.

    Arguments:
      found: the accepted helps.
      seen: the number of candidates that were looked at.
      plans: the number of plans made.
      untried: the number of candidates left when no more plans were made.
      skips: whether changes were left out because the program is large.
    """

    found: tuple[RankedHelp, ...] = ()
    seen: int = 0
    plans: int = 0
    untried: int = 0
    skips: bool = False
