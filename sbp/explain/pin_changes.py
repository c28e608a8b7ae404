"""Changes of the pins that are to blame for a fault, and the edits that make them."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sbp.annotations import Pin
from sbp.errors import Edit, OptionEdit, SourceEdit
from sbp.explain.change import BlamedFault, Change
from sbp.explain.edits import change_pin, drop_pin, move_pin, pinned_value, site_in
from sbp.explain.insertions import states_of
from sbp.explain.names import Names, behind_vmap, pinned_text
from sbp.infer.constraints import Constraint, PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, decode, encode
from sbp.layout import padded
from sbp.plan.text import place
from sbp.source.editing import Part, PinnedPart
from sbp.source.editing import repinned as repinned_source
from sbp.source.reader import expression_at, source_text, users_span
from sbp.source.text import position_at
from sbp.trace.graph import Node
from sbp.trace.places import CONSTRAINTS
from sbp.types import Atom, NdSbp, P

# ---- edits --------------------------------------------------------------------------------------
# Edits that change a pin: in the source for an annotation, else in `in_types` or `out_types`.


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
        return repinned_source(site.span, pinned)
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


# ---- changes ------------------------------------------------------------------------------------
# Changes of pins: another atom, or no pin.


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
class PinChanges:
    """Changes of the pins that are to blame for a fault.

    Arguments:
      fault: the fault, with the program whose source and options are edited.
      base: the program without the pins of its other faults.
      node: the node at which it shows.
    """

    fault: BlamedFault
    base: Request
    node: Node

    @property
    def sites(self) -> list[tuple[Constraint, PinSite]]:
        """The pins to blame, as they are in `base`."""
        return self.sites_of(self.fault.found.pins)

    def sites_of(self, pins: Iterable[Constraint]) -> list[tuple[Constraint, PinSite]]:
        """Pins as they are in `base`, without those that it drops."""
        found = [(pin, site_in(self.base, pin.site)) for pin in pins if pin.site]
        return [(pin, site) for pin, site in found if site is not None]

    def moved(self) -> Iterator[Change]:
        """Pins that ask another atom on the mesh axis."""
        for pin, site in self.sites:
            others = self.alike(site)
            for code in self.codes(pin, site):
                one = self.repinned(pin, site, code)
                if one is not None:
                    yield one
                if others:
                    every = self.repinned(pin, site, code, others, one)
                    if every is not None:
                        yield every

    def codes(self, pin: Constraint, site: PinSite) -> Iterator[Code]:
        """The other codes that a pin may ask: splits of dims that divide, B, and P where the value
        can be partial. Dims of `jax.vmap`, which the user does not see, are left out."""
        behind = behind_vmap(site, pin.code)
        value = pinned_value(self.base.graph, site)
        if behind is None or not isinstance(value, int):
            return
        n = self.base.mesh.sizes[self.fault.position]
        splits = [
            1 + dim
            for dim, size in enumerate(self.base.graph.aval(value).shape)
            if dim >= behind and size % n == 0 and size
        ]
        partial = [encode(P)] if site.source == "annotation" and not site.is_input else []
        yield from (c for c in (*splits, 0, *partial) if c != pin.code)

    def repinned(
        self,
        pin: Constraint,
        site: PinSite,
        code: Code,
        others: Sequence[PinSite] = (),
        instead: Change | None = None,
    ) -> Change | None:
        """A pin that asks another code; None where no state of the program has it, or where it
        cannot be written.

        Arguments:
          pin: the constraint of the pin.
          site: the pin in `base`.
          code: the code that it asks.
          others: pins that ask it, too.
          instead: the change of the pin alone.
        """
        k, axis = self.fault.position, self.fault.axis
        states = states_of(self.fault.system, pin.fixed[0], code) if pin.fixed else ()
        each = [edits_of(self.fault.request, s, k, code) for s in (site, *others)] if states else []
        if not each or not all(each):
            return None
        freed = {pin.name, *(s.name for s in others)}
        # The moved annotation still converts what it annotates.
        reads = {
            c.name
            for c in self.fault.system.constraints
            if c.convert and freed & {*c.convert.unless}
        }
        value = pinned_value(self.base.graph, site)
        kept = carried_text(self.fault.request, site)
        if others:
            kept += f", and {len(others)} more like it"
        return Change(
            text=" ".join(self.words(pin, site, code)) + kept,
            edits=tuple(itertools.chain.from_iterable(each)),
            make=functools.partial(all_moved, self.base, [(s, code) for s in (site, *others)], k),
            without=frozenset((axis, name) for name in freed | reads),
            assumed=states,
            kind="pin" if pin.code > 0 and code > 0 else "other pin",
            instead=instead,
            pinned=(value,) if isinstance(value, int) else (),
        )

    def words(self, pin: Constraint, site: PinSite, code: Code) -> tuple[str, str]:
        """A change of a pin in words: the verb, and the rest."""
        where, behind = self.where(site), behind_vmap(site, pin.code) or 0
        name = self.fault.names.site(site)
        twin = (
            site.span is not None
            and sum(self.fault.names.site(c.site) == name for c in self.twins(site) if c.site) > 1
        )
        if code > 0:
            text = source_text(site.span)
            shown = code - 1 - behind
            return (
                (f"in `{text}` split", f"dim {shown} {where}")
                if twin
                else ("split", f"{name} on dim {shown} {where}")
            )
        subject = f"the value of `{source_text(site.span)}`" if twin else name
        axis = self.fault.axis
        if code == 0:
            return "replicate", f"{subject} on `{axis}` {where}"
        return "leave", f"{subject} {decode(code)!r} on `{axis}` {where}"

    def drops(self) -> Iterator[Change]:
        """Pins dropped, or left free on the fault's mesh axis."""
        for pin, site in self.sites:
            yield from self.dropped(pin, site)

    def dropped(self, pin: Constraint, site: PinSite) -> Iterator[Change]:
        """A pin dropped, or left free on the fault's mesh axis.

        Arguments:
          pin: the constraint of the pin.
          site: the pin in `base`.
        """
        # The edits are made in the source and the options as they are, not as they are in `base`.
        request, k, axis = self.fault.request, self.fault.position, self.fault.axis
        name, where, kept = (
            self.fault.names.site(site),
            self.where(site),
            carried_text(request, site),
        )
        several = sum(c is not None for c in site.codes) > 1
        smaller: Change | None = None
        if several or not site.span:
            note = "" if site.span else f' ("{axis}:?"){kept}'
            smaller = Change(
                text=f"leave {name} free on `{axis}` {where}{note}",
                edits=edits_of(request, site, k),
                make=functools.partial(drop_pin, self.base, site, k),
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
                yield Change(
                    text=text,
                    edits=edits,
                    make=functools.partial(drop_pin, self.base, site),
                    without=frozenset((a, pin.name) for a in self.base.mesh.names),
                    instead=smaller,
                )

    def alike(self, site: PinSite) -> list[PinSite]:
        """The other pins of `in_types` or `out_types` that ask the same of the same leaf of another
        layer: only positions in lists differ in their paths."""
        demand = self.base.demand
        alike = demand.alike(site.source, site.position) if site.source != "annotation" else ()
        return [
            s
            for s in pin_sites(self.base)
            if s.source == site.source
            and s.position in alike
            and s.position != site.position
            and s.codes == site.codes
        ]

    def twins(self, site: PinSite) -> list[Constraint]:
        """The fault's pins on the line of one of them."""
        lines = [(c, c.site.span) for c in self.fault.found.pins if c.site]
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

    # ---- pairs of pins --------------------------------------------------------------------------

    @property
    def pins(self) -> list[tuple[Constraint, PinSite]]:
        """The pins to blame on the fault's mesh axis, as they are in `base`: those of the fault,
        and of the findings that end in the same place. They can make up two sides, such as the
        terms of two sums that are multiplied."""
        fault = self.fault
        findings = fault.found, *fault.trials.faults.others(fault.found)
        mine = {c.name: c for f in findings if f.mesh_axis == fault.axis for c in f.pins}
        return self.sites_of(mine.values())

    def pairs(self, gone: Set[tuple[str, str]]) -> Iterator[Change]:
        """The changes of two pins that the constraints allow, for faults that no change of one pin
        mends: those to two splits first, since they keep the least memory.

        Arguments:
          gone: (mesh axis, name) of the constraints that are left out.
        """
        axis, trials = self.fault.axis, self.fault.trials
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
        each = ((c, self.repinned(pin, site, c)) for c in self.codes(pin, site))
        return [PinChange(pin, site, c, one) for c, one in each if one is not None]

    def _pair(self, one: PinChange, two: PinChange) -> Change:
        words, again = (self.words(c.pin, c.site, c.code) for c in (one, two))
        second = again[1] if again[0] == words[0] else " ".join(again)
        kept = carried_text(self.fault.request, one.site, two.site)
        changes = [(c.site, c.code) for c in (one, two)]
        splits = all(c.change.kind == "pin" for c in (one, two))
        edits = dict.fromkeys((*_edits(one, two), *_edits(two, one)))
        return Change(
            text=f"{' '.join(words)} and {second}{kept}",
            edits=tuple(edits),
            make=functools.partial(all_moved, self.base, changes, self.fault.position),
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
    spans = [(e.span.file, position_at(e.span)) for e in edits if isinstance(e, SourceEdit)]
    return any(
        file == other and a[:2] < b[2:] and b[:2] < a[2:]
        for (file, a), (other, b) in itertools.combinations(spans, 2)
    )


def dropped(request: Request, *sites: PinSite) -> Change:
    """Pins dropped; the change has no edits where the source does not show one of them.

    Arguments:
      request: the program.
      sites: the pins.
    """
    names, texts = Names.of(request.graph), list[str]()
    for site in sites:
        if site.span:
            texts.append(f"drop `{source_text(site.span)}` at line {site.span.line}")
        else:
            option = "in_types" if site.is_input else "out_types"
            kept = carried_text(request, site)
            texts.append(f"leave {names.site(site)} free in {option}{kept}")
    each = [edits_of(request, site) for site in sites]
    return Change(
        text=" and ".join(texts),
        edits=tuple(dict.fromkeys(itertools.chain(*each))) if all(each) else (),
        make=functools.partial(functools.reduce, drop_pin, sites, request),
    )


def repinned(request: Request, site: PinSite, codes: tuple[Code | None, ...]) -> Change:
    """A pin that asks other codes; the change has no edits where none makes it.

    Arguments:
      request: the program.
      site: the pin.
      codes: for each mesh axis what it asks; None leaves the axis free.
    """
    option = "in_types" if site.is_input else "out_types"
    where = f"at line {site.span.line}" if site.span else f"in {option}"
    asked, name = pinned_text(site, request.mesh, codes), Names.of(request.graph).site(site)
    return Change(
        text=f"pin {name} to {asked} {where}",
        edits=edits_to(request, site, codes),
        make=functools.partial(change_pin, request, site, codes),
    )


def all_moved(
    base: Request, changes: Sequence[tuple[PinSite, Code]], position: int
) -> Request | None:
    """The program with pins that ask other codes on one mesh axis; None where a value has too few
    dims for its code.

    Arguments:
      base: the program.
      changes: the pins, and the code that each asks.
      position: of the mesh axis.
    """
    edited: Request | None = base
    for site, code in changes:
        here = site_in(edited, site) if edited else None
        edited = move_pin(edited, here, position, code) if edited and here else None
    return edited
