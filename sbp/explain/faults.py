"""Why a program has no typing, in the user's own lines, with helps that were tried.

`sbp.infer.check` finds what is wrong, `sbp.explain.helps` which edits mend it. This module makes
the diagnostics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sbp import _jax
from sbp.errors import Diagnostic, Help, Label
from sbp.explain.change import (
    Arriving,
    BlamedFault,
    DiagnosisLimits,
    IndependentFaults,
    Trials,
    more_text,
    priced,
)
from sbp.explain.edits import drop_pin, pinned_value
from sbp.explain.fault_notes import (
    NearRows,
    atoms_text,
    budget_notes,
    left,
    limit_notes,
    near_rows,
    notes,
    region_words,
    rule,
)
from sbp.explain.helps import FoundHelps, Repair
from sbp.explain.names import BATCHED, Frames, Names, asked_text
from sbp.explain.pin_changes import carried_text, edits_of
from sbp.explain.together import budget_help, impossible_budgets, no_typing_together
from sbp.infer.check import Checker, CheckResult
from sbp.infer.constraints import POLICY_LITERAL, Constraint, budget_literal
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.limits import boxing_text
from sbp.plan.fit import best_program
from sbp.source.reader import scope_of, users_span
from sbp.trace.collector import collecting_less
from sbp.trace.graph import Node
from sbp.trace.numbering import twins

# ---- arrivals -----------------------------------------------------------------------------------
# What arrives at the line of a fault, in words.


def arrives(fault: BlamedFault, node: Node, made: Mapping[int, tuple[Code, ...]]) -> str:
    """The primary label: what arrives at the operands, and what to reduce.

    Arguments:
      fault: the fault.
      node: the node at which it shows.
      made: for each operand the codes in which it can arrive.
    """
    shown = fault.names.shown(node)
    frames = Frames(fault.names, node)
    users = {i: frames.operands(i, codes) for i, codes in made.items()}
    behind = {
        i: f" {BATCHED}" if max(codes, default=0) > 0 and fault.names.is_behind(node, i) else ""
        for i, codes in users.items()
    }
    told = list(
        dict.fromkeys(f"{shown[i]} is {atoms_text(codes)}{behind[i]}" for i, codes in users.items())
    )
    partial = list(dict.fromkeys(shown[i] for i, codes in made.items() if left(codes) == "partial"))
    n = fault.request.mesh.sizes[fault.position]
    for i, codes in made.items():
        dim = codes[0] - 1 if len(codes) == 1 else -1
        size = fault.request.graph.aval(node.inputs[i]).shape[dim] if dim >= 0 else n
        if size < n:
            return (
                f"{shown[i]} is {atoms_text(users[i])}{behind[i]}, but its dim {users[i][0] - 1} of"
                f" size {size} is shorter than {n} devices"
            )
    if len(fault.found.sink) == 1:
        hint = (
            ""
            if len(partial) < len(told)
            else "; reduce it first"
            if len(told) == 1
            else "; reduce them first"
        )
        return f"{', '.join(told)} here, which {node.name} does not take{hint}"
    direct = all(
        any(fault.direct(node, c, k.operand) for c in fault.found.pins) for k in fault.found.sink
    )
    if len(told) == 1:
        return (
            f"{told[0]} on both sides; reduce it first" if partial else f"{told[0]} on both sides"
        )
    meet = (
        "these two cannot meet here"
        if direct and len(told) == 2
        else f"{', '.join(told)}: they cannot meet here"
    )
    return meet + (
        f"; reduce {'one of them' if len(partial) == len(told) else partial[0]} first"
        if partial
        else ""
    )


# ---- diagnostics --------------------------------------------------------------------------------


LIMITS = DiagnosisLimits()

REASONS = 4
"""Lines and reasons that are shown where no pin is to blame."""


@collecting_less()
def explain(request: Request, *, limits: DiagnosisLimits = LIMITS) -> tuple[Diagnostic, ...]:
    """Says why a program has no typing: each independent fault once, in source order.

    Arguments:
      request: the program, and what its types are chosen by.
      limits: on the work and on what is shown. The notes say what they leave out.

    Returns:
      At least one diagnostic, with code `no-signature`, `annotation-conflict`, `budget`,
      `no-typing` or `solver-limit`.
    """
    reuse = request.size <= limits.reused
    request = dataclasses.replace(request, memory_limit=None, donated=(), reuse=reuse)
    checker = Checker(request, rlimit=limits.solver_resources)
    most = limits.faults_shown(request.size)
    faults = _independent(checker, request, 3 * most)
    left_out = not reuse and bool(twins(request.graph).again)
    trials = Trials(request, checker, faults, limits, reuse_left_out=left_out)
    names, shown = Names.of(request.graph), min(len(faults.first), most)
    diagnostics = [
        diagnostic(BlamedFault(trials, fault, names, shown)) for fault in faults.first[:shown]
    ]
    if faults.last.status == "unknown":
        diagnostics.append(_limit(request, faults.last))
    if not diagnostics:
        diagnostics.append(
            impossible_budgets(request, limits) or no_typing_together(request, limits)
        )
    return tuple(
        sorted(
            diagnostics, key=lambda d: (d.primary is None, d.primary.span if d.primary else None)
        )
    )


def _independent(checker: Checker, request: Request, most: int) -> IndependentFaults:
    """The independent faults of a program.

    Each is found with the pins, policies and budgets that are to blame for the earlier ones left
    out. Findings that end in one place are one fault, except for those of other pins on another
    mesh axis.

    Arguments:
      checker: the constraints of the program.
      request: the program.
      most: the number of faults at which the search ends.
    """
    same: dict[Any, list[CheckResult]] = {}
    without: set[tuple[str, str]] = set()
    found, stuck = checker.check(), False
    while found.status == "unsat" and len(same) < most and not stuck:
        names = {budget_literal(number) for number in found.budgets}
        to_blame = (
            {(axis, name) for axis in request.mesh.names for name in names}
            or {(found.mesh_axis, c.name) for c in found.pins}
            or {(found.mesh_axis, POLICY_LITERAL)}
        )
        place = _key(found)
        known = (k for k in same if k[0] == place and any(_is_related(f, found) for f in same[k]))
        same.setdefault(next(known, (place, found.mesh_axis)), []).append(found)
        # With nothing left to leave out, the checker would find the same fault for ever.
        stuck = to_blame <= without
        if not stuck:
            without |= to_blame
            found = checker.check(without)
    return IndependentFaults(
        groups=tuple(map(tuple, same.values())),
        last=found,
        complete=stuck or found.status != "unsat",
    )


def _limit(request: Request, found: CheckResult) -> Diagnostic:
    """The diagnostic when the checker could not decide."""
    policies = boxing_text(request.boxing, request.axis_policies, request.mesh.names)
    return Diagnostic(
        code="solver-limit",
        severity="error",
        title=(
            f"the checker reached its resource limit on mesh axis `{found.mesh_axis}` before it"
            " could say why there is no typing"
        ),
        notes=(f"the program has no typing under {policies}; check a part of it alone",),
    )


def _key(fault: CheckResult) -> tuple[Any, ...]:
    """Equal for findings that are one fault: they end in the same line, however often the line was
    traced, and in the same operands when these do not fit each other."""
    found = [
        (c.node.span or c.node.id, c.node.op, c.node.backward, c.operand)
        for c in fault.sink
        if c.node
    ]
    alone = len(found) == 1 and fault.sink[0].kind == "equation"
    return tuple(f[:3] for f in found) if alone else tuple(found) or fault.pins


def _is_related(fault: CheckResult, other: CheckResult) -> bool:
    """Whether two findings that end in one place are on one mesh axis, or have a pin in common."""
    pins = {c.name for c in fault.pins}
    return (
        fault.mesh_axis == other.mesh_axis
        or not (pins and other.pins)
        or any(c.name in pins for c in other.pins)
    )


def diagnostic(fault: BlamedFault) -> Diagnostic:
    """The diagnostic of a fault."""
    if not fault.found.sink:
        return impossible(fault) if fault.found.pins else unpinned(fault)
    node = fault.found.sink[0].node
    if node is None:
        return returned(fault)
    region = fault.found.sink[0].kind == "region"
    arriving = fault.trials.arriving(fault.found)
    pins = list({c.name: c for part in arriving.parts for c in part.pins}.values())
    conflict = _is_conflict(fault, node, arriving)
    if region:
        what, text = region_words(node, fault.found, fault.names, fault.subject(node))
    else:
        what, text = conflict_title(fault, node, conflict), arrives(fault, node, arriving.made)
    near = NearRows() if region else near_rows(fault, node, arriving)
    found = Repair(fault, node).found()
    if fault.found.budgets:
        code, title = "budget", f"{fault.subject(node)} needs what a budget forbids"
        found = _with_budget(fault, found)
    else:
        code, title = "annotation-conflict" if conflict else "no-signature", what
    return Diagnostic(
        code=code,
        severity="error",
        title=f"{title} on mesh axis `{fault.axis}`",
        labels=_labels(fault, node, pins, text),
        rule="" if region else rule(fault, node),
        rows=near.rows,
        notes=(*notes(fault, node, pins), *limit_notes(fault, found, near)),
        helps=found.helps,
        scope=scope_of(node),
    )


def _is_conflict(fault: BlamedFault, node: Node, arriving: Arriving) -> bool:
    """Whether pins conflict that are not on operands of the node itself. Where a partial value
    arrives, a reduction is missing, which is no conflict.

    Arguments:
      fault: the fault.
      node: the node at which it shows.
      arriving: the codes that arrive at its operands.
    """
    pins = fault.found.pins
    if len(pins) < 2 or fault.found.sink[0].kind == "region":
        return len(pins) > 1
    whole = all(c >= 0 for codes in arriving.made.values() for c in codes)
    return whole and not any(fault.direct(node, c) for c in pins)


def _labels(
    fault: BlamedFault, node: Node, pins: Sequence[Constraint], text: str
) -> tuple[Label, ...]:
    """The labels of a fault: at its line and at its pins; else where the flow of types ends.

    Arguments:
      fault: the fault.
      node: the node at which it shows.
      pins: the pins to blame.
      text: what the label at its line says.
    """
    at = users_span(node)
    labels = [Label(span=at, text=text, primary=True)] if at else []
    labels += [
        Label(span=c.site.span, text=fault.pin_text(c, node))
        for c in pins
        if c.site and c.site.span and c.site.span != at
    ]
    if not labels:
        spans = [c.because.span for c in reversed(fault.found.equations) if c.because.span]
        labels = [
            Label(span=s, text="the types of its operands end here", primary=True)
            for s in spans[:1]
        ]
    return tuple(labels)


def _budget_helps(fault: BlamedFault) -> tuple[Help, ...]:
    """The least size of the first budget that is to blame; empty where none was found."""
    found = budget_help(
        fault.request, fault.found.budgets[0], plans=fault.trials.limits.budget_plans
    )
    return () if found is None else (found,)


def _with_budget(fault: BlamedFault, found: FoundHelps) -> FoundHelps:
    """The helps of a fault with the least size of its first budget as the last one."""
    last = _budget_helps(fault)
    shown = found.helps[: fault.trials.limits.helps - len(last)]
    unshown = found.unshown + len(found.helps) - len(shown)
    return dataclasses.replace(found, helps=(*shown, *last), unshown=unshown)


def conflict_title(fault: BlamedFault, node: Node, conflict: bool) -> str:
    """The title of a fault at a node without regions.

    Arguments:
      fault: the fault.
      node: the node.
      conflict: whether pins on other values conflict there.
    """
    if conflict:
        pinned = [
            f"{fault.names.site(c.site)} as {asked_text(c.site, c.code)}"
            for c in fault.found.pins
            if c.site
        ]
        return f"{' and '.join(pinned)} cannot meet in {fault.subject(node)}"
    return f"{fault.subject(node)} has no SBP signature"


def returned(fault: BlamedFault) -> Diagnostic:
    """The diagnostic of a result that a budget keeps from its type. Policies do not apply where the
    program returns a value, budgets do."""
    end, atoms = fault.found.sink[0], atoms_text(fault.found.made[0])
    operand = fault.request.graph.outputs[end.operand]
    maker = fault.names.makers.get(operand) if isinstance(operand, int) else None
    subject = fault.subject(maker) if maker else f"`{fault.names.value(operand) or 'a result'}`"
    at = users_span(maker) if maker else None
    labels = [Label(span=at, text=f"{atoms} here, and returned", primary=True)] if at else []
    placed = [
        (c, c.site.span) for c in fault.found.pins if c.site and c.site.span and c.site.span != at
    ]
    labels += [
        Label(span=s, text=f"{fault.names.site(c.site)} is {asked_text(c.site, c.code)}")
        for c, s in placed
        if c.site
    ]
    pins = [
        f"input {fault.names.site(c.site)} is pinned {decode(c.code)!r}"
        for c in fault.found.pins
        if c.site and not c.site.span
    ]
    found = FoundHelps(helps=_budget_helps(fault))
    return Diagnostic(
        code="budget",
        severity="error",
        title=(
            f"{subject}, which is returned, needs what a budget forbids on mesh axis `{fault.axis}`"
        ),
        labels=tuple(labels),
        notes=(*pins, *budget_notes(fault), *limit_notes(fault, found)),
        helps=found.helps,
        scope=scope_of(maker) if maker else "",
    )


def unpinned(fault: BlamedFault) -> Diagnostic:
    """The diagnostic of a fault for which no pin, policy or budget is to blame."""
    spans = list(dict.fromkeys(c.because.span for c in fault.found.equations if c.because.span))
    labels = tuple(
        Label(span=s, text="this has to fit", primary=n == 0) for n, s in enumerate(spans[:REASONS])
    )
    reasons = [c.because.text for c in fault.found.equations]
    shown = reasons[:REASONS]
    if len(reasons) > REASONS:
        shown.append(f"and {more_text(len(reasons) - REASONS, 'constraint')}")
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"no types fit on mesh axis `{fault.axis}`, whatever is pinned",
        labels=labels,
        notes=(*shown, *limit_notes(fault, FoundHelps())),
    )


def impossible(fault: BlamedFault) -> Diagnostic:
    """The diagnostic of a pin that its own tensor cannot have."""
    pin = fault.found.pins[0]
    assert pin.site is not None
    site, graph, n = pin.site, fault.request.graph, fault.request.mesh.sizes[fault.position]
    aval = graph.aval(pinned_value(graph, site))
    if _jax.is_extended(aval.dtype) and pin.code < 0:
        why = "PRNG keys have no sum; reduce what is drawn from them"
    elif pin.code > 0 and aval.shape[pin.code - 1] % n:
        why = (
            f"{n} devices do not divide dim {pin.code - 1} of size {aval.shape[pin.code - 1]};"
            " at the boundary JAX holds even dims only"
        )
    else:
        why = f"it has shape {tuple(aval.shape)} and dtype {aval.dtype}"
    labels = (
        (
            Label(
                span=site.span,
                text=f"pinned {asked_text(site, pin.code)} on `{fault.axis}`",
                primary=True,
            ),
        )
        if site.span
        else ()
    )
    program = (
        best_program(drop_pin(fault.request, site, fault.position))
        if not fault.trials.several
        else None
    )
    edits = edits_of(fault.request, site, fault.position)
    text = f"leave it free on `{fault.axis}`{carried_text(fault.request, site)}"
    helps = ()
    if program and edits:
        helps = (priced(text, edits, program),)
    asked = asked_text(site, pin.code)
    title = f"{fault.names.site(site)} cannot be {asked} on mesh axis `{fault.axis}`"
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=title,
        labels=labels,
        notes=(why, *limit_notes(fault, FoundHelps(helps=helps))),
        helps=helps,
    )
