"""Pins that follow a plan: what a pin has to ask so that the plan without it stays as it is."""

from __future__ import annotations

from collections.abc import Iterator

from sbp.errors import Help
from sbp.explain.edits import change_pin, priced
from sbp.explain.names import Names, pinned_text
from sbp.explain.repins import edits_to
from sbp.infer.constraints import PinSite
from sbp.infer.request import Request
from sbp.infer.space import Code
from sbp.plan.fit import best_program
from sbp.plan.program import Program


def following(request: Request, site: PinSite, without: Program, share: float) -> Help | None:
    """The pin in the type in which the plan without it reads the value; None when that is no type
    for the pin, or when the pin is costly then, too.

    Arguments:
      request: the program with the pin.
      site: the pin, an annotation.
      without: the plan without it.
      share: the pin is costly when the plan without it takes at most this share of the seconds.
    """
    most = without.cost.seconds / share
    codes = next(_read(site, without), site.codes)
    found = None if codes == site.codes else asking(request, site, codes)
    return found[0] if found is not None and found[1].cost.seconds < most else None


def asking(
    request: Request, site: PinSite, codes: tuple[Code | None, ...]
) -> tuple[Help, Program] | None:
    """A pin that asks other codes, with the plan after it; None where there is no such plan or no
    edit that makes it.

    Arguments:
      request: the program with the pin.
      site: the pin.
      codes: for each mesh axis what it asks; None leaves the axis free.
    """
    edits = edits_to(request, site, codes)
    edited = change_pin(request, site, codes) if edits else None
    program = best_program(edited) if edited is not None else None
    if program is None:
        return None
    asked = pinned_text(site, request.mesh, codes)
    option = "in_types" if site.is_input else "out_types"
    where = f"at line {site.span.line}" if site.span else f"in {option}"
    text = f"pin {Names.of(request.graph).site(site)} to {asked} {where}"
    return priced(text, edits, program, clears_all_errors=True), program


def _read(site: PinSite, without: Program) -> Iterator[tuple[Code | None, ...]]:
    """The codes in which readers take a value in a plan without its pin, on the mesh axes that the
    pin names, in program order. Partial codes are left out, which a pin would make last."""
    made = {node.inputs[0] for node in site.nodes}
    for node in without.typing.graph.walk():
        row = without.typing.rows.get(node.id)
        for number, operand in enumerate(node.inputs if row is not None else ()):
            if operand in made and row is not None:
                codes = row.ins[number]
                if min(codes, default=0) >= 0:
                    yield tuple(
                        None if asked is None else code
                        for asked, code in zip(site.codes, codes, strict=True)
                    )
