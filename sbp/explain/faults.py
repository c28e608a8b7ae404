"""Why a program has no typing, in the user's own lines, with helps that were tried.

`sbp.infer.check` finds what is wrong, `sbp.explain.helps` which edits mend it. This module makes
the diagnostics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sbp.errors import Diagnostic, Help, Label
from sbp.explain.change import Diagnosis, DiagnosisLimits, Fault, more_text, tried
from sbp.explain.edits import pinned_value
from sbp.explain.fault_notes import (
    arrives,
    atoms_text,
    budget_notes,
    limit_notes,
    near_rows,
    notes,
    region_words,
    rule,
)
from sbp.explain.helps import FoundHelps, helps_of
from sbp.explain.names import Names, asked_text
from sbp.explain.pin_changes import dropped
from sbp.explain.together import budget_help, impossible_budgets, no_typing_together
from sbp.infer.check import Checker, CheckResult
from sbp.infer.literals import POLICY_LITERAL, budget_literal
from sbp.infer.request import Request
from sbp.infer.space import decode
from sbp.limits import boxing_text
from sbp.source.reader import scope_of, users_span
from sbp.trace.collector import collecting_less
from sbp.trace.graph import Node
from sbp.trace.numbering import twins

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
    found, names = _diagnosis(request, limits), Names.of(request.graph)
    shown = found.groups[: limits.faults]
    diagnostics = [diagnostic(Fault(found, group, names)) for group in shown]
    if found.last.status == "unknown":
        diagnostics.append(_limit(request, found.last))
    if not diagnostics:
        diagnostics.append(
            impossible_budgets(request, limits) or no_typing_together(request, limits)
        )
    return tuple(
        sorted(
            diagnostics, key=lambda d: (d.primary is None, d.primary.span if d.primary else None)
        )
    )


def _diagnosis(request: Request, limits: DiagnosisLimits) -> Diagnosis:
    """The independent faults of a program.

    Each is found with the pins, policies and budgets that are to blame for the earlier ones left
    out. Findings that end in one place are one fault, except for those of other pins on another
    mesh axis. The search ends at three times the faults that are shown.

    Arguments:
      request: the program.
      limits: on the search.
    """
    checker = Checker(request, rlimit=limits.solver_resources)
    same: dict[Any, list[CheckResult]] = {}
    without: set[tuple[str, str]] = set()
    found, stuck = checker.check(), False
    while found.status == "unsat" and len(same) < 3 * limits.faults and not stuck:
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
    return Diagnosis(
        request=request,
        checker=checker,
        limits=limits,
        groups=tuple(map(tuple, same.values())),
        last=found,
        complete=stuck or found.status != "unsat",
        reuse_left_out=not request.reuse and bool(twins(request.graph).again),
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
    pins, others = ({c.name for c in f.pins} for f in (fault, other))
    return fault.mesh_axis == other.mesh_axis or not (pins and others) or bool(pins & others)


def diagnostic(fault: Fault) -> Diagnostic:
    """The diagnostic of a fault."""
    if not fault.found.sink:
        return impossible(fault) if fault.found.pins else unpinned(fault)
    node, limits = fault.found.sink[0].node, fault.diagnosis.limits
    if node is None:
        return returned(fault)
    found, conflict = helps_of(fault, node), _is_conflict(fault, node)
    if fault.found.sink[0].kind == "region":
        (title, text), heading, near = region_words(fault, node), "", []
    else:
        title, text = conflict_title(fault, node, conflict), arrives(fault, node)
        heading, near = rule(fault, node), near_rows(fault, node)
    code = "annotation-conflict" if conflict else "no-signature"
    if fault.found.budgets:
        code, title = "budget", f"{fault.subject(node)} needs what a budget forbids"
        # The least size of the first budget is the last help.
        last = _budget_helps(fault)
        shown = found.helps[: limits.helps - len(last)]
        unshown = found.unshown + len(found.helps) - len(shown)
        found = dataclasses.replace(found, helps=(*shown, *last), unshown=unshown)
    limited = limit_notes(fault, found, len(near) - limits.rows)
    return Diagnostic(
        code=code,
        severity="error",
        title=f"{title} on mesh axis `{fault.axis}`",
        labels=_labels(fault, node, text),
        rule=heading,
        rows=tuple(near[: limits.rows]),
        notes=(*notes(fault, node), *limited),
        helps=found.helps,
        scope=scope_of(node),
    )


def _is_conflict(fault: Fault, node: Node) -> bool:
    """Whether pins conflict that are not on operands of the node itself. Where a partial value
    arrives, a reduction is missing, which is no conflict."""
    pins = fault.found.pins
    if len(pins) < 2 or fault.found.sink[0].kind == "region":
        return len(pins) > 1
    whole = all(c >= 0 for codes in fault.made.values() for c in codes)
    return whole and not any(fault.direct(node, c) for c in pins)


def _labels(fault: Fault, node: Node | None, text: str) -> tuple[Label, ...]:
    """The labels of a fault, at its line and at its pins.

    Arguments:
      fault: the fault.
      node: the node at which it shows; None for none.
      text: what the label at its line says.
    """
    at = users_span(node) if node else None
    labels = [Label(span=at, text=text, primary=True)] if at else []
    labels += [
        Label(span=c.site.span, text=fault.pin_text(c, node))
        for c in fault.pins
        if c.site and c.site.span and c.site.span != at
    ]
    return tuple(labels)


def _budget_helps(fault: Fault) -> tuple[Help, ...]:
    """The least size of the first budget that is to blame; empty where none was found."""
    plans = fault.diagnosis.limits.plans
    found = budget_help(fault.request, fault.found.budgets[0], plans=plans)
    return () if found is None else (found,)


def conflict_title(fault: Fault, node: Node, conflict: bool) -> str:
    """The title of a fault at a node without regions.

    Arguments:
      fault: the fault.
      node: the node.
      conflict: whether pins on other values conflict there.
    """
    if not conflict:
        return f"{fault.subject(node)} has no SBP signature"
    pinned = [
        f"{fault.names.site(c.site)} as {asked_text(c.site, c.code)}"
        for c in fault.found.pins
        if c.site
    ]
    return f"{' and '.join(pinned)} cannot meet in {fault.subject(node)}"


def returned(fault: Fault) -> Diagnostic:
    """The diagnostic of a result that a budget keeps from its type. Policies do not apply where the
    program returns a value, budgets do."""
    end, atoms = fault.found.sink[0], atoms_text(fault.found.made[0])
    operand = fault.request.graph.outputs[end.operand]
    maker = fault.names.makers.get(operand) if isinstance(operand, int) else None
    subject = fault.subject(maker) if maker else f"`{fault.names.value(operand) or 'a result'}`"
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
        labels=_labels(fault, maker, f"{atoms} here, and returned"),
        notes=(*pins, *budget_notes(fault), *limit_notes(fault, found)),
        helps=found.helps,
        scope=scope_of(maker) if maker else "",
    )


def unpinned(fault: Fault) -> Diagnostic:
    """The diagnostic of a fault for which no pin, policy or budget is to blame."""
    reasons = [c.because.text for c in fault.found.equations]
    more = len(reasons) - REASONS
    shown = [*reasons[:REASONS], *([f"and {more_text(more, 'constraint')}"] if more > 0 else [])]
    spans = dict.fromkeys(c.because.span for c in fault.found.equations if c.because.span)
    labels = (Label(span=s, text="this has to fit", primary=n == 0) for n, s in enumerate(spans))
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"no types fit on mesh axis `{fault.axis}`, whatever is pinned",
        labels=tuple(labels)[:REASONS],
        notes=(*shown, *limit_notes(fault, FoundHelps())),
    )


def impossible(fault: Fault) -> Diagnostic:
    """The diagnostic of a pin that its own tensor cannot have."""
    pin = fault.found.pins[0]
    assert pin.site is not None
    site, graph, n = pin.site, fault.request.graph, fault.request.mesh.sizes[fault.position]
    aval, asked = graph.aval(pinned_value(graph, site)), asked_text(site, pin.code)
    why = f"it has shape {tuple(aval.shape)} and dtype {aval.dtype}"
    if pin.code > 0 and aval.shape[pin.code - 1] % n:
        why = (
            f"{n} devices do not divide dim {pin.code - 1} of size {aval.shape[pin.code - 1]};"
            " at the boundary JAX holds even dims only"
        )
    label = f"pinned {asked} on `{fault.axis}`"
    # The pins of another fault would leave the program without a plan.
    drops = [dropped(fault.request, site, position=fault.position)]
    found = tried((d for d in drops if d.edits), plans=1 if len(fault.diagnosis.groups) == 1 else 0)
    helps = tuple(one.help(program) for one, program in found.accepted)
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"{fault.names.site(site)} cannot be {asked} on mesh axis `{fault.axis}`",
        labels=(Label(span=site.span, text=label, primary=True),) if site.span else (),
        notes=(why, *limit_notes(fault, FoundHelps(helps=helps, untried=found.untried))),
        helps=helps,
    )
