"""Programs without a pin or a limit: annotations that make a plan more expensive, budgets and
memory limits that no plan keeps, and pins that have no typing together. Beside them, matrices that
a plan gathers."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sbp.errors import (
    SHOWN,
    Diagnostic,
    Help,
    Label,
    OptionEdit,
    Span,
    bytes_text,
    counted,
    seconds_text,
)
from sbp.explain.change import (
    DiagnosisLimits,
    Tried,
    applicable,
    boxing_text,
    help_with_price,
    labels_at,
    left_out,
    tried,
)
from sbp.explain.names import Names, pinned_text, pinned_value, recomputed_lines
from sbp.explain.pin_changes import drop_pins, repinned, wanted_codes, without_pins
from sbp.infer.choose import choose
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Codes, local_bytes, local_shape, to_type
from sbp.limits import MOST_BYTES
from sbp.plan.fit import best_if_near, best_program
from sbp.plan.ir import Apply, Register
from sbp.plan.program import PlannedBox, Program, shape_text
from sbp.plan.verify import over_budget
from sbp.signatures import traits_of
from sbp.source.reader import scope_of, source_text, users_span
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import Node

# ---- gathered matrices --------------------------------------------------------------------------
# Notes of large matrices that are gathered for an operator that takes them whole.


NOTED_BYTES = 2**20
"""Bytes per device and call above which a gathered matrix is noted, and the bytes of a plan above
which an annotation is costly for what it sends."""


def unchecked_regions(program: Program) -> Iterator[Diagnostic]:
    """A note that sbp runs the program's `jax.shard_map` regions as they are written."""
    own = [n for n in program.written_by_hand() if not n.title]
    regions = [n for n in own if not n.backward] or own
    if regions:
        yield Diagnostic(
            code="not-analysed",
            severity="note",
            title=f"sbp did not check the inside of {counted(len(regions), 'jax.shard_map region')}"
            "; use sbp.check_shard_map, or `sbp check --shard-map`",
            labels=labels_at(map(users_span, regions), ""),
        )


def gathered_matrices(program: Program) -> tuple[Diagnostic, ...]:
    """A note for each matrix that is split, and that a decomposition or a Fourier transform takes
    whole, where more than `NOTED_BYTES` are sent for it. One that is gathered before a loop and
    read inside has no note; the table of collectives has it."""
    found: dict[int, Diagnostic] = {}
    for planned in program.boxes():
        source, target = planned.box.source, planned.box.target
        over = " and ".join(
            f"`{name}`"
            for name, have, take in zip(program.mesh.names, source.codes, target.codes, strict=True)
            if have > 0 and take == 0
        )
        shape, sent = shape_text(program.graph.avals[source.value]), planned.bytes_per_device
        label = f"takes {shape} whole, so sbp gathers it on {over}: {bytes_text(sent)} per device"
        for node in _taking_whole(planned) if over and sent > NOTED_BYTES else ():
            note = Diagnostic(
                code="gathered-matrix",
                severity="note",
                title=f"{node.name} `{source_text(node.span)}` is computed whole on every device of"
                f" {over}",
                labels=labels_at([node.span], label),
                notes=(
                    f"sbp can split {node.name} only along its batch dims: each device needs the"
                    " other dims whole",
                ),
            )
            found.setdefault(node.id, note)
    return tuple(found.values())


def _taking_whole(planned: PlannedBox) -> Iterator[Node]:
    """The operators that take a gathered value whole, as it is or after elementwise operators and
    operators that move elements.

    Arguments:
      planned: the conversion that gathers it.
    """
    whole = {planned.box.target}
    for i in planned.block.instructions:
        if isinstance(i, Apply) and not whole.isdisjoint(i.ins):
            traits = traits_of(i.node.op)
            if traits.whole:
                yield i.node
            elif traits.elementwise or traits.moves:
                whole.update(r for r in i.outs if r.codes == planned.box.target.codes)


