"""Why a program has no typing, in the user's own lines, with helps that were tried.

What is wrong comes from `infer.check`, what an edit costs from `plan.helps`; here it is put in
words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sbp import _jax
from sbp.errors import Diagnostic, Label
from sbp.explain.blame import BlamedFault
from sbp.explain.budgets import budget_help, impossible_budgets
from sbp.explain.edits import drop_pin, pinned_value, priced
from sbp.explain.fault_notes import notes
from sbp.explain.helps import LARGE, Repair, Trials
from sbp.explain.names import Names, scope_of
from sbp.explain.near_rows import rows, rule
from sbp.explain.regions import atoms_text, left, region_words
from sbp.explain.repins import edits_of
from sbp.explain.together import no_typing_together
from sbp.infer.check import Checker, CheckResult
from sbp.infer.literals import POLICY_LITERAL, budget_literal
from sbp.infer.request import Request
from sbp.infer.space import Code, decode
from sbp.limits import boxing_text
from sbp.plan.fit import best_program
from sbp.source.reader import users_span
from sbp.trace.collector import collecting_less
from sbp.trace.graph import Node

MAX_FAULTS, MAX_FAULTS_LARGE = 5, 3

KEEPING = 500
"""Nodes of a program up to which helps are priced with what gradients keep from the forward
pass."""


@collecting_less()
def explain(request: Request) -> tuple[Diagnostic, ...]:
    """Says why a program has no typing: each independent fault once, in source order.

    Returns:
      At least one diagnostic, with code `no-signature`, `annotation-conflict`, `budget`,
      `no-typing` or `solver-limit`.
    """
    request = dataclasses.replace(
        request, memory_limit=None, aliased=(), reuse=request.size <= KEEPING
    )
    checker = Checker(request)
    most = MAX_FAULTS_LARGE if request.size > LARGE else MAX_FAULTS
    groups, last = _independent(checker, request, 3 * most)
    faults = [first for first, *_ in groups]
    trials = Trials(request, checker, faults, [rest for _, *rest in groups])
    names, shown = Names.of(request.graph), min(len(faults), most)
    diagnostics = [diagnostic(BlamedFault(trials, fault, names, shown)) for fault in faults[:shown]]
    if last.status == "unknown":
        diagnostics.append(_limit(request, last))
    if not diagnostics:
        diagnostics.append(impossible_budgets(request) or no_typing_together(request))
    return tuple(
        sorted(
            diagnostics, key=lambda d: (d.primary is None, d.primary.span if d.primary else None)
        )
    )


def _independent(
    checker: Checker, request: Request, most: int
) -> tuple[list[list[CheckResult]], CheckResult]:
    """The independent faults of a program.

    Each is found with the pins, policies and budgets that are to blame for the earlier ones left
    out. Faults that end in one place are one fault, whatever the pins and the mesh axis.

    Returns:
      For each fault all that ends in its place, and the last answer of the checker.
    """
    same: dict[Any, list[CheckResult]] = {}
    without: set[tuple[str, str]] = set()
    found = checker.check()
    while found.status == "unsat" and len(same) < most:
        names = {budget_literal(number) for number in found.budgets}
        to_blame = (
            {(axis, name) for axis in request.mesh.names for name in names}
            or {(found.mesh_axis, c.name) for c in found.pins}
            or {(found.mesh_axis, POLICY_LITERAL)}
        )
        same.setdefault(_key(found), []).append(found)
        if to_blame <= without:  # there is nothing to leave out: it would be found for ever
            break
        without |= to_blame
        found = checker.check(without)
    return list(same.values()), found


def _limit(request: Request, found: CheckResult) -> Diagnostic:
    """What to say when the checker could not decide."""
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
    """What makes two faults one: the same line, however often it was traced, and the same operands
    when they do not fit each other."""
    found = [
        (c.node.span or c.node.id, c.node.op, c.node.backward, c.operand)
        for c in fault.sink
        if c.node
    ]
    alone = len(found) == 1 and fault.sink[0].kind == "equation"
    return tuple(f[:3] for f in found) if alone else tuple(found) or fault.pins


def diagnostic(fault: BlamedFault) -> Diagnostic:
    if not fault.found.sink:
        return impossible(fault) if fault.found.pins else unpinned(fault)
    node = fault.found.sink[0].node
    if node is None:
        return returned(fault)
    at, region = users_span(node), fault.found.sink[0].kind == "region"
    arriving = fault.trials.arriving(fault.found)
    pins = [c for part in arriving.parts for c in part.pins]
    pins = list({c.name: c for c in pins}.values())
    split = all(
        c >= 0 for codes in arriving.made.values() for c in codes
    )  # where a part is, a reduction is missing: no conflict
    conflict = len(fault.found.pins) > 1 and (
        region or (split and not any(fault.direct(node, c) for c in fault.found.pins))
    )
    if region:
        what, text = region_words(node, fault.found, fault.names, fault.subject(node))
    else:
        what, text = conflict_title(fault, node, conflict), arrives(fault, node, arriving.made)
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
    if fault.found.budgets:
        code, title = "budget", f"{fault.subject(node)} needs what a budget forbids"
        helps = tuple(
            h for number in fault.found.budgets[:1] if (h := budget_help(fault.request, number))
        )
    else:
        code, title = "annotation-conflict" if conflict else "no-signature", what
        helps = Repair(fault.trials, fault.found, node, fault.names, fault.shown).helps()
    return Diagnostic(
        code=code,
        severity="error",
        title=f"{title} on mesh axis `{fault.axis}`",
        labels=tuple(labels),
        rule="" if region else rule(fault, node),
        rows=() if region else rows(fault, node, arriving),
        notes=tuple(notes(fault, node, pins, helps)),
        helps=helps,
        scope=scope_of(node),
    )


def conflict_title(fault: BlamedFault, node: Node, conflict: bool) -> str:
    if conflict:
        pinned = [
            f"{fault.names.site(c.site)} as {decode(c.code)!r}" for c in fault.found.pins if c.site
        ]
        return f"{' and '.join(pinned)} cannot meet in {fault.subject(node)}"
    return f"{fault.subject(node)} has no SBP signature"


def arrives(fault: BlamedFault, node: Node, made: Mapping[int, tuple[Code, ...]]) -> str:
    """What comes to the operands, and what would help."""
    shown = fault.names.shown(node)
    told = list(dict.fromkeys(f"{shown[i]} is {atoms_text(codes)}" for i, codes in made.items()))
    partial = list(dict.fromkeys(shown[i] for i, codes in made.items() if left(codes) == "partial"))
    n = fault.request.mesh.sizes[fault.position]
    for i, codes in made.items():
        dim = codes[0] - 1 if len(codes) == 1 else -1
        size = fault.request.graph.aval(node.inputs[i]).shape[dim] if dim >= 0 else n
        if size < n:
            return (
                f"{shown[i]} is {atoms_text(codes)}, but its dim {dim} of size {size} is"
                f" shorter than {n} devices"
            )
    if len(fault.found.sink) == 1:
        hint = (
            ""
            if len(partial) < len(told)
            else "; reduce it first"
            if len(told) == 1
            else "; reduce them first"
        )
        return f"{', '.join(told)} here, which {node.op} does not take{hint}"
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


def returned(fault: BlamedFault) -> Diagnostic:
    """A result of the program in a type that it cannot be handed over in: policies do not hold
    there, budgets do."""
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
        Label(span=s, text=f"{fault.names.site(c.site)} is {decode(c.code)!r}")
        for c, s in placed
        if c.site
    ]
    pins = [
        f"input {fault.names.site(c.site)} is pinned {decode(c.code)!r}"
        for c in fault.found.pins
        if c.site and not c.site.span
    ]
    return Diagnostic(
        code="budget",
        severity="error",
        title=(
            f"{subject}, which is returned, needs what a budget forbids on mesh axis `{fault.axis}`"
        ),
        labels=tuple(labels),
        notes=(
            *pins,
            *(f"the budget: {fault.request.budgets[number]}" for number in fault.found.budgets),
        ),
        helps=tuple(
            h for number in fault.found.budgets[:1] if (h := budget_help(fault.request, number))
        ),
        scope=scope_of(maker) if maker else "",
    )


def unpinned(fault: BlamedFault) -> Diagnostic:
    """What has no types of itself: no pin, policy or budget is to blame."""
    spans = list(dict.fromkeys(c.because.span for c in fault.found.equations if c.because.span))
    labels = tuple(
        Label(span=s, text="this has to fit", primary=n == 0) for n, s in enumerate(spans[:4])
    )
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"no types fit on mesh axis `{fault.axis}`, whatever is pinned",
        labels=labels,
        notes=tuple(c.because.text for c in fault.found.equations[:4]),
    )


def impossible(fault: BlamedFault) -> Diagnostic:
    """A pin that its own tensor cannot have."""
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
                text=f"pinned {decode(pin.code)!r} on `{fault.axis}`",
                primary=True,
            ),
        )
        if site.span
        else ()
    )
    program = (
        best_program(drop_pin(fault.request, site, fault.position))
        if len(fault.trials.faults) == 1
        else None
    )
    edits = edits_of(fault.request, site, fault.position)
    text = f"leave it free on `{fault.axis}`"
    helps = ()
    if program and edits:
        helps = (priced(text, edits, program, clears_all_errors=True),)
    title = f"{fault.names.site(site)} cannot be {decode(pin.code)!r} on mesh axis `{fault.axis}`"
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=title,
        labels=labels,
        notes=(why,),
        helps=helps,
    )
