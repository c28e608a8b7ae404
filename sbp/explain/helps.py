"""Helps: edits after which a program without a typing has one.

Each edit is planned before it is offered; the plan gives its price.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sbp.errors import Help
from sbp.explain.edits import drop_pin, move_pin, pinned_value, priced, site_in
from sbp.explain.insertions import Candidate, HelpKind, Insertions, states_of
from sbp.explain.loosening import Looser, blamed, loosened
from sbp.explain.names import Names, behind_vmap
from sbp.explain.repins import carried_text, edits_of
from sbp.explain.trials import Trials
from sbp.infer.check import CheckResult
from sbp.infer.constraints import Constraint, PinSite, System
from sbp.infer.request import Request
from sbp.infer.space import decode
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.plan.text import place
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node

CLEARS_ALL = ", which clears every error"
"""What is added to a help that is tried on the whole program, its other faults in it."""

ChangeKind = Literal["annotation", "new split", "policy"]
"""Changes of which some are not tried in a large program: any change of the annotations, a new
annotation that splits a value, another policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHelps:
    """The helps of a fault, and what the limits on the search left out.

    Arguments:
      helps: the helps that are shown, in the order of `_chosen`.
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
        """Whether annotations before the line of the fault are tried."""
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
        if policies.skips:
            unsearched.append("policy")
        found = [*edits.found, *policies.found]
        shown = _chosen(found, trials.limits.helps, pins=len(self.fault.pins))
        return FoundHelps(
            helps=tuple(f.help for f in shown),
            unshown=len(found) - len(shown),
            untried=edits.untried,
            plans=edits.plans,
            unsearched=tuple(unsearched),
        )

    def by_annotation(self, base: Request, gone: set[tuple[str, str]]) -> _Accepted:
        """Annotations and pins changed, until the plans for this fault are made.

        Arguments:
          base: the program without the pins of its other faults.
          gone: (mesh axis, name) of the constraints of those pins.
        """
        enough, most = self.trials.limits.plans_of(self.trials.size, self.shown)
        found: list[_Found] = []
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
                found.append(_Found(number, help_, one.kind))
                taken.append(one)
        return _Accepted(tuple(found), seen=len(seen), plans=plans, untried=len(untried))

    def by_policy(self, base: Request, number: int) -> _Accepted:
        """Policies that allow more. In a large program the first that gives a typing, and only with
        all faults in the program.

        Arguments:
          base: the program without the pins of its other faults.
          number: of the first policy among the candidates.
        """
        found: list[_Found] = []
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
                found.append(_Found(number + len(found), help_, "policy"))
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
            f"; {name or 'the result'} becomes {decode(code[self.position])!r}"
            if code is not None
            else ""
        )

    def policies(self) -> Iterator[Looser]:
        """The policies that allow more than the one that is to blame."""
        found = blamed(self.trials.request, self.fault)
        yield from loosened(self.trials.request, found, self.position) if found else ()

    # ---- candidates -----------------------------------------------------------------------------

    def candidates(self, base: Request) -> Iterator[Candidate]:
        """The edits to try: a split moved to another dim, an annotation before the line, a pin
        dropped."""
        sites = [(pin, site_in(base, pin.site)) for pin in self.fault.pins if pin.site]
        for pin, site in sites:
            if site is not None:
                yield from self.splits(base, pin, site)
        if self.inserts:
            made = self.trials.arriving(self.fault).made
            yield from Insertions(
                base, self.fault, made, self.node, self.names, self.system, self.trials.large
            ).candidates()
        for pin, site in sites:
            if site is not None:
                yield from self.drops(base, pin, site)

    def drops(self, base: Request, pin: Constraint, site: PinSite) -> Iterator[Candidate]:
        """A pin dropped, or left free on the fault's mesh axis.

        Arguments:
          base: the program without the pins of its other faults.
          pin: the constraint of the pin.
          site: the pin in `base`.
        """
        # The edits are made in the source and the options as they are, not as they are in `base`.
        request, k, axis = self.trials.request, self.position, self.fault.mesh_axis
        name, where, kept = self.names.site(site), self.where(site), carried_text(request, site)
        several = sum(c is not None for c in site.codes) > 1
        smaller: Candidate | None = None
        if several or not site.span:
            note = "" if site.span else f' ("{axis}:?"){kept}'
            smaller = Candidate(
                text=f"leave {name} free on `{axis}` {where}{note}",
                edits=edits_of(request, site, k),
                make=functools.partial(drop_pin, base, site, k),
                without=frozenset({(axis, pin.name)}),
            )
            if smaller.edits:
                yield smaller
        if several or site.span:
            text = (
                f"drop `{source_text(site.span)}` {where}"
                if site.span
                else f"leave {name} free {where}{kept}"
            )
            edits = edits_of(request, site)
            if edits:
                yield Candidate(
                    text=text,
                    edits=edits,
                    make=functools.partial(drop_pin, base, site),
                    without=frozenset((a, pin.name) for a in base.mesh.names),
                    instead=smaller,
                )

    def splits(self, base: Request, pin: Constraint, site: PinSite) -> Iterator[Candidate]:
        """A split moved to each other dim that divides. Dims of `jax.vmap`, which the user does not
        see, are left out.

        Arguments:
          base: the program without the pins of its other faults.
          pin: the constraint of the pin.
          site: the pin in `base`.
        """
        request, k, where = self.trials.request, self.position, self.where(site)
        behind = behind_vmap(site, pin.code)
        if pin.code <= 0 or behind is None:
            return
        name, kept = self.names.site(site), carried_text(request, site)
        twin = (
            site.span is not None
            and sum(self.names.site(c.site) == name for c in self.twins(site) if c.site) > 1
        )
        for dim, size in enumerate(base.graph.aval(pinned_value(base.graph, site)).shape):
            if not behind <= dim != pin.code - 1 or size % base.mesh.sizes[k]:
                continue
            states, shown = states_of(self.system, pin.fixed[0], 1 + dim), dim - behind
            text = (
                f"in `{source_text(site.span)}` split dim {shown} {where}"
                if twin
                else f"split {name} on dim {shown} {where}{kept}"
            )
            edits = edits_of(request, site, k, 1 + dim) if states else ()
            if edits:
                yield Candidate(
                    text=text,
                    edits=edits,
                    make=functools.partial(move_pin, base, site, k, 1 + dim),
                    without=frozenset({(self.fault.mesh_axis, pin.name)}),
                    assumed=states,
                    kind="pin",
                )

    def twins(self, site: PinSite) -> list[Constraint]:
        """The fault's pins on the line of one of them."""
        lines = [(c, c.site.span) for c in self.fault.pins if c.site]
        return [
            c
            for c, span in lines
            if span and site.span and (span.file, span.line) == (site.span.file, site.span.line)
        ]

    def where(self, site: PinSite) -> str:
        """The place of a pin, with its file when that is another one."""
        if site.span is None:
            return "in in_types" if site.is_input else "in out_types"
        line = users_span(self.node)
        here = line is None or line.file == site.span.file
        texts = [source_text(c.site.span) for c in self.twins(site) if c.site]
        column = f", column {site.span.column}" if len(set(texts)) < len(texts) else ""
        return f"at line {site.span.line}{column}" if here else f"at {place(site.span)}{column}"


