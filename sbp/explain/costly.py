"""Notes and warnings about a plan: annotations that make it more expensive, and matrices that are
gathered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from sbp.errors import Diagnostic, Help, Label, bytes_text
from sbp.explain.change import tried
from sbp.explain.edits import drop_pins
from sbp.explain.names import Names, pinned_text
from sbp.explain.pin_changes import dropped, repinned
from sbp.infer.choose import choose
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code
from sbp.plan.fit import best_program
from sbp.plan.ir import Apply
from sbp.plan.program import PlannedBox, Program
from sbp.plan.text import shape_text
from sbp.signatures import traits_of
from sbp.source.reader import scope_of, source_text
from sbp.trace.graph import Node

# ---- gathered matrices --------------------------------------------------------------------------
# Notes of large matrices that are gathered for an operator that takes them whole.


GATHERED_BYTES = 2**20
"""Bytes per device and call above which a gathered matrix is noted."""


def gathered_matrices(program: Program) -> tuple[Diagnostic, ...]:
    """A note for each matrix that is split, and that a decomposition or a Fourier transform takes
    whole, where more than `GATHERED_BYTES` are sent for it. One that is gathered before a loop and
    read inside has no note; the table of collectives has it."""
    found: dict[int, Diagnostic] = {}
    for planned in program.boxes():
        axes = [
            name
            for name, have, take in zip(
                program.mesh.names, planned.box.source.codes, planned.box.target.codes, strict=True
            )
            if have > 0 and take == 0
        ]
        if not axes or planned.bytes_per_device <= GATHERED_BYTES:
            continue
        for node in _taking_whole(planned):
            found.setdefault(node.id, _note(program, planned, node, axes))
    return tuple(found.values())


def _taking_whole(planned: PlannedBox) -> Iterator[Node]:
    """The operators that take a gathered value whole, as it is or after elementwise operators and
    operators that move elements.

    Arguments:
      planned: the conversion that gathers it.
    """
    target = planned.box.target
    whole = {target}
    for i in planned.block.instructions:
        if not isinstance(i, Apply) or whole.isdisjoint(i.ins):
            continue
        traits = traits_of(i.node.op)
        if traits.whole:
            yield i.node
        elif traits.elementwise or traits.moves:
            whole.update(r for r in i.outs if r.codes == target.codes)


def _note(program: Program, planned: PlannedBox, node: Node, axes: list[str]) -> Diagnostic:
    """The note of one operator.

    Arguments:
      program: the plan.
      planned: the conversion of its operand.
      node: the operator.
      axes: the mesh axes along which the operand is gathered.
    """
    shape = shape_text(program.graph.avals[planned.box.source.value])
    over = " and ".join(f"`{a}`" for a in axes)
    sent = bytes_text(planned.bytes_per_device)
    label = f"takes {shape} whole: gathered on {over}, {sent} per device"
    return Diagnostic(
        code="gathered-matrix",
        severity="note",
        title=f"{node.name} `{source_text(node.span)}` is computed whole on every device of {over}",
        labels=(Label(span=node.span, text=label, primary=True),) if node.span else (),
        notes=(f"{node.name} can be split only along dims before those that it takes whole",),
    )


# ---- costly annotations -------------------------------------------------------------------------
# Annotations that make a plan more expensive.


DEARER = 0.9
"""An annotation is costly when the plan without it takes at most this share of the time ..."""

FLOOR_SECONDS, FLOOR_BYTES = 10e-6, 2**20
"""... and saves at least so many seconds; or sends at most that share of the bytes, when the plan
sends more bytes than this."""

SOLUTIONS, NODES_SOLVED = 20, 12_000
"""Choices of types made to find costly annotations, one for each annotation, and the nodes that all
of them have together."""


def costly_annotations(program: Program) -> tuple[Diagnostic, ...]:
    """Names each annotation whose removal makes the plan at least 10 % cheaper, with the price both
    ways; and says how many annotations were not looked at. One choice of types without any
    annotation clears most programs."""
    request = dataclasses.replace(program.typing.graph_request, memory_limit=None, donated=())
    sites = [s for s in pin_sites(request) if s.source == "annotation" and s.span]
    most = min(SOLUTIONS, NODES_SOLVED // max(1, request.size))

    def seconds(pins: Sequence[PinSite], limit: float = math.inf) -> float:
        typing = choose(drop_pins(request, *pins), cutoff=limit)
        return math.inf if typing is None else typing.seconds

    # The program's seconds may have a memory limit in them and are then too high; yet they clear
    # most programs with one choice of types.
    limit = DEARER * program.cost.seconds
    if not sites or (most and seconds(sites, limit) > limit):
        return ()
    limit = DEARER * seconds(()) if most else 0.0
    found = _dearest_first(
        request, program, [s for s in sites[:most] if seconds([s], limit) <= limit]
    )
    if len(sites) > most:
        title = (
            f"{len(sites) - most} of {len(sites)} annotations were not checked for what they cost"
        )
        why = (
            f"at most {SOLUTIONS} annotations are checked, and fewer in a program of more than"
            f" {NODES_SOLVED // SOLUTIONS} operations; this one has {request.size:,}"
        )
        found.append(
            Diagnostic(code="costly-annotation", severity="note", title=title, notes=(why,))
        )
    return tuple(found)


def _dearest_first(request: Request, program: Program, dear: Sequence[PinSite]) -> list[Diagnostic]:
    """The costly annotations among some, dearest first. Each is judged with the dearer ones
    dropped: an annotation that only follows another one costs nothing without it.

    Arguments:
      request: the program.
      program: its plan.
      dear: the annotations without which a choice of types was cheaper.
    """
    whole = best_program(request) if dear else None  # a plan counts the reuse of conversions
    alone = [(best_program(drop_pins(request, site)), site) for site in dear]
    ranked = sorted(
        ((p.cost.seconds, n, p, site) for n, (p, site) in enumerate(alone) if p is not None),
        key=lambda one: one[:2],
    )
    found: list[Diagnostic] = []
    for _, _, without, site in ranked:
        assert whole is not None
        if found:
            without = best_program(drop_pins(request, site))
        if without is None or without.cost.seconds > DEARER * whole.cost.seconds:
            continue
        if _matters(program, whole.cost.seconds, without):
            found.append(_costly(request, site, whole, without, dearer=len(found)))
            request, whole = drop_pins(request, site), without
    return found


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
    request: Request, site: PinSite, program: Program, without: Program, *, dearer: int
) -> Diagnostic:
    """The warning about one annotation.

    Arguments:
      request: the program.
      site: the annotation.
      program: the plan with it.
      without: the plan without it.
      dearer: the number of dearer annotations that both plans leave out.
    """
    assert site.span is not None
    before, after = program.cost, without.cost
    rise = before.seconds / after.seconds - 1 if after.seconds else math.inf
    price = (
        f"{bytes_text(before.bytes_per_device)} and {_seconds(before.seconds)} per device with it,"
        f" {bytes_text(after.bytes_per_device)} and {_seconds(after.seconds)} without"
    )
    note = "both plans and the helps are without the dearer annotations above"
    helps, drop = [*following(request, site, without)], dropped(request, site)
    helps += [drop.help(without)] if drop.edits else []
    return Diagnostic(
        code="costly-annotation",
        severity="warning",
        title=(
            f"pinning {Names.of(request.graph).site(site)} to"
            f" {pinned_text(site, request.mesh)} makes the plan {100 * rise:.0f} % dearer"
        ),
        labels=(Label(span=site.span, text=price, primary=True),),
        notes=(note,) if dearer else (),
        helps=tuple(helps),
        scope=scope_of(site.nodes[0]),
    )


def following(request: Request, site: PinSite, without: Program) -> Iterator[Help]:
    """The pin in the type in which the plan without it reads the value; none where that is no type
    for the pin, or where the pin is costly then, too.

    Arguments:
      request: the program with the pin.
      site: the pin, an annotation.
      without: the plan without it.
    """
    codes = next(_read(site, without), site.codes)
    change = repinned(request, site, codes)
    if codes != site.codes and change.edits:
        for one, program in tried([change], plans=1).accepted:
            if without.cost.seconds > DEARER * program.cost.seconds:
                yield one.help(program)


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


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
