"""Why no plan fits a memory limit: the values that fill the memory, and the pins without which a
plan fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sbp import _jax
from sbp.errors import Diagnostic, Help, Label, OptionEdit, bytes_text
from sbp.explain.change import Tried, priced, tried
from sbp.explain.edits import pinned_value
from sbp.explain.fault_notes import more_text, unshown_text
from sbp.explain.limits import DiagnosisLimits
from sbp.explain.names import Names, pinned_text
from sbp.explain.pin_changes import dropped, repinned
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Codes, local_shape, to_type
from sbp.machine.mesh import MeshSpec
from sbp.plan.ir import Register
from sbp.plan.program import Program
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Graph, Node

SHOWN_HELD = 4
"""Values that fill the memory: the largest are named, equal ones once."""

FILLS = 0.001
"""Share of the least memory that was found that a value takes at least to be named."""


def memory_diagnostic(least: Program, limit: float) -> Diagnostic:
    """Says that no plan fits the memory limit, what is largest in the one of least memory, and
    which split would make it smaller."""
    names, mesh, graph = Names.of(least.graph), least.mesh, least.typing.graph
    live = {
        *least.block.inputs,
        *least.fullest,
        *(s for s in least.block.outputs if isinstance(s, Register)),
    }
    held = {(r.value, r.codes) for r in live if r.value in least.graph.avals}
    alike: dict[str, list[tuple[int, Codes]]] = {}
    for value, codes in sorted(held, key=lambda r: (-_size(graph, mesh, *r), r)):
        text = _held_text(names, least, value, codes)
        fills = _size(graph, mesh, value, codes) >= FILLS * least.cost.peak_memory_bytes
        if text in alike or (fills and len(alike) < SHOWN_HELD):
            alike.setdefault(text, []).append((value, codes))
    notes = [
        f"{text}; there are {len(at)} such values" if len(at) > 1 else text
        for text, at in alike.items()
    ]
    rest = held.difference(*alike.values())
    if rest:
        size = bytes_text(sum(_size(graph, mesh, *r) for r in rest))
        takes = "take" if len(rest) > 1 else "takes"
        notes.append(f"{more_text(len(rest), 'value')} {takes} {size} per device in all")
    labels = list[Label]()
    for value, codes in (at[0] for at in alike.values()):
        maker = names.makers.get(value)
        span = maker and users_span(maker)
        if span and all(label.span != span for label in labels):
            size = bytes_text(_size(graph, mesh, value, codes))
            labels.append(Label(span=span, text=f"{size} per device", primary=not labels))
    found, enough = (
        bytes_text(least.cost.peak_memory_bytes),
        math.ceil(least.cost.peak_memory_bytes),
    )
    looser = OptionEdit(option="memory_limit", value=enough)
    freed = _freed_pins(least)
    if freed.untried:
        more, were = more_text(freed.untried, "pin"), "were" if freed.untried > 1 else "was"
        notes.append(f"{more} {were} not dropped to see whether a plan fits then")
    if freed.unshown:
        notes.append(unshown_text(freed.unshown))
    notes.append("typings that hold less may exist: the search does not try all")
    labels += freed.labels(least.request)
    return Diagnostic(
        code="memory-limit",
        severity="error",
        title=(
            f"no typing was found that fits {bytes_text(limit)} per device; the least is {found}"
            " per device"
        ),
        labels=tuple(labels),
        notes=tuple(notes),
        helps=(
            *freed.helps,
            priced(f"memory_limit={enough}", (looser,), least),
        ),
    )


def _held_text(names: Names, least: Program, value: int, codes: Codes) -> str:
    """What a value takes of the memory of a device, and what would make it smaller.

    Arguments:
      names: the names of the program's values.
      least: the plan.
      value: the value.
      codes: its type there.
    """
    mesh, graph = least.mesh, least.typing.graph
    shape, size = graph.avals[value].shape, _size(graph, mesh, value, codes)
    name = names.value(value) or _told(names.makers.get(value))
    text = (
        f"{name} of shape {tuple(shape)} as {to_type(codes, mesh)!r} takes {bytes_text(size)}"
        " per device"
    )
    ways = [(_size(graph, mesh, value, c), k, c[k]) for k, c in _splits(shape, codes, mesh)]
    if ways:
        smaller, k, code = min(ways)
        return text + f"; as S({code - 1}) on `{mesh.names[k]}` it would take {bytes_text(smaller)}"
    local = local_shape(shape, codes, mesh.sizes)
    halved = [mesh.names[k] for k, c in enumerate(codes) if c > 0 and local[c - 1] % 2 == 0]
    return text + (f"; twice the devices on `{halved[0]}` would halve it" if halved else "")


@dataclass(frozen=True, slots=True)
class FreedPins:
    """The pins that keep a plan from fitting a memory limit.

    Arguments:
      helps: the pins changed or dropped.
      pins: these pins.
      unshown: the number of changes with which a plan fits that are no help, to keep them few.
      untried: the number of pins that were not tried.
    """

    helps: tuple[Help, ...]
    pins: tuple[PinSite, ...]
    unshown: int
    untried: int

    def labels(self, request: Request) -> list[Label]:
        """A label at each annotation among the pins."""
        names = Names.of(request.graph)
        return [
            Label(span=s.span, text=f"{names.site(s)} is pinned {pinned_text(s, request.mesh)}")
            for s in self.pins
            if s.span
        ]


def _freed_pins(least: Program) -> FreedPins:
    """The pins without which a plan fits the limit, each alone, or else together, those of the
    largest values first.

    Arguments:
      least: the plan of least memory that was found.
    """
    request, limits = least.request, DiagnosisLimits()
    sites = sorted(pin_sites(request), key=lambda s: -_pinned_size(request, s))
    drops = {d: [s] for s in sites if (d := dropped(request, s)).edits}
    _, most = limits.plans_of(request.size, 1)
    shown = limits.helps - 1
    alone = tried(drops, plans=most, helps=shown)
    free = [
        s
        for [s] in drops.values()
        if not s.is_input or request.demand.source(s.position) != "argument"
    ]
    counts = () if alone.accepted else range(2, min(len(free), most) + 1)
    several = {dropped(request, *free[:count]): free[:count] for count in counts}
    together = tried(several, plans=most, helps=1)
    helps, freed = list[Help](), list[PinSite]()
    for one, program in (*alone.accepted, *together.accepted):
        if one in drops and len(helps) < shown:
            splits = _split_pin(request, *drops[one]).accepted
            helps += [split.help(found) for split, found in splits]
        helps.append(one.help(program))
        freed += drops.get(one) or several[one]
    return FreedPins(tuple(helps[:shown]), tuple(freed), len(helps[shown:]), alone.untried)


def _split_pin(request: Request, site: PinSite) -> Tried:
    """A pin that asks one split more, with which a plan fits: of those with the smallest shard, the
    first dim.

    Arguments:
      request: the program, with its memory limit.
      site: the pin.
    """
    value = pinned_value(request.graph, site)
    if not isinstance(value, int) or min((c or 0 for c in site.codes), default=0) < 0:
        return Tried()
    graph, mesh = request.graph, request.mesh
    codes = tuple(c or 0 for c in site.codes)
    ways = sorted(
        (_size(graph, mesh, value, after), k, after)
        for k, after in _splits(graph.avals[value].shape, codes, mesh)
        if site.codes[k] is not None
    )
    free = [c is None for c in site.codes]
    asked = (tuple(None if f else c for f, c in zip(free, t, strict=True)) for _, _, t in ways)
    changes = [repinned(request, site, a) for a in asked]
    return tried((c for c in changes if c.edits), plans=len(changes), helps=1)


def _pinned_size(request: Request, site: PinSite) -> float:
    """Bytes of a pinned value on one device, with B on the axes that the pin leaves free."""
    value = pinned_value(request.graph, site)
    codes = tuple(c or 0 for c in site.codes)
    return _size(request.graph, request.mesh, value, codes) if isinstance(value, int) else 0.0


def _told(maker: Node | None) -> str:
    """A description of a value without a name, by the expression that makes it."""
    span = maker and users_span(maker)
    if maker is None or span is None:
        return "a value"
    what = "a cotangent" if maker.in_gradient else "a result"
    return f"{what} of `{source_text(span, 40)}` at line {span.line}"


def _size(graph: Graph, mesh: MeshSpec, value: int, codes: Codes) -> float:
    return math.prod(local_shape(graph.avals[value].shape, codes, mesh.sizes)) * _jax.itemsize(
        graph.avals[value].dtype
    )


def _splits(shape: tuple[int, ...], codes: Codes, mesh: MeshSpec) -> Iterator[tuple[int, Codes]]:
    """Types with one more split: of a dim that divides, on a mesh axis where the value is B.

    Arguments:
      shape: the shape of the value.
      codes: its type.
      mesh: the mesh.
    """
    for k, n in enumerate(mesh.sizes):
        local = local_shape(shape, codes, mesh.sizes)
        for dim, size in enumerate(local):
            if n > 1 and codes[k] == 0 and size % n == 0 and size:
                yield k, tuple(1 + dim if i == k else c for i, c in enumerate(codes))
