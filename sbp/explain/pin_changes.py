"""Changes of pins: another atom, or no pin."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sbp.explain.change import Change
from sbp.explain.edits import change_pin, drop_pin, move_pin, pinned_value, site_in
from sbp.explain.insertions import states_of
from sbp.explain.names import Names, behind_vmap, pinned_text
from sbp.explain.repins import carried_text, edits_of, edits_to
from sbp.infer.check import CheckResult
from sbp.infer.constraints import Constraint, PinSite, System, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, decode, encode
from sbp.plan.text import place
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node
from sbp.types import P


@dataclass(frozen=True, slots=True)
class PinChanges:
    """Changes of the pins that are to blame for a fault.

    Arguments:
      request: the program, whose source and options are edited.
      base: the program without the pins of its other faults.
      fault: the fault.
      node: the node at which it shows.
      names: the names of the program's values.
      system: the constraints of the fault's mesh axis.
    """

    request: Request
    base: Request
    fault: CheckResult
    node: Node
    names: Names
    system: System

    @property
    def sites(self) -> list[tuple[Constraint, PinSite]]:
        """The pins to blame, as they are in `base`."""
        return self.sites_of(self.fault.pins)

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
        n = self.base.mesh.sizes[self.system.position]
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
        k, axis = self.system.position, self.fault.mesh_axis
        states = states_of(self.system, pin.fixed[0], code) if pin.fixed else ()
        each = [edits_of(self.request, s, k, code) for s in (site, *others)] if states else []
        if not each or not all(each):
            return None
        freed = {pin.name, *(s.name for s in others)}
        # The moved annotation still converts what it annotates.
        reads = {
            c.name for c in self.system.constraints if c.convert and freed & {*c.convert.unless}
        }
        value = pinned_value(self.base.graph, site)
        kept = carried_text(self.request, site)
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
        name = self.names.site(site)
        twin = (
            site.span is not None
            and sum(self.names.site(c.site) == name for c in self.twins(site) if c.site) > 1
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
        axis = self.fault.mesh_axis
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
        request, k, axis = self.request, self.system.position, self.fault.mesh_axis
        name, where, kept = self.names.site(site), self.where(site), carried_text(request, site)
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
