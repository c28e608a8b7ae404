"""What to say when each mesh axis alone has a typing, and all together have none."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from sbp.errors import Diagnostic, Help, Label
from sbp.explain.edits import drop_pin, pinned_value, priced
from sbp.explain.helps import LARGE, MAX_HELPS
from sbp.explain.names import Names, pinned_text
from sbp.explain.repins import edits_of
from sbp.infer.choose import choose
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.limits import boxing_text
from sbp.plan.fit import best_program
from sbp.source.reader import source_text


def no_typing_together(request: Request) -> Diagnostic:
    """What to say when no mesh axis is to blame: which pins have no typing together, and the plans
    without one of them."""
    needed = _needed_pins(request)
    labels, notes = _pin_labels(request, needed[:6])
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
            notes=tuple(notes),
        )
    axes = ", ".join(f"`{a}`" for a in request.mesh.names)
    policies = boxing_text(request.boxing, request.axis_policies, request.mesh.names)
    why = (
        f"each axis alone has one under {policies}; an outer axis cannot split a dim that an inner"
        " one already splits"
    )
    helps = sorted(_helps(request, needed[:6]), key=lambda h: h.bytes_per_device)
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"the program has no typing on the mesh axes {axes} together",
        labels=tuple(labels),
        notes=(*notes, why),
        helps=tuple(helps[:MAX_HELPS]),
    )


def _needed_pins(request: Request) -> list[PinSite]:
    """Pins that have no typing together, though they have one without any of them; of a large
    program all pins."""
    sites = pin_sites(request)
    needed = list(sites)
    if len(sites) * request.size <= 4000:
        for site in reversed(sites):
            others = [s for s in sites if s not in needed or s is site]
            if choose(functools.reduce(drop_pin, others, request)) is None:
                needed.remove(site)
    return needed


def _pin_labels(request: Request, needed: Sequence[PinSite]) -> tuple[list[Label], list[str]]:
    """What each pin asks: at its line or that of its first reader, else as a note."""
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


def _helps(request: Request, needed: Sequence[PinSite]) -> list[Help]:
    """The plans without one of the pins; of a large program few."""
    names, helps = Names.of(request.graph), list[Help]()
    for site in needed:
        edits = edits_of(request, site)
        few = len(helps) < MAX_HELPS or request.size <= LARGE
        program = best_program(drop_pin(request, site)) if edits and few else None
        if program is None:
            continue
        if site.span:
            text = f"drop `{source_text(site.span)}` at line {site.span.line}"
        else:
            where = "in" if site.source == "input" else "out"
            text = f"leave {names.site(site)} free in {where}_types"
        helps.append(priced(text, edits, program, clears_all_errors=True))
    return helps
