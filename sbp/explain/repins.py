"""Edits of a pin: of the annotation in the source, or of `in_types` and `out_types`."""

from __future__ import annotations

import ast

from sbp.errors import Edit, OptionEdit
from sbp.explain.names import behind_vmap
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.source.editing import Part, repinned
from sbp.source.reader import expression_at
from sbp.types import Atom, NdSbp


def edits_of(
    request: Request, site: PinSite, position: int | None = None, code: Code | None = None
) -> tuple[Edit, ...]:
    """The edits after which a pin asks something else.

    Arguments:
      request: the program, and what its types are chosen by.
      site: the pin.
      position: the mesh axis on which it changes; None for all.
      code: what it asks there; None leaves the axis free.

    Returns:
      The edits; none where the source does not show the pin.
    """
    codes = [code if position in (None, k) else asked for k, asked in enumerate(site.codes)]
    names = request.mesh.names
    free = tuple(axis for axis, c in zip(names, codes, strict=True) if c is None)
    hidden = _hidden_dims(site, codes)
    if hidden is None:
        return ()
    atoms: dict[str, Atom] = {
        axis: decode(c - hidden if c > 0 else c)
        for axis, c in zip(names, codes, strict=True)
        if c is not None
    }
    if site.source == "annotation":
        return repinned(site.span, atoms, _part(request, site), free)
    option = "in_types" if site.source == "input" else "out_types"
    value = repr(NdSbp(atoms, free)) if atoms else None
    return (OptionEdit(option=option, value=value, position=site.position),)


def _hidden_dims(site: PinSite, codes: list[Code | None]) -> int | None:
    """How many dims of vmap stand before those that the user sees; None when that is not known and
    matters."""
    split = [c for c in codes if c is not None and c > 0]
    asked = [c for c in site.codes if c is not None and c > 0]
    return behind_vmap(site, asked[0]) if split and asked else 0


def _part(request: Request, site: PinSite) -> Part:
    """What of its annotation a pin is: `annotate` may pin a result and its cotangent."""
    call, _ = expression_at(site.span)
    keywords = call.keywords if isinstance(call, ast.Call) else []
    if not any(k.arg == "cotangent" for k in keywords):
        return "whole"
    others = [s for s in pin_sites(request) if s.span == site.span]
    if len(others) == 1 and not all(n.backward for n in site.nodes):
        return "whole"
    return "cotangent" if all(n.backward for n in site.nodes) else "result"
