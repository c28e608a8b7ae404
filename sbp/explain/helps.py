"""Helps: edits that give a program without a typing one, each tried and priced by solving again."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.errors import Help
from sbp.explain.edits import drop_pin, in_gradient, move_pin, pinned_value, priced, site_in
from sbp.explain.insertions import Candidate, Insertions, states_of
from sbp.explain.loosening import Looser, blamed, loosened
from sbp.explain.names import Names, behind_vmap
from sbp.explain.repins import edits_of
from sbp.infer.check import Checker, CheckResult
from sbp.infer.constraints import Constraint, PinSite, System
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.plan.fit import best_program
from sbp.plan.program import Program
from sbp.plan.text import place
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node

MAX_HELPS = 3

LARGE = 1000
"""Nodes above which a plan takes a second or more, and few are made."""

HUGE = 3000
"""Nodes above which the one plan of another policy, that serves all faults, comes before any
edit."""

PLANS, PLANS_LARGE, NODES_PLANNED = 12, 3, 6000
"""Plans made for one fault: so many; in large programs at most so many, and of all faults so many
nodes, but one help each."""


CLEARS_ALL = ", which clears every error"
"""What is added to a help that is tried on the whole program, its other faults in it."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """What comes to the operands of a line: all findings that end there on one mesh axis, as
    one."""

    parts: tuple[CheckResult, ...]

    @property
    def sink(self) -> tuple[Constraint, ...]:
        """The conversions at which they end."""
        return tuple(c for part in self.parts for c in part.sink)

    @property
    def made(self) -> dict[int, tuple[Code, ...]]:
        """For each operand the codes that it can be made in."""
        return {
            c.operand: codes
            for part in self.parts
            for c, codes in zip(part.sink, part.made, strict=True)
        }


@dataclass(slots=True)
class Trials:
    """A program without a typing, and what has been tried on it.

    A plan of a large program takes seconds. So every edit is first put to the constraints at hand,
    as literals left out and states assumed, which builds nothing; that answer may be a wrong yes,
    so a plan is then made, which gives the price.

    Arguments:
      request: the program, and what its types are chosen by.
      checker: its constraints.
      faults: all that were found in it.
      same: for each of them what else was found to end in the same place: other pins, or the same
          on another axis.
    """

    request: Request
    checker: Checker
    faults: Sequence[CheckResult]
    same: Sequence[Sequence[CheckResult]] = ()
    size: int = 0
    by_policy: dict[Any, Program | None] = field(default_factory=dict)
    answers: dict[Any, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = self.request.size

    def arriving(self, fault: CheckResult) -> Arriving:
        """A fault with what else was found of other operands of its node."""
        parts, seen = [fault], {c.operand for c in fault.sink}
        for other in next(
            (same for f, same in zip(self.faults, self.same, strict=True) if f is fault), ()
        ):
            mine = other.mesh_axis == fault.mesh_axis and len(fault.sink) == len(other.sink) == 1
            if (
                mine
                and other.sink[0].node is fault.sink[0].node
                and other.sink[0].operand not in seen
            ):
                parts.append(other)
                seen.add(other.sink[0].operand)
        return Arriving(tuple(parts))

    def system(self, mesh_axis: str) -> System:
        """The constraints of a mesh axis."""
        return next(s for s in self.checker.systems if s.mesh_axis == mesh_axis)

    @property
    def large(self) -> bool:
        """Whether plans are few."""
        return self.size > LARGE

    def plans(self, shown: int) -> tuple[int, int]:
        """For one of so many faults: how many plans are made, and how many when none of these gives
        a typing."""
        if not self.large:
            return PLANS, PLANS
        return min(PLANS_LARGE, max(1, NODES_PLANNED // (self.size * shown))), PLANS_LARGE

    def may_hold(
        self, mesh_axis: str, without: set[tuple[str, str]], assumed: Sequence[str]
    ) -> bool:
        """Whether the constraints of every axis can hold; those of one also in one of the assumed
        states."""
        for system in self.checker.systems:
            mine = frozenset(name for axis, name in without if axis == system.mesh_axis)
            states = tuple(assumed) if system.mesh_axis == mesh_axis else ()
            if not any(self._axis_may_hold(system, mine, state) for state in states or ("",)):
                return False
        return True

    def _axis_may_hold(self, system: System, without: frozenset[str], state: str) -> bool:
        key = system.mesh_axis, without, state
        if key not in self.answers:
            names = [c.name for c in system.constraints if c.name not in without]
            self.answers[key] = (
                self.checker.axis(system).check([*names, state] if state else names)[0] != "unsat"
            )
        return self.answers[key]

    def policy(self, looser: Looser) -> Program | None:
        """The plan under another policy, the same for all faults."""
        if looser.key not in self.by_policy:
            request = looser.make(self.request)
            free = all(p == "auto" for p in request.strictest.policies)
            hopeless = not free and Checker(request).check(explain=False).status == "unsat"
            self.by_policy[looser.key] = None if hopeless else best_program(request)
        return self.by_policy[looser.key]


@dataclass(frozen=True, slots=True)
class Repair:
    """Looks for the helps of one fault.

    Arguments:
      trials: the program.
      fault: what is wrong.
      node: where it shows.
      names: of the program's values.
      shown: how many faults are told.
    """

    trials: Trials
    fault: CheckResult
    node: Node
    names: Names
    shown: int

    @property
    def position(self) -> int:
        """Of the fault's mesh axis."""
        return self.trials.request.mesh.names.index(self.fault.mesh_axis)

    @property
    def system(self) -> System:
        """The constraints of the fault's mesh axis."""
        return self.trials.system(self.fault.mesh_axis)

    def helps(self) -> tuple[Help, ...]:
        """Edits that give the program a typing, cheapest first; the other faults' pins are out of
        the way."""
        base, gone = self.base()
        enough, most = self.trials.plans(self.shown)
        found: list[_Found] = []
        told: set[str] = set()
        taken: list[Candidate] = []
        whole = len(self.trials.faults) == 1
        made = 0
        if self.trials.size > HUGE:
            found = self.by_policy(base, 0)
        for number, one in enumerate(self.candidates(base) if not found else ()):
            if one.text in told or one.instead in taken or made >= (enough if found else most):
                continue
            told.add(one.text)
            if not self.trials.may_hold(self.fault.mesh_axis, gone | one.without, one.assumed):
                continue
            made += 1
            program = best_program(one.make())
            if program is not None:
                text = one.text + self.became(program)
                help_ = priced(text, one.edits, program, clears_all_errors=whole)
                found.append(_Found(number, help_, one.inserts))
                taken.append(one)
        if self.trials.size <= HUGE and (not found or not self.trials.large):
            found += self.by_policy(base, len(told))
        return tuple(f.help for f in _chosen(found))

    def by_policy(self, base: Request, number: int) -> list[_Found]:
        """Policies that allow more; in a large program the first that does."""
        found: list[_Found] = []
        several, wide = len(self.trials.faults) > 1, False
        for looser in self.policies():
            if found and (self.trials.large or looser.wide > wide):
                break
            program, whole = self.trials.policy(looser), True
            if program is None and several and not self.trials.large:
                program, whole = best_program(looser.make(base)), False
            if program is not None:
                text = looser.text + (CLEARS_ALL if several and whole else "")
                help_ = priced(text, looser.edits, program, clears_all_errors=whole)
                found.append(_Found(number + len(found), help_))
                wide = looser.wide
        return found

    def base(self) -> tuple[Request, set[tuple[str, str]]]:
        """The program without what is to blame for its other faults, and the names of those
        constraints."""
        base, gone = self.trials.request, set[tuple[str, str]]()
        whole = next(
            same
            for f, same in zip(self.trials.faults, self.trials.same, strict=True)
            if f is self.fault
        )
        mine = {(r.mesh_axis, c.name) for r in (self.fault, *whole) for c in r.pins}
        others = [
            r
            for f, same in zip(self.trials.faults, self.trials.same, strict=True)
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
        """What the node's result is after the edit."""
        if (
            self.fault.sink[0].kind == "region" or "vmap(" in self.node.scope
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
        """The policy that is to blame, of the program, of the mesh axis or of a region, as ones
        that allow more."""
        found = blamed(self.trials.request, self.fault)
        yield from loosened(self.trials.request, found, self.position) if found else ()

    # ---- candidates -----------------------------------------------------------------------------

    def candidates(self, base: Request) -> Iterator[Candidate]:
        """One operand of the line brought to a row, a split moved to another dim, a pin dropped."""
        if users_span(self.node) and not in_gradient(self.node):
            made = self.trials.arriving(self.fault).made
            yield from Insertions(
                base, self.fault, made, self.node, self.names, self.system, self.trials.large
            ).candidates()
        for pin in self.fault.pins:
            site = site_in(base, pin.site) if pin.site else None
            if site is not None:
                yield from self.moves(base, pin, site)

    def moves(self, base: Request, pin: Constraint, site: PinSite) -> Iterator[Candidate]:
        """A pin moved to another dim, or dropped."""
        k, axis, where = self.position, self.fault.mesh_axis, self.where(site)
        name = self.names.site(site)
        twin = (
            site.span is not None
            and sum(self.names.site(c.site) == name for c in self.twins(site) if c.site) > 1
        )
        shape = base.graph.aval(pinned_value(base.graph, site)).shape
        behind = behind_vmap(site, pin.code)
        for dim, size in enumerate(shape if pin.code > 0 else ()):
            if (
                behind is not None
                and behind <= dim != pin.code - 1
                and size % base.mesh.sizes[k] == 0
            ):
                states, shown = states_of(self.system, pin.fixed[0], 1 + dim), dim - behind
                text = (
                    f"in `{source_text(site.span)}` split dim {shown} {where}"
                    if twin
                    else f"split {name} on dim {shown} {where}"
                )
                edits = edits_of(base, site, k, 1 + dim) if states else ()
                if edits:
                    yield Candidate(
                        text=text,
                        edits=edits,
                        make=functools.partial(move_pin, base, site, k, 1 + dim),
                        without=frozenset({(axis, pin.name)}),
                        assumed=states,
                    )
        several = sum(c is not None for c in site.codes) > 1
        smaller: Candidate | None = None
        if several or site.source != "annotation":
            note = "" if site.source == "annotation" else f' ("{axis}:?")'
            smaller = Candidate(
                text=f"leave {name} free on `{axis}` {where}{note}",
                edits=edits_of(base, site, k),
                make=functools.partial(drop_pin, base, site, k),
                without=frozenset({(axis, pin.name)}),
            )
            if smaller.edits:
                yield smaller
        if several or site.source == "annotation":
            text = (
                f"drop `{source_text(site.span)}` {where}"
                if site.span
                else f"leave {name} free {where}"
            )
            edits = edits_of(base, site)
            if edits:
                yield Candidate(
                    text=text,
                    edits=edits,
                    make=functools.partial(drop_pin, base, site),
                    without=frozenset((a, pin.name) for a in base.mesh.names),
                    instead=smaller,
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
            return "in in_types" if site.source == "input" else "in out_types"
        line = users_span(self.node)
        here = line is None or line.file == site.span.file
        texts = [source_text(c.site.span) for c in self.twins(site) if c.site]
        column = f", column {site.span.column}" if len(set(texts)) < len(texts) else ""
        return f"at line {site.span.line}{column}" if here else f"at {place(site.span)}{column}"


@dataclass(frozen=True, slots=True)
class _Found:
    """A help that was accepted: its number among the candidates, and whether it is an annotation
    more."""

    number: int
    help: Help
    inserts: bool = False


def _chosen(found: Sequence[_Found]) -> list[_Found]:
    """The cheapest helps, cheapest first; if there is one that leaves all pins as they are, one of
    that kind among them."""
    ranked = sorted(found, key=lambda f: (f.help.bytes_per_device, f.number))
    inserted = [f for f in ranked if f.inserts]
    if inserted and inserted[0] not in ranked[:MAX_HELPS]:
        ranked[MAX_HELPS - 1] = inserted[0]
    return ranked[:MAX_HELPS]
