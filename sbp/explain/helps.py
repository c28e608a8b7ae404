"""Helps: edits after which a program without a typing has one.

Each edit is planned before it is offered; the plan gives its price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sbp.errors import Help
from sbp.explain.change import Accepted, BlamedFault, Change, HelpKind, Tried, priced, tried
from sbp.explain.costly import DEARER
from sbp.explain.edits import drop_pin, site_in
from sbp.explain.insertions import Insertions, Looser, blamed, loosened
from sbp.explain.names import Frames
from sbp.explain.pin_changes import PinChanges
from sbp.infer.request import Request
from sbp.infer.space import decode
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.source.reader import users_span
from sbp.trace.graph import Node

# ---- order --------------------------------------------------------------------------------------
# The order of helps: what was probably meant comes first.


@dataclass(frozen=True, slots=True)
class RankedHelp:
    """An accepted help.

    Arguments:
      help: the help.
      kind: what it changes.
      seconds: the modelled seconds of the plan after it.
    """

    help: Help
    kind: HelpKind
    seconds: float


RankedKind = Literal[HelpKind, "dear pin"]
"""A kind of help as it is ranked. "dear pin": an atom for which the plan takes much longer than
without the pin, such as a weight that is B where it may be split."""

_MEANT: tuple[RankedKind, ...] = (
    *("pin", "conversion", "other pin", "drop", "dear pin", "policy", "pair"),
)
"""Kinds of helps, the likeliest first."""

_PLACES = {"pin": "pin", "conversion": "line", "policy": "policy"}
"""What a kind of help changes; the others give up a pin or its kind of atom. The first help of each
place is shown before the second of any."""


def chosen(found: Sequence[RankedHelp], most: int) -> list[RankedHelp]:
    """The helps that are shown, what was probably meant first: a split of another dim for a pin
    that is odd, a conversion before the line, another atom for a pin, a pin dropped, another
    policy; helps of one kind by their bytes. The first of each of `_PLACES` are shown before the
    second of any. A change of two pins of which one gives up its split comes last, and is shown
    where there is room.

    A pin is odd where another split makes the plan no dearer than a conversion does: the rest of
    the program agrees with that split. A pin that loses its split is odd where the plan is as dear
    as with a conversion, which then takes back what the pin does.

    Arguments:
      found: the accepted helps, in the order in which they were tried.
      most: how many are shown.
    """

    def least(kind: HelpKind) -> tuple[float, float]:
        of = [f for f in found if f.kind == kind]
        bytes_ = min((f.help.bytes_per_device for f in of), default=math.inf)
        return bytes_, min((f.seconds for f in of), default=math.inf)

    conversion, converted = least("conversion")
    _, dropped = least("drop")

    def kind(f: RankedHelp) -> RankedKind:
        if f.kind == "pin" and f.help.bytes_per_device <= conversion:
            return "pin"
        if f.kind == "other pin" and f.help.bytes_per_device == conversion:
            return "pin" if f.seconds <= converted else "other pin"
        dear = f.kind == "other pin" and dropped <= DEARER * f.seconds
        return "dear pin" if dear else "other pin" if f.kind == "pin" else f.kind

    def rank(f: RankedHelp) -> tuple[int, float]:
        return _MEANT.index(kind(f)), f.help.bytes_per_device

    ranked = sorted(found, key=rank)
    single = (f for f in reversed(ranked) if kind(f) != "pair")
    first = list({_PLACES.get(kind(f), "given up"): f for f in single}.values())
    shown = [*sorted(first, key=rank), *(f for f in ranked if f not in first)][:most]
    return sorted(shown, key=rank)


# ---- helps --------------------------------------------------------------------------------------


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
      fault: the fault.
      node: the node at which it shows.
    """

    fault: BlamedFault
    node: Node

    @property
    def inserts(self) -> bool:
        """Whether annotations before the line of the fault are tried. Budgets hold there, too."""
        if self.fault.found.budgets:
            return False
        return users_span(self.node) is not None and not self.node.in_gradient

    def found(self) -> FoundHelps:
        """Edits that give the program a typing. The pins that are to blame for its other faults are
        left out of the program."""
        trials = self.fault.trials
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
            elif len(self.pin_changes(base).pins) > 1:
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
        more, whole = self.became(program), not self.fault.trials.several
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
        enough, most = self.fault.trials.limits.plans_of(self.fault.trials.size, self.fault.shown)
        axis, may_hold = self.fault.found.mesh_axis, self.fault.trials.may_hold
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
        changes = self.pin_changes(base).pairs(gone)
        return tried(changes, plans=self.fault.trials.limits.pair_plans)

    def by_policy(self, base: Request) -> tuple[list[RankedHelp], bool]:
        """Policies that allow more, and whether some were left out because the program is large. In
        a large program the first that gives a typing, and only with all faults in the program.

        Arguments:
          base: the program without the pins of its other faults.
        """
        found: list[RankedHelp] = []
        large, several = self.fault.trials.large, self.fault.trials.several
        wide = skips = False
        for looser in self.policies():
            if found and (large or looser.wide > wide):
                return found, skips or large
            program, whole = self.fault.trials.policy(looser), True
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
        base, gone = self.fault.trials.request, set[tuple[str, str]]()
        faults = self.fault.trials.faults
        own = (self.fault.found, *faults.others(self.fault.found))
        mine = {(r.mesh_axis, c.name) for r in own for c in r.pins}
        others = [r for group in faults.groups if group[0] is not self.fault.found for r in group]
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
            self.fault.found.sink[0].kind == "region" or self.node.is_batched
        ):  # of many results, or in dims that the user does not see
            return ""
        name = self.fault.names.value(self.node.outputs[0]) if self.node.outputs else ""
        code = program.typing.values.get(self.node.outputs[0]) if self.node.outputs else None
        return (
            f"; {name or 'the result'} becomes"
            f" {decode(Frames(self.fault.names, self.node).result(0, code[self.fault.position]))!r}"
            if code is not None
            else ""
        )

    def policies(self) -> Iterator[Looser]:
        """The policies that allow more than the one that is to blame."""
        found = blamed(self.fault.trials.request, self.fault.found)
        yield from loosened(self.fault.trials.request, found, self.fault.position) if found else ()

    # ---- changes --------------------------------------------------------------------------------

    def pin_changes(self, base: Request) -> PinChanges:
        """The changes of single pins."""
        return PinChanges(self.fault, base, self.node)

    def changes(self, base: Request) -> Iterator[Change]:
        """The edits to try: other atoms for a pin, an annotation before the line, a pin dropped."""
        pins = self.pin_changes(base)
        yield from pins.moved()
        if self.inserts:
            yield from Insertions(self.fault, base, self.node).changes()
        yield from pins.drops()


def _nested(one: Change, program: Program) -> bool:
    """Whether a pin splits a dim that another mesh axis splits, too, which is seldom meant."""
    each = ([c for c in program.typing.values.get(v, ()) if c > 0] for v in one.pinned)
    return any(len(set(splits)) < len(splits) for splits in each)