@dataclass(frozen=True, slots=True)
class _Found:
    """An accepted help.

    Arguments:
      number: its position among the candidates, to break ties.
      help: the help.
      kind: what it changes.
    """

    number: int
    help: Help
    kind: HelpKind


@dataclass(frozen=True, slots=True)
class _Accepted:
    """The result of one search for helps.

    Arguments:
      found: the accepted helps.
      seen: the number of candidates that were looked at.
      plans: the number of plans made.
      untried: the number of candidates left when no more plans were made.
      skips: whether policies were left out because the program is large.
    """

    found: tuple[_Found, ...] = ()
    seen: int = 0
    plans: int = 0
    untried: int = 0
    skips: bool = False


_MEANT = ("pin", "conversion", "other pin", "drop", "policy")
"""Kinds of helps, the likeliest first; "other pin" is another atom for a pin that is not odd."""


def _chosen(found: Sequence[_Found], most: int, pins: int) -> list[_Found]:
    """The helps that are shown, what was probably meant first: another atom for the pin that is
    odd, a conversion before the line, a pin dropped, another policy; helps of one kind by their
    bytes. The first of each kind are shown before the second of any.

    A pin is odd where it stands against others, and another atom makes the plan no dearer than a
    conversion does: the other pins agree with that atom.

    Arguments:
      found: the accepted helps.
      most: how many are shown.
      pins: the number of pins that are to blame.
    """
    conversions = (f.help.bytes_per_device for f in found if f.kind == "conversion")
    conversion = min(conversions, default=math.inf)

    def rank(f: _Found) -> tuple[int, float, int]:
        odd = pins > 1 and f.help.bytes_per_device <= conversion
        kind = "other pin" if f.kind == "pin" and not odd else f.kind
        return _MEANT.index(kind), f.help.bytes_per_device, f.number

    ranked = sorted(found, key=rank)
    first = list({rank(f)[0]: f for f in reversed(ranked)}.values())
    chosen = [*sorted(first, key=rank), *(f for f in ranked if f not in first)][:most]
    return sorted(chosen, key=rank)
