"""Helps that change two pins together, for faults that no change of one pin mends."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass

from sbp.errors import Edit, OptionEdit, SourceEdit, Span
from sbp.explain.change import Change
from sbp.explain.pin_changes import PinChanges, all_moved
from sbp.explain.repins import carried_text
from sbp.explain.trials import Trials
from sbp.infer.check import CheckResult
from sbp.infer.constraints import Constraint, PinSite
from sbp.infer.space import Code


@dataclass(frozen=True, slots=True)
class PinChange:
    """Another code for one pin.

    Arguments:
      pin: the constraint of the pin.
      site: the pin in the program without its other faults.
      code: the code that it asks.
      change: the change of this pin without the other one.
    """

    pin: Constraint
    site: PinSite
    code: Code
    change: Change


@dataclass(frozen=True, slots=True)
class PinPairs:
    """Changes of two pins that are to blame.

    Arguments:
      changes: the changes of single pins.
      findings: the fault, and the findings that end in the same place. Their pins can make up two
          sides, such as the terms of two sums that are multiplied.
    """

    changes: PinChanges
    findings: tuple[CheckResult, ...]

    @property
    def pins(self) -> list[tuple[Constraint, PinSite]]:
        """The pins to blame on the fault's mesh axis, as they are in `base`."""
        axis = self.changes.fault.mesh_axis
        mine = {c.name: c for f in self.findings if f.mesh_axis == axis for c in f.pins}
        return self.changes.sites_of(mine.values())

    def changes_of_two(self, trials: Trials, gone: Set[tuple[str, str]]) -> Iterator[Change]:
        """The changes of two pins that the constraints allow: those to two splits first, since they
        keep the least memory.

        Arguments:
          trials: the program.
          gone: (mesh axis, name) of the constraints that are left out.
        """
        axis = self.changes.fault.mesh_axis
        pairs = [
            (one, two)
            for a, b in itertools.combinations(map(self._changes_of, self.pins), 2)
            if a and b and trials.may_hold(axis, gone | _without(a[0], b[0]))
            for one, two in itertools.product(a, b)
        ]
        for one, two in sorted(pairs, key=lambda p: sum(c.code <= 0 for c in p)):
            states = one.change.assumed, two.change.assumed
            if trials.may_hold(axis, gone | _without(one, two), *states):
                pair = self._pair(one, two)
                if not _overlap(pair.edits):
                    yield pair

    def _changes_of(self, pinned: tuple[Constraint, PinSite]) -> list[PinChange]:
        pin, site = pinned
        each = ((c, self.changes.repinned(pin, site, c)) for c in self.changes.codes(pin, site))
        return [PinChange(pin, site, c, one) for c, one in each if one is not None]

    def _pair(self, one: PinChange, two: PinChange) -> Change:
        words, again = (self.changes.words(c.pin, c.site, c.code) for c in (one, two))
        second = again[1] if again[0] == words[0] else " ".join(again)
        kept = carried_text(self.changes.request, one.site, two.site)
        changes = [(c.site, c.code) for c in (one, two)]
        splits = all(c.change.kind == "pin" for c in (one, two))
        edits = dict.fromkeys((*_edits(one, two), *_edits(two, one)))
        return Change(
            text=f"{' '.join(words)} and {second}{kept}",
            edits=tuple(edits),
            make=functools.partial(
                all_moved, self.changes.base, changes, self.changes.system.position
            ),
            without=_without(one, two),
            kind="pin" if splits else "pair",
            pinned=(*one.change.pinned, *two.change.pinned),
        )


def _without(one: PinChange, two: PinChange) -> frozenset[tuple[str, str]]:
    return one.change.without | two.change.without


def _edits(change: PinChange, other: PinChange) -> list[Edit]:
    """The edits of a change. An input whose type comes from its argument is edited together with
    the types of the other inputs; the other change gives its own."""
    given = other.site.position if other.site.is_input else None

    def is_given(e: Edit) -> bool:
        return isinstance(e, OptionEdit) and e.option == "in_types" and e.position == given

    return [e for e in change.change.edits if given is None or not is_given(e)]


def _overlap(edits: tuple[Edit, ...]) -> bool:
    """Whether two edits change the same piece of the source, as those of nested annotations do."""
    spans = [e.span for e in edits if isinstance(e, SourceEdit)]
    return any(
        a.file == b.file and _start(a) < _end(b) and _start(b) < _end(a)
        for a, b in itertools.combinations(spans, 2)
    )


def _start(span: Span) -> tuple[int, int]:
    return span.line, span.column


def _end(span: Span) -> tuple[int, int]:
    return span.end_line or span.line, span.end_column
