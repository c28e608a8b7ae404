"""Programs that have a typing on each mesh axis, but not on all axes together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.errors import Diagnostic, Help, Label
from sbp.explain.edits import drop_pin, pinned_value, priced
from sbp.explain.fault_notes import more_text, unshown_text
from sbp.explain.limits import DiagnosisLimits
from sbp.explain.names import Names, pinned_text
from sbp.explain.repins import carried_text, edits_of
from sbp.infer.choose import choose
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.limits import boxing_text
from sbp.plan.fit import best_program
from sbp.source.reader import source_text


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
        f"each axis alone has one under {policies}; an outer axis cannot split a dim that an inner"
        " one already splits"
    )
    found, untried = _helps(request, pins.shown, limits)
    helps = sorted(found, key=lambda h: h.bytes_per_device)
    limited = [*_limit_notes(request, pins)]
    if len(helps) > limits.helps:
        limited.append(unshown_text(len(helps) - limits.helps))
    if untried:
        limited.append(f"{more_text(untried, 'change')} not tried: {_size(request)}")
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


def _helps(
    request: Request, needed: Sequence[PinSite], limits: DiagnosisLimits
) -> tuple[list[Help], int]:
    """The plans without one of the pins, and how many were not made. In a large program the search
    ends when enough were found to show.

    Arguments:
      request: the program.
      needed: the pins.
      limits: on the work and on what is shown.
    """
    names, helps, untried = Names.of(request.graph), list[Help](), 0
    for site in needed:
        edits = edits_of(request, site)
        if edits and len(helps) >= limits.helps and request.size > limits.large:
            untried += 1
            continue
        program = best_program(drop_pin(request, site)) if edits else None
        if program is None:
            continue
        if site.span:
            text = f"drop `{source_text(site.span)}` at line {site.span.line}"
        else:
            where = "in" if site.is_input else "out"
            kept = carried_text(request, site)
            text = f"leave {names.site(site)} free in {where}_types{kept}"
        helps.append(priced(text, edits, program, clears_all_errors=True))
    return helps, untried