# ---- costly annotations -------------------------------------------------------------------------
# Annotations that make a plan more expensive.


DEARER = 0.9
"""An annotation is costly when the plan without it takes at most this share of the time ..."""

FLOOR_SECONDS = 10e-6
"""... and saves at least so many seconds; or sends at most that share of the bytes, when the plan
sends more than `NOTED_BYTES`."""

SOLUTIONS, FIRST_NODES = 20, 2_000
"""Choices of types made to find costly annotations, one for each annotation, and the nodes that all
of them have together unless the user asks for them."""


def costly_annotations(
    program: Program,
    *,
    refine: bool = False,
    solving: Callable[[int], None] = lambda left: None,
) -> tuple[Diagnostic, ...]:
    """Names each annotation whose removal makes the plan at least 10 % cheaper, with the price both
    ways; and says how many annotations were not looked at. One choice of types without any
    annotation clears most programs.

    Arguments:
      program: the plan.
      refine: whether to choose types however large the program is.
      solving: called before each choice with the most choices that are left.
    """
    request = replace(program.request, memory_limit=None)
    sites = [s for s in pin_sites(request) if s.source == "annotation" and s.span]
    most = SOLUTIONS if refine else min(SOLUTIONS, FIRST_NODES // max(1, request.size))
    left = itertools.count(min(most, len(sites)) + 1, -1)

    def seconds(pins: Sequence[PinSite], limit: float = math.inf) -> float:
        solving(next(left))
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
        title = f"sbp did not check what {len(sites) - most} of {len(sites)} annotations cost"
        why = (
            f"a report of a program of {request.size:,} operations checks {most};"
            f" plan.report(refine=True) checks {min(SOLUTIONS, len(sites))}"
            if most < SOLUTIONS
            else f"at most {SOLUTIONS} annotations are checked"
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
    planned = [(p, site) for site in dear if (p := best_program(drop_pins(request, site)))]
    found: list[Diagnostic] = []
    for without, site in sorted(planned, key=lambda one: one[0].cost.seconds):
        without = best_program(drop_pins(request, site)) if found else without
        if whole and without and _matters(program, whole.cost.seconds, without):
            found.append(_costly(request, site, whole, without, dearer=len(found)))
            request, whole = drop_pins(request, site), without
    return found


def _matters(program: Program, whole: float, without: Program) -> bool:
    """Whether an annotation is costly, and its cost large enough to be reported: a tenth of a plan
    may be a microsecond.

    Arguments:
      program: the plan.
      whole: seconds of the plan, without a memory limit.
      without: the plan without the annotation.
    """
    sent, left = program.cost.bytes_per_device, without.cost.bytes_per_device
    return without.cost.seconds <= DEARER * whole and (
        whole - without.cost.seconds >= FLOOR_SECONDS
        or (sent > NOTED_BYTES and left <= DEARER * sent)
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
    slower = f"{100 * rise:.0f}% slower" if rise < 10 else f"{rise + 1:.0f} times as slow"
    price = (
        f"with this pin, each device sends {bytes_text(before.bytes_per_device)} and a call takes"
        f" {seconds_text(before.seconds)}; without it, {bytes_text(after.bytes_per_device)} and"
        f" {seconds_text(after.seconds)}"
    )
    drop = without_pins(request, site)
    dropped = [drop.help(without)] if drop.edits else []
    return Diagnostic(
        code="costly-annotation",
        severity="warning",
        title=(
            f"pinning {Names(request.graph).site(site)} to"
            f" {pinned_text(site, request.mesh.names)} makes the plan {slower} in the"
            " cost model"
        ),
        labels=(Label(span=site.span, text=price, primary=True),),
        notes=("sbp computed these prices without the annotations of the warnings above",)
        if dearer
        else (),
        helps=(*following(request, site, without), *dropped),
        scope=scope_of(site.nodes[0]),
    )


def following(request: Request, site: PinSite, without: Program) -> Iterator[Help]:
    """The help that changes a costly pin: to the type in which the plan without the pin reads the
    value. It gives none where a pin cannot ask that type, or where the changed pin is costly too.

    Arguments:
      request: the program with the pin.
      site: the pin, an annotation.
      without: the plan without it.
    """
    rows, made = without.typing.rows, {node.inputs[0] for node in site.nodes}
    # Partial codes are left out, which a pin would make last.
    reads = (
        codes
        for node in without.typing.graph.walk()
        if node.id in rows
        for operand, codes in zip(node.inputs, rows[node.id].ins, strict=False)
        if operand in made and min(codes, default=0) >= 0
    )
    codes = tuple(
        None if asked is None else code
        for asked, code in zip(site.codes, next(reads, site.codes), strict=True)
    )
    changes = [repinned(request, site, codes)] if codes != site.codes else []
    for one, program in tried(changes, plans=1).accepted:
        if without.cost.seconds > DEARER * program.cost.seconds:
            yield one.help(program)


# ---- budgets ------------------------------------------------------------------------------------
# Budgets that no plan meets, and the nearest budgets that a plan meets.


def impossible_budgets(request: Request, limits: DiagnosisLimits) -> Diagnostic | None:
    """The diagnostic of budgets that each mesh axis can keep, but not all axes together; None when
    the budgets are not to blame.

    Arguments:
      request: a program without a plan.
      limits: on the work and on what is shown.
    """
    if not request.budgets or best_program(replace(request, budgets=())) is None:
        return None
    found = (budget_help(request, k, plans=limits.plans) for k in range(len(request.budgets)))
    helps = sorted(filter(None, found), key=lambda h: h.bytes_per_device)
    return Diagnostic(
        code="budget",
        severity="error",
        title="no plan over all mesh axes keeps within the budgets",
        notes=(
            *(f"the budget: {b}" for b in request.budgets),
            *left_out(len(helps) - limits.shown, 0),
        ),
        helps=tuple(helps[: limits.shown]),
    )


def budget_help(request: Request, number: int, *, plans: int) -> Help | None:
    """The least size of a budget under which a plan was found, as a help; None when the other
    budgets are impossible, too. The other budgets stay.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.
      plans: the most plans that are made, each for a budget a byte below the largest collective of
        the plan before it.
    """
    budget, above = request.budgets[number], float(MOST_BYTES)
    found: Program | None = None
    for _ in range(plans + 1):
        budgets = list(request.budgets)
        budgets[number] = replace(budget, above=above)
        program = best_program(replace(request, budgets=tuple(budgets)))
        if program is None:
            break
        watched = replace(program.typing.graph_request, budgets=(replace(budget, above=0.0),))
        sent = max((size for _, _, size, _ in over_budget(program.block, watched)), default=0.0)
        found, above = program, sent - 1
        if above <= budget.above:
            break
    size = math.ceil(above + 1)
    return found and help_with_price(
        f"{replace(budget, above=size)!r} allows {bytes_text(size)}, the smallest size with"
        " which sbp found a plan",
        (OptionEdit(option="budgets", position=number, value=size),),
        found,
    )


# ---- memory limits ------------------------------------------------------------------------------
# Why no plan fits a memory limit: the values that fill the memory, and the pins without which a
# plan fits.


FILLS = 0.001
"""Share of the least memory that was found that a value takes at least to be named."""


def memory_diagnostic(least: Program, limit: float) -> Diagnostic:
    """Says that no plan fits the memory limit, what is largest in the one of least memory, and
    which split would make it smaller."""
    names, mesh, graph = Names(least.graph), least.mesh, least.typing.graph
    peak = least.cost.peak_memory_bytes
    kept = [r for n, r in enumerate(least.block.inputs) if n not in least.reused]
    live = (*kept, *least.fullest, *least.block.outputs)
    held = {
        (r.value, r.codes) for r in live if isinstance(r, Register) and r.value in least.graph.avals
    }
    ranked = sorted((-local_bytes(graph.avals[v], t, mesh.sizes), (v, t)) for v, t in held)
    notes, rest, labels = dict[str, None](), list[float](), dict[Span, Label]()
    for size, (value, codes) in ranked:
        text, span = _value_text(names, least, value, codes)
        if text in notes or -size < FILLS * peak or len(notes) == SHOWN:
            rest.append(-size)
        else:
            notes[text] = None
            if span and span not in labels:
                labels[span] = Label(
                    span=span, text=f"{bytes_text(-size)} per device", primary=not labels
                )
    if rest:
        notes[f"{counted(len(rest), 'more value')}: {bytes_text(sum(rest))} per device in all"] = (
            None
        )
    helps, pins, limited = _freed_pins(least)
    pinned = (
        Label(span=s.span, text=f"{names.site(s)} is pinned {pinned_text(s, mesh.names)}")
        for s in pins
        if s.span
    )
    found, allowed, enough = bytes_text(peak), bytes_text(limit), math.ceil(peak)
    if found == allowed:
        found, allowed = f"{enough} bytes", f"{limit:.0f} bytes"
    looser = OptionEdit(option="memory_limit", value=enough)
    return Diagnostic(
        code="memory-limit",
        severity="error",
        title=(
            f"sbp found no plan that fits in memory_limit, {allowed} per device; the"
            f" smallest plan that it found takes {found} per device"
        ),
        labels=(*labels.values(), *pinned),
        notes=(
            *notes,
            *limited,
            *_bodies_kept(least),
            "a smaller plan may exist: sbp does not try every plan",
        ),
        helps=(*_remat(least), *helps, help_with_price(f"memory_limit={enough}", (looser,), least)),
    )


def _bodies_kept(least: Program) -> tuple[str, ...]:
    """That sbp does not recompute loops, branches and regions, where the program has a gradient."""
    nodes = least.request.graph.nodes
    bodies = any((n.regions or n.op == SHARD_MAP) and not n.backward for n in nodes)
    return applicable(
        {
            "sbp does not run loops, branches and regions again in the backward pass;"
            " jax.checkpoint around them, or in the body of a loop, may save"
            " memory": least.request.remat == "auto" and bodies and any(n.backward for n in nodes)
        }
    )


def _remat(least: Program) -> Iterator[Help]:
    """The option that lets the backward pass make values again, where a plan then fits."""
    request = replace(least.request, remat="auto")
    found = best_program(request) if least.request.remat == "never" else None
    if found is not None:
        yield help_with_price(
            f'remat="auto": the backward pass runs {recomputed_lines(found.graph)} again, as with'
            " jax.checkpoint",
            (OptionEdit(option="remat", value="auto"),),
            found,
        )


def _value_text(names: Names, least: Program, value: int, codes: Codes) -> tuple[str, Span | None]:
    """What a value takes of the memory of a device and what would make it smaller, in words; and
    the line that makes it.

    Arguments:
      names: the names of the program's values.
      least: the plan.
      value: the value.
      codes: its type there.
    """
    mesh, aval, maker = least.mesh, least.typing.graph.avals[value], names.maker(value)
    span = users_span(maker) if maker else None
    of_line = (
        f"a value of `{source_text(span, 40) or maker.op}` at line {span.line}"
        if maker and span
        else "a value"
    )
    text = (
        f"{names.value(value) or of_line} of shape {tuple(aval.shape)} as"
        f" {to_type(codes, mesh)!r} takes {bytes_text(local_bytes(aval, codes, mesh.sizes))} per"
        " device"
    )
    for size, k, after in sorted(_splits(aval, codes, mesh.sizes))[:1]:
        text += (
            f"; split as S({after[k] - 1}) on `{mesh.names[k]}`, it would take {bytes_text(size)}"
        )
    return text, span


def _freed_pins(least: Program) -> tuple[list[Help], list[PinSite], tuple[str, ...]]:
    """The pins without which a plan fits the limit, each alone, or else together, those of the
    largest values first: helps that change or drop them, the pins, and notes on what limits left
    out.

    Arguments:
      least: the plan of least memory that was found.
    """
    # What other pins make possible is planned without recomputation, which would take several times
    # as long.
    request, limits = replace(least.request, remat="never"), DiagnosisLimits()
    sites = sorted(
        pin_sites(request),
        key=lambda s: (
            -local_bytes(  # with B on the axes that the pin leaves free
                request.graph.aval(pinned_value(request.graph, s)),
                tuple(c or 0 for c in s.codes),
                request.mesh.sizes,
            )
        ),
    )
    drops = {d: [s] for s in sites if (d := without_pins(request, s)).edits}
    (_, most), shown = limits.plans_of(request.size, 1), limits.shown - 1
    plan = functools.partial(best_if_near, full=least)
    alone = tried(drops, plans=most, helps=shown, plan=plan)
    if not alone.accepted:
        free = [
            s
            for [s] in drops.values()
            if not s.is_input or request.demand.source(s.position) != "argument"
        ]
        drops |= {
            without_pins(request, *free[:n]): free[:n] for n in range(2, min(len(free), most) + 1)
        }
    several = (d for d, pins in drops.items() if len(pins) > 1)
    together = tried(several, plans=most, helps=1, plan=plan)
    helps, freed = list[Help](), list[PinSite]()
    for one, program in (*alone.accepted, *together.accepted):
        if len(drops[one]) == 1 and len(helps) < shown:
            split = _split_pin(request, drops[one][0], plan)
            helps += [change.help(found) for change, found in split.accepted]
        helps.append(one.help(program))
        freed += drops[one]
    return helps[:shown], freed, left_out(len(helps) - shown, alone.untried)


def _split_pin(request: Request, site: PinSite, plan: Callable[[Any], Program | None]) -> Tried:
    """A pin that asks one split more, with which a plan fits: of those with the smallest shard, the
    first dim.

    Arguments:
      request: the program, with its memory limit.
      site: the pin.
      plan: plans a request.
    """
    value, codes = pinned_value(request.graph, site), tuple(c or 0 for c in site.codes)
    if not isinstance(value, int) or min(codes, default=0) < 0:
        return Tried()
    changes = [
        repinned(request, site, wanted_codes(site.codes, {k: after[k]}))
        for _, k, after in sorted(_splits(request.graph.avals[value], codes, request.mesh.sizes))
        if site.codes[k] is not None
    ]
    return tried(changes, plans=len(changes), helps=1, plan=plan)


def _splits(aval: Any, codes: Codes, sizes: Sequence[int]) -> Iterator[tuple[float, int, Codes]]:
    """Types with one more split: of a dim that divides, on a mesh axis where the value is B. Each
    with the bytes of a shard, and the position of that axis.

    Arguments:
      aval: shape and dtype of the value.
      codes: its type.
      sizes: those of the mesh axes.
    """
    for k, n in enumerate(sizes):
        for dim, size in enumerate(local_shape(aval.shape, codes, sizes)):
            if n > 1 and codes[k] == 0 and size % n == 0 and size:
                after = tuple(1 + dim if i == k else c for i, c in enumerate(codes))
                yield local_bytes(aval, after, sizes), k, after


# ---- all mesh axes together ---------------------------------------------------------------------
# Programs that have a typing on each mesh axis, but not on all axes together.


def no_typing_together(request: Request, limits: DiagnosisLimits) -> Diagnostic:
    """The diagnostic when no single mesh axis is to blame: which pins have no typing together, and
    the plans without one of them.

    Arguments:
      request: a program without a plan.
      limits: on the work and on what is shown.
    """
    every, is_minimal = _conflicting_pins(request, limits)
    pins, helps = every[: limits.pins], list[Help]()
    placed = _places(request, pins)
    spans = [(span, text) for span, text in placed if span]
    notes = [text for span, text in placed if not span]
    if sum(n > 1 for n in request.mesh.sizes) < 2:
        # One axis: the checker has decided the whole program, and says that there is a typing.
        title = (
            "sbp found no types for this program, although types exist; this is a limit of sbp's"
            " search, please report it"
        )
    else:
        axes = ", ".join(f"`{a}`" for a in request.mesh.names)
        title = f"the program has no typing on the mesh axes {axes} together"
        notes.append(
            f"under {boxing_text(request)}, the program has types on each mesh axis alone, but none"
            " on all of them together. A dim may be too short to split over all of them, or an"
            " inner axis already splits it"
        )
        tries = _tries(request, pins, limits)
        helps = sorted(
            (one.help(program) for t in tries for one, program in t.accepted),
            key=lambda h: h.bytes_per_device,
        )
        notes += left_out(len(helps) - limits.shown, sum(t.untried for t in tries))
    unshown = len(every) - limits.pins
    notes += applicable(
        {
            f"some of these pins may not be part of the conflict: with {request.size:,} operations,"
            " sbp did not try to drop each of them": not is_minimal,
            f"not shown: {counted(unshown, 'more pin')}": unshown > 0,
        }
    )
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=title,
        labels=tuple(
            Label(span=span, text=text, primary=n == 0) for n, (span, text) in enumerate(spans)
        ),
        notes=tuple(notes),
        helps=tuple(helps[: limits.shown]),
    )


def _conflicting_pins(request: Request, limits: DiagnosisLimits) -> tuple[list[PinSite], bool]:
    """The pins that have no typing together, and whether pins that the conflict does not need were
    sorted out. In a large program these are all pins."""
    sites = pin_sites(request)
    needed, is_minimal = list(sites), len(sites) * request.size <= limits.work
    for site in reversed(sites) if is_minimal else ():
        others = [s for s in sites if s not in needed or s is site]
        if choose(drop_pins(request, *others)) is None:
            needed.remove(site)
    return needed, is_minimal


def _places(request: Request, pins: Sequence[PinSite]) -> list[tuple[Span | None, str]]:
    """For each pin its line, or else the line of its first reader, with the atoms that it asks."""
    graph, names = request.graph, Names(request.graph)
    return [
        (
            site.span
            or next(
                (n.span for n in graph.walk() if n.span and pinned_value(graph, site) in n.inputs),
                None,
            ),
            f"{names.site(site)} is pinned {pinned_text(site, request.mesh.names)}",
        )
        for site in pins
    ]


def _tries(request: Request, pins: Sequence[PinSite], limits: DiagnosisLimits) -> list[Tried]:
    """The plans after a change of the pins: of pins that ask what another one asks, of pins
    dropped, and where neither has a plan, of two pins dropped.

    Arguments:
      request: the program.
      pins: the pins.
      limits: on the work and on what is shown.
    """
    enough, most = limits.plans_of(request.size, 1)
    ranks = {s: len(request.graph.aval(pinned_value(request.graph, s)).shape) for s in pins}
    agreeing = (
        repinned(request, site, other.codes)
        for site, other in itertools.permutations(pins, 2)
        if site.codes != other.codes and ranks[site] == ranks[other]
    )
    drops = (without_pins(request, site) for site in pins)
    # Two pins: one of these, and one of those that have no typing together without it.
    pairs = (
        without_pins(request, site, other)
        for site in pins
        for other in _conflicting_pins(drop_pins(request, site), limits)[0][: limits.pins]
    )
    tries = [tried(changes, plans=most, enough=enough) for changes in (agreeing, drops)]
    if not any(t.accepted for t in tries):
        tries.append(tried(pairs, plans=most))
    return tries
