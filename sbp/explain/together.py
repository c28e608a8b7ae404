"""Why a program has no plan where no single mesh axis is to blame: its pins, its budgets or the
memory limit."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sbp import _jax
from sbp.errors import Diagnostic, Help, Label, OptionEdit, bytes_text
from sbp.explain.change import (
    Change,
    DiagnosisLimits,
    Tried,
    more_text,
    priced,
    tried,
    unshown_text,
)
from sbp.explain.edits import drop_pin, pinned_value
from sbp.explain.names import Names, pinned_text
from sbp.explain.pin_changes import dropped, repinned
from sbp.infer.check import Checker
from sbp.infer.choose import choose
from sbp.infer.constraints import PinSite, pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Codes, local_shape, to_type
from sbp.limits import Budget, boxing_text
from sbp.machine.mesh import MeshSpec
from sbp.plan.fit import best_program
from sbp.plan.ir import Register
from sbp.plan.program import Program
from sbp.plan.verify import over_budget
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Graph, Node

# ---- budgets ------------------------------------------------------------------------------------
# Budgets that no plan meets, and the nearest budgets that a plan meets.


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestBudget:
    """The least size that was found for a budget.

    Arguments:
      budget: the budget with that size.
      program: the plan under it.
      is_least: whether one byte less was tried and gave no plan. Otherwise the search ended at its
        limit.
      plans: the number of plans that were tried.
    """

    budget: Budget
    program: Program
    is_least: bool
    plans: int


def nearest_budget(request: Request, number: int, *, plans: int) -> NearestBudget | None:
    """The least size of a budget under which a plan exists. The other budgets stay.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.
      plans: the most plans that are made.

    Returns:
      None when the other budgets are impossible, too.
    """
    budget = request.budgets[number]

    def within(above: float | None) -> Program | None:
        """The plan with another size of the budget; None for the plan without the budget."""
        budgets = list(request.budgets)
        if above is None:
            del budgets[number]
        else:
            budgets[number] = replace(budget, above=above)
        return best_program(replace(request, budgets=tuple(budgets)))

    best = within(None)
    if best is None:
        return None
    low, size = budget.above, largest(best, budget)
    for turn in range(plans):
        # One turn tries the next smaller size, the next turn halves the distance to the lower end.
        below = turn % 2 == 0
        trial = size - 1 if below else (low + size) / 2
        program = within(trial) if trial > budget.above else None
        if program is not None:
            best, size = program, max(largest(program, budget), budget.above)
        elif below:
            found = replace(budget, above=size)
            return NearestBudget(budget=found, program=best, is_least=True, plans=turn + 1)
        else:
            low = trial
    found = replace(budget, above=size)
    return NearestBudget(budget=found, program=best, is_least=False, plans=plans)


def largest(program: Program, budget: Budget) -> float:
    """The most bytes that one device sends in one run of a collective that a budget covers."""
    request = replace(program.typing.graph_request, budgets=(replace(budget, above=0.0),))
    return max((sent.bytes for sent in over_budget(program.block, request)), default=0.0)


def impossible_budgets(request: Request, limits: DiagnosisLimits) -> Diagnostic | None:
    """The diagnostic of budgets that each mesh axis can keep, but not all axes together; None when
    the budgets are not to blame.

    Arguments:
      request: a program without a plan.
      limits: on the work and on what is shown.
    """
    if not request.budgets or best_program(replace(request, budgets=())) is None:
        return None
    numbers = range(len(request.budgets))
    found = (budget_help(request, number, plans=limits.budget_plans) for number in numbers)
    helps = sorted((h for h in found if h is not None), key=lambda h: h.bytes_per_device)
    rest = len(helps) - limits.helps
    return Diagnostic(
        code="budget",
        severity="error",
        title="no typing over all mesh axes keeps within the budgets",
        notes=(
            *(f"the budget: {b}" for b in request.budgets),
            *((unshown_text(rest),) if rest > 0 else ()),
        ),
        helps=tuple(helps[: limits.helps]),
    )


def budget_help(request: Request, number: int, *, plans: int) -> Help | None:
    """The nearest budget as a help; None when there is none.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.
      plans: the most plans that are made.
    """
    found = nearest_budget(request, number, plans=plans)
    if found is None:
        return None
    size = found.budget.above
    if not found.is_least:
        what = f"the least in {found.plans} plan{'s' * (found.plans > 1)}"
    elif _is_least(request, number, size):
        what = "the least that is possible"
    else:
        what = "the least that was found"
    text = f"allow {bytes_text(size)} in `{request.budgets[number]}`, {what}"
    edit = OptionEdit(option="budgets", position=number, value=size)
    return priced(text, (edit,), found.program)


def _is_least(request: Request, number: int, size: float) -> bool:
    """Whether the checker proves that no smaller size is possible. A search of the chooser without
    result is no proof on several mesh axes.

    Arguments:
      request: a request whose budgets no plan meets.
      number: which budget.
      size: its size in bytes.
    """
    budgets = list(request.budgets)
    budgets[number] = replace(budgets[number], above=size - 1)
    tighter = replace(request, budgets=tuple(budgets))
    return size >= 1 and Checker(tighter).check(explain=False).status == "unsat"


# ---- memory limits ------------------------------------------------------------------------------
# Why no plan fits a memory limit: the values that fill the memory, and the pins without which a
# plan fits.


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
    helps, pins, limited = _freed_pins(least)
    notes += limited
    notes.append("typings that hold less may exist: the search does not try all")
    labels += [
        Label(span=s.span, text=f"{names.site(s)} is pinned {pinned_text(s, mesh)}")
        for s in pins
        if s.span
    ]
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
            *helps,
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


def _freed_pins(least: Program) -> tuple[list[Help], list[PinSite], list[str]]:
    """The pins without which a plan fits the limit, each alone, or else together, those of the
    largest values first: helps that change or drop them, the pins, and notes on what limits left
    out.

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
    notes = list[str]()
    if alone.untried:
        more, were = more_text(alone.untried, "pin"), "were" if alone.untried > 1 else "was"
        notes.append(f"{more} {were} not dropped to see whether a plan fits then")
    if helps[shown:]:
        notes.append(unshown_text(len(helps[shown:])))
    return helps[:shown], freed, notes


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


