"""Annotations that make a plan more expensive, and values that fill the memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp import _jax
from sbp.errors import Diagnostic, Label, OptionEdit, bytes_text
from sbp.explain.edits import drop_pin, priced
from sbp.explain.names import Names, pinned_text
from sbp.explain.repins import edits_of
from sbp.infer.choose import choose
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Codes, local_shape, to_type
from sbp.machine.mesh import MeshSpec
from sbp.plan.fit import best_program
from sbp.plan.ir import Register
from sbp.plan.program import Program
from sbp.source.reader import scope_of, source_text, users_span
from sbp.trace.graph import Graph, Node

DEARER = 0.9
"""An annotation is costly when the plan without it takes at most this share of the time ..."""

FLOOR_SECONDS, FLOOR_BYTES = 10e-6, 2**20
"""... and saves at least so many seconds; or sends at most that share of the bytes, when the plan
sends more bytes than this."""

MAX_ANNOTATIONS, FEW_ANNOTATIONS = 20, 4
"""Annotations whose cost is looked for, and how many of a program above `LARGE_PROGRAM` nodes."""

LARGE_PROGRAM = 1500
"""Nodes above which a program with more than `FEW_ANNOTATIONS` is not looked at."""

MAX_SOLUTIONS, MIN_SOLUTIONS, NODES_SOLVED = 40, 4, 12_000
"""Choices of types made to find costly annotations: at most 40, and in a program above 300 nodes as
many as have 12,000 nodes together, but at least 4."""


def costly_annotations(program: Program) -> tuple[Diagnostic, ...]:
    """Names each annotation whose removal makes the plan at least 10 % cheaper, with the price both
    ways; and says how many annotations were not looked at.

    A set of annotations without which the plan is not that much cheaper has no costly annotation in
    it: so sets are halved, and most programs are cleared by one choice of types without any
    annotation.
    """
    request = dataclasses.replace(program.typing.graph_request, memory_limit=None, aliased=())
    sites = [s for s in pin_sites(request) if s.source == "annotation" and s.span]
    if not sites:
        return ()
    if request.size > LARGE_PROGRAM and len(sites) > FEW_ANNOTATIONS:
        return (_unchecked(len(sites), len(sites), _too_large(request.size)),)
    search = CostSearch(request, _solutions(request.size))
    # The program's seconds may have a memory limit in them and are then too high; yet they clear
    # most programs with one choice of types.
    free = search.seconds(sites, DEARER * program.cost.seconds)
    if free is None or free > DEARER * program.cost.seconds:
        return ()
    tried = sites[:MAX_ANNOTATIONS]
    whole = search.seconds(())
    dear = search.cheaper(tried, DEARER * whole) if whole is not None else []
    found: list[Diagnostic] = []
    annotated = best_program(request) if dear else None  # a plan counts the reuse of conversions
    for site in dear:
        without = best_program(drop_pin(request, site))
        assert without is not None and annotated is not None
        if without.cost.seconds <= DEARER * annotated.cost.seconds and _matters(
            program, annotated.cost.seconds, without
        ):
            found.append(_costly(request, site, program, annotated.cost.seconds, without))
    found.sort(key=lambda d: d.labels[0].span)
    unchecked = len(sites) - len(tried) + search.undecided
    if unchecked:
        reason = _many(len(sites)) if len(sites) > len(tried) else _spent(search.most, request.size)
        found.append(_unchecked(unchecked, len(sites), reason))
    return tuple(found)


@dataclass(slots=True)
class CostSearch:
    """Looks for costly annotations of a program with a limited number of choices of types.

    Arguments:
      request: the program.
      most: choices of types that may be made.
      made: choices of types made so far.
      undecided: annotations left without an answer when the choices were used up.
    """

    request: Request
    most: int
    made: int = 0
    undecided: int = 0

    def seconds(self, pins: Sequence[PinSite], limit: float = math.inf) -> float | None:
        """Seconds of the cheapest typing without some annotations; None when there is none, or no
        choice is left."""
        if self.made >= self.most:
            return None
        self.made += 1
        typing = choose(functools.reduce(drop_pin, pins, self.request), cutoff=limit)
        return None if typing is None else typing.seconds

    def cheaper(self, pins: Sequence[PinSite], limit: float) -> list[PinSite]:
        """The annotations without which the program takes at most `limit` seconds. Each is dropped
        on its own.

        Arguments:
          pins: the annotations to look at.
          limit: in seconds.
        """
        spent = self.made >= self.most
        found = self.seconds(pins, limit)
        if spent:
            self.undecided += len(pins)
        if found is None or found > limit:
            return []
        if len(pins) == 1:
            return list(pins)
        half = len(pins) // 2
        return [*self.cheaper(pins[:half], limit), *self.cheaper(pins[half:], limit)]


def _solutions(size: int) -> int:
    """The number of choices of types that are made for a program with `size` operations."""
    return MAX_SOLUTIONS if size <= 300 else max(MIN_SOLUTIONS, NODES_SOLVED // size)


def _unchecked(count: int, of: int, reason: str) -> Diagnostic:
    """The note about annotations whose cost was not looked at.

    Arguments:
      count: the number of these annotations.
      of: the number of all annotations.
      reason: why they were not looked at.
    """
    return Diagnostic(
        code="costly-annotation",
        severity="note",
        title=f"{count} of {of} annotations were not checked for what they cost",
        notes=(reason,),
    )


def _too_large(size: int) -> str:
    return (
        f"the program has {size:,} operations; above {LARGE_PROGRAM:,}, programs with more than"
        f" {FEW_ANNOTATIONS} annotations are not checked"
    )


def _many(of: int) -> str:
    return f"the first {MAX_ANNOTATIONS} of {of} annotations are checked"


def _spent(most: int, size: int) -> str:
    return (
        f"types are chosen at most {most} times to check a program of {size:,} operations, and"
        " these were used up"
    )


def _matters(program: Program, whole: float, without: Program) -> bool:
    """Whether the cost of an annotation is large enough to be reported: a tenth of a plan may be a
    microsecond.

    Arguments:
      program: the plan.
      whole: seconds of the plan, without a memory limit.
      without: the plan without the annotation.
    """
    sent, left = program.cost.bytes_per_device, without.cost.bytes_per_device
    return whole - without.cost.seconds >= FLOOR_SECONDS or (
        sent > FLOOR_BYTES and left <= DEARER * sent
    )


def _costly(
    request: Request, site: PinSite, program: Program, whole: float, without: Program
) -> Diagnostic:
    assert site.span is not None
    rise = whole / without.cost.seconds - 1 if without.cost.seconds else math.inf
    price = (
        f"{bytes_text(program.cost.bytes_per_device)} and {_seconds(whole)} per device with it, "
    )
    price += (
        f"{bytes_text(without.cost.bytes_per_device)} and {_seconds(without.cost.seconds)} without"
    )
    text = f"drop `{source_text(site.span)}` at line {site.span.line}"
    edits = edits_of(request, site)
    return Diagnostic(
        code="costly-annotation",
        severity="warning",
        title=(
            f"pinning {Names.of(request.graph).site(site)} to"
            f" {pinned_text(site, request.mesh)} makes the plan {100 * rise:.0f} % dearer"
        ),
        labels=(Label(span=site.span, text=price, primary=True),),
        helps=(priced(text, edits, without, clears_all_errors=True),) if edits else (),
        scope=scope_of(site.nodes[0]),
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


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
    notes, labels = list[str](), list[Label]()
    for value, codes in sorted(held, key=lambda r: (-_size(graph, mesh, *r), r))[:4]:
        size, shape, maker = (
            _size(graph, mesh, value, codes),
            graph.avals[value].shape,
            names.makers.get(value),
        )
        name = names.value(value) or _told(maker)
        text = (
            f"{name} of shape {tuple(shape)} as {to_type(codes, mesh)!r} takes {bytes_text(size)}"
            " per device"
        )
        ways = [(_size(graph, mesh, value, c), k, c[k]) for k, c in _splits(shape, codes, mesh)]
        if ways:
            smaller, k, code = min(ways)
            text += f"; as S({code - 1}) on `{mesh.names[k]}` it would take {bytes_text(smaller)}"
        else:
            local = local_shape(shape, codes, mesh.sizes)
            halved = [mesh.names[k] for k, c in enumerate(codes) if c > 0 and local[c - 1] % 2 == 0]
            text += f"; twice the devices on `{halved[0]}` would halve it" if halved else ""
        notes.append(text)
        span = maker and users_span(maker)
        if span and all(label.span != span for label in labels):
            labels.append(
                Label(span=span, text=f"{bytes_text(size)} per device", primary=not labels)
            )
    found, enough = (
        bytes_text(least.cost.peak_memory_bytes),
        math.ceil(least.cost.peak_memory_bytes),
    )
    return Diagnostic(
        code="memory-limit",
        severity="error",
        title=(
            f"no typing fits {bytes_text(limit)} per device; the least that was found is {found}"
            " per device"
        ),
        labels=tuple(labels),
        notes=tuple(notes),
        helps=(
            priced(
                f"memory_limit={enough}",
                (OptionEdit(option="memory_limit", value=enough),),
                least,
                clears_all_errors=True,
            ),
        ),
    )


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
