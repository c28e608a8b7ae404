"""Edits that change a pin: in the source for an annotation, else in `in_types` or `out_types`."""

from __future__ import annotations

import ast
from typing import Any

from sbp.annotations import Pin
from sbp.errors import Edit, OptionEdit
from sbp.explain.names import behind_vmap
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.layout import padded
from sbp.source.editing import Part, PinnedPart, repinned
from sbp.source.reader import expression_at
from sbp.trace.places import CONSTRAINTS
from sbp.types import Atom, NdSbp


def edits_of(
    request: Request, site: PinSite, position: int | None = None, code: Code | None = None
) -> tuple[Edit, ...]:
    """The edits after which a pin asks something else on one mesh axis, or nothing; see `edits_to`.

    Arguments:
      request: the program, and what its types are chosen by.
      site: the pin.
      position: the mesh axis on which it changes; None for all.
      code: the code that it asks there; None leaves the axis free.
    """
    codes = (code if position in (None, k) else asked for k, asked in enumerate(site.codes))
    return edits_to(request, site, tuple(codes))


def edits_to(request: Request, site: PinSite, codes: tuple[Code | None, ...]) -> tuple[Edit, ...]:
    """The edits after which a pin asks other codes.

    Arguments:
      request: the program, and what its types are chosen by.
      site: the pin.
      codes: for each mesh axis what it asks; None leaves the axis free.

    Returns:
      The edits; none where the source does not show the pin, where it is an argument of another
      call of JAX, or where the same call pins other types when it is traced with other arguments.
    """
    names = request.mesh.names
    free = tuple(axis for axis, c in zip(names, codes, strict=True) if c is None)
    hidden = _hidden_dims(site, codes)
    if hidden is None or any(c is not None and 0 < c <= hidden for c in codes):
        return ()  # a split of a dim that the user does not see
    atoms: dict[str, Atom] = {
        axis: decode(c - hidden if c > 0 else c)
        for axis, c in zip(names, codes, strict=True)
        if c is not None
    }
    if site.source == "annotation" and not site.is_input:
        pin: Pin = site.nodes[0].params["pin"]
        is_constraint = pin.asked_by in CONSTRAINTS
        if _serves_others(request, site) or (pin.asked_by and not is_constraint):
            return ()
        pinned = PinnedPart(
            atoms=atoms,
            part=_part(request, site),
            free=free,
            reduce_dtype=pin.reduce_dtype,
            is_constraint=is_constraint,
        )
        return repinned(site.span, pinned)
    option = "in_types" if site.is_input else "out_types"
    value: Any = repr(NdSbp(atoms, free)) if atoms else None
    if request.demand.is_padded("input" if site.is_input else "output", site.position):
        value = padded(value)
    edit = OptionEdit(option=option, value=value, position=site.position)
    return (edit,) if site.source == "output" else _input_edits(request, site, edit)


def _input_edits(request: Request, site: PinSite, edit: OptionEdit) -> tuple[OptionEdit, ...]:
    """The edits of `in_types` that change the type of one input; none where `in_types` cannot
    change it: of a keyword argument, and of an `sbp.Partial`.

    Arguments:
      request: the program, and what its types are chosen by.
      site: the pin of the input.
      edit: its new type.
    """
    match request.demand.source(site.position):
        case "in_types":
            return (edit,)
        case "keyword argument":
            return ()
        case "argument":
            if any(c is not None and c < 0 for c in site.codes):
                return ()
            others = carried_inputs(request, site)
            edits = [
                OptionEdit(option="in_types", value=repr(t), position=i) for i, t in others.items()
            ]
            return tuple(sorted((*edits, edit), key=lambda e: e.position or 0))


def carried_inputs(request: Request, site: PinSite) -> dict[int, NdSbp]:
    """The other inputs with a type from the sharding of their argument, which `in_types` has to
    name as soon as it is given.

    Arguments:
      request: the program, and what its types are chosen by.
      site: the pin of the input that is edited.

    Returns:
      The type by position; empty when the edited input has its type from `in_types`.
    """
    demand, names = request.demand, request.mesh.names
    if not site.is_input or demand.source(site.position) != "argument":
        return {}
    return {
        i: NdSbp({a: decode(c) for a, c in zip(names, codes, strict=True) if c is not None})
        for i, codes in enumerate(demand.inputs)
        if i != site.position and codes is not None and demand.source(i) == "argument"
    }


def carried_text(request: Request, *sites: PinSite) -> str:
    """The part of a help about one input that is about the other inputs; empty when they stay.

    Arguments:
      request: the program, and what its types are chosen by.
      sites: the pins that are edited.
    """
    carried = {i for site in sites for i in carried_inputs(request, site)}
    count = len(carried - {site.position for site in sites if site.is_input})
    if not count:
        return ""
    types = "type of 1 other input" if count == 1 else f"types of {count} other inputs"
    return f", and name the {types} there"


def _hidden_dims(site: PinSite, codes: tuple[Code | None, ...]) -> int | None:
    """The number of dims that `jax.vmap` puts before the dims that the user sees; None when that is
    not known and a split depends on it."""
    split = [c for c in codes if c is not None and c > 0]
    asked = [c for c in site.codes if c is not None and c > 0]
    return behind_vmap(site, asked[0]) if split and asked else 0


def _serves_others(request: Request, site: PinSite) -> bool:
    """Whether the call that makes a pin makes another one, too: in a helper or a loop, where its
    arguments differ from call to call."""
    cotangent = all(n.backward for n in site.nodes)
    return any(
        s.span == site.span
        and s.codes != site.codes
        and all(n.backward for n in s.nodes) == cotangent
        for s in pin_sites(request)
        if s.source == "annotation"
    )


def _part(request: Request, site: PinSite) -> Part:
    """The part of its annotation that a pin is: `annotate` may pin a result and its cotangent."""
    call, _ = expression_at(site.span)
    keywords = call.keywords if isinstance(call, ast.Call) else []
    if not any(k.arg == "cotangent" for k in keywords):
        return "whole"
    others = [s for s in pin_sites(request) if s.span == site.span]
    if len(others) == 1 and not all(n.backward for n in site.nodes):
        return "whole"
    return "cotangent" if all(n.backward for n in site.nodes) else "result"
