"""Programs that have a typing on each mesh axis, but not on all axes together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.errors import Diagnostic, Help, Label
from sbp.explain.change import Change, tried
from sbp.explain.edits import drop_pin, pinned_value
from sbp.explain.fault_notes import more_text, unshown_text
from sbp.explain.limits import DiagnosisLimits
from sbp.explain.names import Names, pinned_text
from sbp.explain.pin_changes import dropped, repinned
from sbp.infer.choose import choose
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.limits import boxing_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ConflictingPins:
    """The pins that have no typing together.

    Arguments:
      shown: the pins that are shown, and for which a help is looked for.
      unshown: the number of other pins.
      is_minimal: whether pins that the conflict does not need were sorted out. Otherwise these are
        all pins of the program.
    """

    shown: tuple[PinSite, ...]
    unshown: int
    is_minimal: bool


def no_typing_together(request: Request, limits: DiagnosisLimits) -> Diagnostic:
    """The diagnostic when no single mesh axis is to blame: which pins have no typing together, and
    the plans without one of them.

    Arguments:
      request: a program without a plan.
      limits: on the work and on what is shown.
    """
    pins = _conflicting_pins(request, limits)
    labels, notes = _pin_labels(request, pins.shown)
    if sum(n > 1 for n in request.mesh.sizes) < 2:
        # One axis: the checker has decided the whole program, and says that there is a typing.
        title = (
            "no typing was found, though no two constraints are in conflict; this is a limit of the"
            " chooser, please report it"
        )
        return Diagnostic(
            code="no-typing",
            severity="error",
            title=title,
            labels=tuple(labels),
            notes=(*notes, *_limit_notes(request, pins)),
        )
    axes = ", ".join(f"`{a}`" for a in request.mesh.names)
    policies = boxing_text(request.boxing, request.axis_policies, request.mesh.names)
    why = (
        f"each axis alone has one under {policies}; together, a dim may be too short for all of"
        " them, and an outer axis cannot split a dim that an inner one already splits"
    )
    found, untried = _helps(request, pins.shown, limits)
    helps = sorted(found, key=lambda h: h.bytes_per_device)
    limited = [*_limit_notes(request, pins)]
    if len(helps) > limits.helps:
        limited.append(unshown_text(len(helps) - limits.helps))
    if untried:
        large = f": {_size(request)}" if request.size > limits.large else ""
        limited.append(f"{more_text(untried, 'change')} not tried{large}")
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"the program has no typing on the mesh axes {axes} together",
        labels=tuple(labels),
        notes=(*notes, why, *limited),
        helps=tuple(helps[: limits.helps]),
    )


def _size(request: Request) -> str:
    return f"the program has {request.size:,} operations"


def _limit_notes(request: Request, pins: ConflictingPins) -> Iterator[str]:
    """Notes about pins that limits left out."""
    if not pins.is_minimal:
        yield f"not all of these pins need be part of the conflict: {_size(request)}"
    if pins.unshown:
        yield f"{more_text(pins.unshown, 'pin')} {'are' if pins.unshown > 1 else 'is'} not shown"


def _conflicting_pins(request: Request, limits: DiagnosisLimits) -> ConflictingPins:
    """The pins that have no typing together. In a large program these are all pins; in a small one,
    pins that the conflict does not need are sorted out."""
    sites = pin_sites(request)
    needed = list(sites)
    is_minimal = len(sites) * request.size <= limits.pin_trials
    if is_minimal:
        for site in reversed(sites):
            others = [s for s in sites if s not in needed or s is site]
            if choose(functools.reduce(drop_pin, others, request)) is None:
                needed.remove(site)
    return ConflictingPins(
        shown=tuple(needed[: limits.pins]),
        unshown=max(0, len(needed) - limits.pins),
        is_minimal=is_minimal,
    )


def _pin_labels(request: Request, needed: Sequence[PinSite]) -> tuple[list[Label], list[str]]:
    """The atoms that each pin asks: a label at its line or at its first reader's, else a note.

    Arguments:
      request: the program.
      needed: the pins.
    """
    names, labels, notes = Names.of(request.graph), list[Label](), list[str]()
    for site in needed:
        text = f"{names.site(site)} is pinned {pinned_text(site, request.mesh)}"
        value = pinned_value(request.graph, site)
        readers = (n.span for n in request.graph.walk() if n.span and value in n.inputs)
        span = site.span or next(readers, None)
        if span:
            labels.append(Label(span=span, text=text, primary=not labels))
        else:
            notes.append(text)
    return labels, notes


def _shape(request: Request, site: PinSite) -> tuple[int, ...]:
    return tuple(request.graph.aval(pinned_value(request.graph, site)).shape)


def _helps(
    request: Request, pins: Sequence[PinSite], limits: DiagnosisLimits
) -> tuple[list[Help], int]:
    """The plans after a change of the pins, and how many were not made: of pins that ask what
    another one asks, of pins dropped, and where neither has a plan, of two pins dropped.

    Arguments:
      request: the program.
      pins: the pins.
      limits: on the work and on what is shown.
    """
    enough, most = limits.plans_of(request.size, 1)
    agreeing = (
        repinned(request, site, other.codes)
        for site, other in itertools.permutations(pins, 2)
        if site.codes != other.codes and len(_shape(request, site)) == len(_shape(request, other))
    )
    drops = (dropped(request, site) for site in pins)
    found = [
        tried((c for c in changes if c.edits), plans=most, enough=enough)
        for changes in (agreeing, drops)
    ]
    untried = sum(t.untried for t in found)
    if not any(t.accepted for t in found) and request.size > limits.large:
        untried += len(pins)
    elif not any(t.accepted for t in found):
        pairs = _two_dropped(request, pins, limits)
        found = [tried((c for c in pairs if c.edits), plans=limits.pair_plans)]
        untried += found[0].untried
    return [one.help(program) for t in found for one, program in t.accepted], untried


def _two_dropped(
    request: Request, pins: Sequence[PinSite], limits: DiagnosisLimits
) -> Iterator[Change]:
    """Two pins dropped: one of these, and one of those that have no typing together without it.

    Arguments:
      request: the program.
      pins: the pins.
      limits: on the pins that are shown.
    """
    for site in pins:
        for other in _conflicting_pins(drop_pin(request, site), limits).shown:
            yield dropped(request, site, other)