# ---- all mesh axes together ---------------------------------------------------------------------
# Programs that have a typing on each mesh axis, but not on all axes together.


@dataclass(frozen=True, slots=True, kw_only=True)
class ConflictingPins:
    """The pins that have no typing together.

    Arguments:
      shown: the pins that are shown, and for which a help is looked for.
      unshown: the number of other pins.
      is_minimal: whether pins that the conflict does not need were sorted out. Otherwise these are
        all pins of the program.
    """

    shown: tuple[PinSite, ...]
    unshown: int
    is_minimal: bool


def no_typing_together(request: Request, limits: DiagnosisLimits) -> Diagnostic:
    """The diagnostic when no single mesh axis is to blame: which pins have no typing together, and
    the plans without one of them.

    Arguments:
      request: a program without a plan.
      limits: on the work and on what is shown.
    """
    pins = _conflicting_pins(request, limits)
    labels, notes = _pin_labels(request, pins.shown)
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
            notes=(*notes, *_limit_notes(request, pins)),
        )
    axes = ", ".join(f"`{a}`" for a in request.mesh.names)
    policies = boxing_text(request.boxing, request.axis_policies, request.mesh.names)
    why = (
        f"each axis alone has one under {policies}; together, a dim may be too short for all of"
        " them, and an outer axis cannot split a dim that an inner one already splits"
    )
    found, untried = _helps(request, pins.shown, limits)
    helps = sorted(found, key=lambda h: h.bytes_per_device)
    limited = [*_limit_notes(request, pins)]
    if len(helps) > limits.helps:
        limited.append(unshown_text(len(helps) - limits.helps))
    if untried:
        large = f": {_operations(request)}" if request.size > limits.large else ""
        limited.append(f"{more_text(untried, 'change')} not tried{large}")
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"the program has no typing on the mesh axes {axes} together",
        labels=tuple(labels),
        notes=(*notes, why, *limited),
        helps=tuple(helps[: limits.helps]),
    )


def _operations(request: Request) -> str:
    return f"the program has {request.size:,} operations"


def _limit_notes(request: Request, pins: ConflictingPins) -> Iterator[str]:
    """Notes about pins that limits left out."""
    if not pins.is_minimal:
        yield f"not all of these pins need be part of the conflict: {_operations(request)}"
    if pins.unshown:
        yield f"{more_text(pins.unshown, 'pin')} {'are' if pins.unshown > 1 else 'is'} not shown"


def _conflicting_pins(request: Request, limits: DiagnosisLimits) -> ConflictingPins:
    """The pins that have no typing together. In a large program these are all pins; in a small one,
    pins that the conflict does not need are sorted out."""
    sites = pin_sites(request)
    needed = list(sites)
    is_minimal = len(sites) * request.size <= limits.pin_trials
    if is_minimal:
        for site in reversed(sites):
            others = [s for s in sites if s not in needed or s is site]
            if choose(functools.reduce(drop_pin, others, request)) is None:
                needed.remove(site)
    return ConflictingPins(
        shown=tuple(needed[: limits.pins]),
        unshown=max(0, len(needed) - limits.pins),
        is_minimal=is_minimal,
    )


def _pin_labels(request: Request, needed: Sequence[PinSite]) -> tuple[list[Label], list[str]]:
    """The atoms that each pin asks: a label at its line or at its first reader's, else a note.

    Arguments:
      request: the program.
      needed: the pins.
    """
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


def _shape(request: Request, site: PinSite) -> tuple[int, ...]:
    return tuple(request.graph.aval(pinned_value(request.graph, site)).shape)


def _helps(
    request: Request, pins: Sequence[PinSite], limits: DiagnosisLimits
) -> tuple[list[Help], int]:
    """The plans after a change of the pins, and how many were not made: of pins that ask what
    another one asks, of pins dropped, and where neither has a plan, of two pins dropped.

    Arguments:
      request: the program.
      pins: the pins.
      limits: on the work and on what is shown.
    """
    enough, most = limits.plans_of(request.size, 1)
    agreeing = (
        repinned(request, site, other.codes)
        for site, other in itertools.permutations(pins, 2)
        if site.codes != other.codes and len(_shape(request, site)) == len(_shape(request, other))
    )
    drops = (dropped(request, site) for site in pins)
    found = [
        tried((c for c in changes if c.edits), plans=most, enough=enough)
        for changes in (agreeing, drops)
    ]
    untried = sum(t.untried for t in found)
    if not any(t.accepted for t in found) and request.size > limits.large:
        untried += len(pins)
    elif not any(t.accepted for t in found):
        pairs = _two_dropped(request, pins, limits)
        found = [tried((c for c in pairs if c.edits), plans=limits.pair_plans)]
        untried += found[0].untried
    return [one.help(program) for t in found for one, program in t.accepted], untried


def _two_dropped(
    request: Request, pins: Sequence[PinSite], limits: DiagnosisLimits
) -> Iterator[Change]:
    """Two pins dropped: one of these, and one of those that have no typing together without it.

    Arguments:
      request: the program.
      pins: the pins.
      limits: on the pins that are shown.
    """
    for site in pins:
        for other in _conflicting_pins(drop_pin(request, site), limits).shown:
            yield dropped(request, site, other)
