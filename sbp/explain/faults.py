"""Why a program has no typing, in the user's own lines, with helps that were tried.

`sbp.infer.check` finds what is wrong, `sbp.explain.helps` which edits mend it. This module makes
the diagnostics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from sbp.errors import SHOWN, Diagnostic, Help, Label, RuleRow, Span, counted
from sbp.explain import pin_changes, relaxations
from sbp.explain.change import (
    BlamedFault,
    Diagnosis,
    DiagnosisLimits,
    applicable,
    boxing_text,
    labels_at,
    left_out,
    tried,
)
from sbp.explain.helps import helps_of, policy_to_blame
from sbp.explain.names import Names, asked_text, operand_code, pinned_value, result_code
from sbp.infer.check import Checker, CheckResult
from sbp.infer.constraints import POLICY_LITERAL, ReadConstraint, budget_literal
from sbp.infer.flow import allowing
from sbp.infer.request import Request
from sbp.infer.space import Code, decode, encode
from sbp.plan.program import place
from sbp.source.reader import expression_at, name_called, scope_of, source_text, users_span
from sbp.trace.graph import Node, collecting_less
from sbp.types import P

# ---- arrivals -----------------------------------------------------------------------------------
# What arrives at the line of a fault.


def atoms_text(codes: Sequence[Code]) -> str:
    """Atoms that are possible, in words.

    >>> atoms_text((1, -1)), atoms_text(())
    ('S(0) or P(sum)', 'of no type')
    """
    return " or ".join(repr(decode(c)) for c in codes) or "of no type"


def left(codes: Sequence[Code]) -> str:
    """How a value that should be B arrives: "partial" or "split"."""
    return "partial" if codes and all(c < 0 for c in codes) else "split"


def arrives(fault: BlamedFault, node: Node) -> str:
    """The primary label at a node without regions: what arrives at the operands, and what to
    reduce."""
    shown, made = fault.names.operand_names(node), fault.made
    n = fault.request.mesh.sizes[fault.position]
    users = {i: [operand_code(fault.names, node, i, c) for c in made[i]] for i in made}
    texts = {i: f"{shown[i]} is {atoms_text(codes)}" for i, codes in users.items()}
    short = (
        f"{texts[i]}, but its dim {users[i][0] - 1} of size {size} is shorter than {n} devices"
        for i, codes in made.items()
        if len(codes) == 1 and codes[0] > 0
        if (size := fault.request.graph.aval(node.inputs[i]).shape[codes[0] - 1]) < n
    )
    if too_short := next(short, ""):
        return too_short
    distinct = dict.fromkeys(texts.values())
    partial = dict.fromkeys(shown[i] for i, codes in made.items() if left(codes) == "partial")
    text = ", ".join(distinct) + (
        f" here, which {node.name} does not take"
        if len(fault.found.sink) == 1
        else " on both sides"
        if len(distinct) == 1
        else ": they cannot meet here"
    )
    is_split = any(c > 0 for codes in made.values() for c in codes)
    text += ", in dims of the batched arrays" if node.is_batched and is_split else ""
    subject = "it" if len(distinct) == 1 else " or ".join(partial)
    return f"{text}; reduce {subject} first" if partial else text


_NEEDS: Mapping[str, str] = {
    "predicate": "every device needs the same predicate",
    "slice": "the scan takes its rows one after the other",
}
"""Why a value may not enter a region as it arrives, by the kind of the entry."""


def region_words(fault: BlamedFault, node: Node) -> tuple[str, str]:
    """The title, up to the mesh axis, and the primary label of a fault at the edge of a loop or
    branch.

    Arguments:
      fault: a fault whose sink is conversions into one variable of the region.
      node: the scan, while or cond.
    """
    found, subject = fault.found, fault.subject(node)
    first, name = found.sink[0].because, fault.names.value(found.sink[0].value)
    decides = first.predicate or (first.entry is not None and first.entry.decides)
    kind = "predicate" if decides else first.entry.kind if first.entry else ""
    if kind == "slice" and set(found.made[0]) != {1}:  # split along another dim than the rows
        kind = ""
    what, *_ = applicable(
        {
            "the predicate": kind == "predicate",
            f"carry {first.carry}": first.carry is not None,
            f"result {first.number}": first.exit is not None,
            f"`{name}`": name,
            first.role: True,
        }
    )
    distinct = dict.fromkeys(
        f"{_edge(fault, node, c)} is {atoms_text(codes)}"
        for c, codes in zip(found.sink, found.made, strict=True)
    )
    kept = _NEEDS.get(kind) or f"{node.name} keeps it as {atoms_text(found.wanted[0])}"
    way = f"is left {left(found.made[0])}" if kind in _NEEDS else "cannot keep one type"
    but = f", but {kept}" if len(distinct) == 1 else ""
    return f"{what} of {subject} {way}", ", ".join(distinct) + but


def _edge(fault: BlamedFault, node: Node, constraint: ReadConstraint) -> str:
    """What enters or leaves a region: its role, and the user's name."""
    read, name = constraint.because, fault.names.value(constraint.value)
    if read.exit is not None and read.exit.kind == "result":
        # lax.cond(predicate, true branch, false branch)
        is_cond = (
            len(node.regions) == 2
            and name_called(expression_at(users_span(node))[0]) == lax.cond.__name__
        )
        number = read.exit.region
        branch = ("the false branch", "the true branch")[number] if is_cond else f"branch {number}"
        return f"the result of {branch}"
    carry = f"{read.role} ({name})" if name else read.role
    return (
        "the predicate"
        if read.predicate
        else carry
        if read.carry is not None
        else name or read.role
    )


# ---- near rows ----------------------------------------------------------------------------------
# The rows of a rule that come nearest to what arrives at a line.


def rule(fault: BlamedFault, node: Node) -> str:
    """The heading of a rule's rows: the operator with the names of its operands and results."""
    outs = [fault.names.value(v) or "result" for v in node.outputs]
    behind = ", dims of the batched arrays" if node.is_batched else ""
    operands = ", ".join(fault.names.operand_names(node))
    return f"{node.name} on one mesh axis ({operands} -> {', '.join(outs)}){behind}"


def near_rows(fault: BlamedFault, node: Node) -> list[RuleRow]:
    """The rows nearest to what arrives: those that fit most operands; if no row fits any, the rows
    without partial values."""
    made, names = fault.made, fault.names.operand_names(node)
    n, conversions = fault.request.mesh.sizes[fault.position], fault.system.conversions
    avals = [fault.request.graph.aval(o) for o in node.inputs]
    rules = {c.because.number: c.rules for f in fault.arriving for c in f.sink}
    ranked: list[tuple[int, RuleRow]] = []
    for row in fault.request.axis_rows(node, fault.position):
        codes = {i: encode(row.ins[i]) for i in made}
        fits = [
            i
            for i, code in codes.items()
            if any(conversions.allows(c, code, avals[i], rules[i]) for c in made[i])
        ]
        rest = [i for i in made if i not in fits]
        is_short = any(c > 0 and avals[i].shape[c - 1] < n for i, c in codes.items())
        is_partial = any(encode(a) < 0 for a in (*row.ins, *row.outs))
        # A row that all operands fit is impossible here: its dims are shorter than the mesh axis,
        # or a budget forbids what its kernel sends.
        if rest and (fits or not (is_short or is_partial)):
            ins = (operand_code(fault.names, node, i, encode(a)) for i, a in enumerate(row.ins))
            outs = (result_code(fault.names, node, i, encode(a)) for i, a in enumerate(row.outs))
            remark = (
                f"after {_conversion(made[rest[0]][0], codes[rest[0]])}"
                if not fits and made[rest[0]]
                else _fit_text(names, fits, rest)
            )
            inputs, outputs = (tuple(repr(decode(c)) for c in side) for side in (ins, outs))
            ranked.append((len(fits), RuleRow(inputs=inputs, outputs=outputs, remark=remark)))
    dtype = allowing(fault.request.graph, node)
    if (
        dtype
        and node.id not in fault.request.rounding
        and any(encode(P) in c for c in made.values())
    ):
        remark = f"only with reduce_dtype=jnp.{dtype}: the cast rounds each part"
        ranked.append((0, RuleRow(inputs=(repr(P),), outputs=(repr(P),), remark=remark)))
    most = max((near for near, _ in ranked), default=0)
    return [row for near, row in ranked if near == most]


def _conversion(source: Code, target: Code) -> str:
    """The collective that turns one atom into another."""
    reduces = "an all-reduce" if target == 0 else "a reduce-scatter"
    return reduces if source < 0 else "an all-gather" if target == 0 else "an all-to-all"


def _fit_text(shown: Sequence[str], fits: Sequence[int], rest: Sequence[int]) -> str:
    """Which operands fit a row and which do not.

    >>> _fit_text(["x", "w"], [1], [0]), _fit_text(["x", "x"], [0], [1])
    ('w fits, x does not', 'x fits, the other side does not')
    """
    named = {shown[i] for i in fits}
    others = dict.fromkeys("the other side" if shown[i] in named else shown[i] for i in rest)
    fit, do = "fits" if len(fits) == 1 else "fit", "does" if len(rest) == 1 else "do"
    fitting = ", ".join(dict.fromkeys(shown[i] for i in fits))
    return f"{fitting} {fit}, {', '.join(others)} {do} not"


# ---- notes --------------------------------------------------------------------------------------
# The notes of a fault: facts that explain it, one sentence each, and what limits left out.


def notes(fault: BlamedFault, node: Node) -> Iterator[str]:
    """The facts that explain a fault.

    Arguments:
      fault: the fault.
      node: the node at which it shows.
    """
    here, axis = users_span(node), fault.axis
    if here != node.span and node.span is not None:
        yield (
            f"inside the call it is `{source_text(node.span) or node.name}` at {place(node.span)}"
        )
    for c in fault.pins:
        if c.site.is_input:
            is_given = fault.request.demand.source(c.site.position) == "in_types"
            source = "in_types or in_shardings" if is_given else "the sharding of its argument"
            yield (
                f"input {fault.names.site(c.site)} is pinned {decode(c.code)!r} on `{axis}` by"
                f" {source}"
            )
        elif c.site.span and c.site.span == here:
            yield f"line {c.site.span.line} also pins {fault.pin_text(c, node)}"
    through = [users_span(c.node) for c in fault.found.equations if c.node and c.node is not node]
    lines = [
        s for s in through if s and (here is None or (s.file, s.line) != (here.file, here.line))
    ]
    if lines:
        yield f"the pinned types flow here through {_lines(lines, here)}"
    yield from budget_notes(fault)
    if blamed := policy_to_blame(fault):
        under, policy, origin = blamed
        at = users_span(under) if under else None
        where = "here" if at is None or at == here else f"at {_lines([at], here)}"
        scope = "" if origin == "program" else f" on `{axis}`"
        yield f'boxing is "{policy}"{scope}, so {_FORBIDS[policy]} {where}'


_FORBIDS: Mapping[str, str] = {
    "explicit": "no operand may be resharded",
    "reduce": "only partial values may be converted",
}


def budget_notes(fault: BlamedFault) -> tuple[str, ...]:
    """The budgets that are to blame."""
    numbers = fault.found.budgets
    only = {"sbp looked for a larger size only in the first of these budgets": len(numbers) > 1}
    return *(f"the budget: {fault.request.budgets[n]}" for n in numbers), *applicable(only)


def limit_notes(
    fault: BlamedFault,
    helps: Sequence[Help] = (),
    unshown: int = 0,
    untried: int = 0,
    rows: int = 0,
) -> tuple[str, ...]:
    """What limits left out of a diagnosis, and which program its helps are priced on.

    Arguments:
      fault: the fault.
      helps: its helps.
      unshown, untried: the numbers of changes that are not shown, and that were not tried.
      rows: the number of rows of the rule that come as near as the shown ones.
    """
    request, errors = fault.request, len(fault.diagnosis.groups)
    untold = errors - fault.diagnosis.limits.faults
    return applicable(
        {
            "the solver reached its resource limit, so fewer constraints may be to"
            " blame": not fault.found.minimal,
            f"not shown: {counted(rows, 'more row')} of the rule, equally close": rows > 0,
            **dict.fromkeys(left_out(unshown, untried), True),
            f"the program has {request.size:,} operations, so the prices of helps do not count"
            " conversions that the backward pass reuses": helps and not request.reuse,
            "the price of each help assumes that you fix the other errors": errors > 1
            and any(not h.clears_all_errors for h in helps),
            f"not shown: at least {counted(untold, 'more error')}": untold > 0,
        }
    )


def _lines(spans: Sequence[Span], here: Span | None) -> str:
    """Lines by number, those of another file with its name."""
    near = sorted({s.line for s in spans if here is None or s.file == here.file})
    far = sorted({place(s) for s in spans if here is not None and s.file != here.file})
    texts = {
        f"line{'s' * (len(near) > 1)} {', '.join(map(str, near))}": near,
        ", ".join(far[:4]) + (" .." if len(far) > 4 else ""): far,
    }
    return " and ".join(applicable(texts))


# ---- diagnostics --------------------------------------------------------------------------------


LIMITS = DiagnosisLimits()


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
    request = replace(request, memory_limit=None, reuse=not limits.is_large(request.size))
    found, names = _diagnosis(request, limits), Names(request.graph)
    diagnostics = [
        diagnostic(BlamedFault(found, group, names)) for group in found.groups[: limits.faults]
    ]
    if found.last.status == "unknown":
        diagnostics.append(
            Diagnostic(
                code="solver-limit",
                severity="error",
                title=(
                    "the checker reached its resource limit before it could say why there is no"
                    f" typing on mesh axis `{found.last.mesh_axis}`"
                ),
                notes=(
                    f"the program has no types under {boxing_text(request)}; check a smaller part"
                    " of it",
                ),
            )
        )
    if not diagnostics:
        diagnostics.append(
            relaxations.impossible_budgets(request, limits)
            or relaxations.no_typing_together(request, limits)
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
    found = checker.check()
    while found.status == "unsat" and len(same) < 3 * limits.faults:
        to_blame = (
            {(axis, budget_literal(n)) for axis in request.mesh.names for n in found.budgets}
            or {(found.mesh_axis, c.name) for c in found.pins}
            or {(found.mesh_axis, POLICY_LITERAL)}
        )
        place = _key(found)
        known = (k for k in same if k[0] == place and any(_is_related(f, found) for f in same[k]))
        same.setdefault(next(known, (place, found.mesh_axis)), []).append(found)
        if to_blame <= without:
            break  # with nothing left to leave out, the checker would find the same fault for ever
        without |= to_blame
        found = checker.check(without)
    return Diagnosis(
        request=request,
        checker=checker,
        limits=limits,
        groups=tuple(map(tuple, same.values())),
        last=found,
    )


def _key(fault: CheckResult) -> tuple[Any, ...]:
    """Equal for findings that are one fault: they end in the same line, however often the line was
    traced, and in the same operands when these do not fit each other."""
    found = [
        (c.node.span or c.node.id, c.node.op, c.node.backward, c.because.number)
        for c in fault.sink
        if c.node
    ]
    alone = len(found) == 1 and not fault.sink[0].because.at_region
    return tuple(f[:3] for f in found) if alone else tuple(found) or fault.pins


def _is_related(fault: CheckResult, other: CheckResult) -> bool:
    """Whether two findings that end in one place are on one mesh axis, or have a pin in common."""
    pins, others = ({c.name for c in f.pins} for f in (fault, other))
    return fault.mesh_axis == other.mesh_axis or not (pins and others) or bool(pins & others)


def diagnostic(fault: BlamedFault) -> Diagnostic:
    """The diagnostic of a fault."""
    if not fault.found.sink:
        return impossible(fault) if fault.found.pins else diagnostic_without_pins(fault)
    end, limits = fault.found.sink[0], fault.diagnosis.limits
    # Policies do not apply where the program returns a value, budgets do.
    node = end.node or fault.names.maker(fault.request.graph.outputs[end.because.number])
    if node is None:
        return diagnostic_without_pins(fault)
    conflict, heading, near = end.node is not None and _is_conflict(fault, node), "", []
    helps, unshown, untried = helps_of(fault, node) if end.node else ((), 0, 0)
    subject = fault.subject(node) if end.node else f"returning {fault.subject(node)}"
    if end.node is None:
        title, text = (
            subject,
            f"{atoms_text(fault.found.made[0])} here; the program returns this value",
        )
    elif end.because.at_region:
        title, text = region_words(fault, node)
    else:
        title, text = f"{subject} has no SBP signature", arrives(fault, node)
        heading, near = rule(fault, node), near_rows(fault, node)
    if conflict and not end.because.at_region:
        title = f"{' and '.join(map(fault.asked, fault.found.pins))} cannot meet in {subject}"
    code = "annotation-conflict" if conflict else "no-signature"
    if fault.found.budgets:
        code, title = "budget", f"{subject} needs a collective that a budget forbids"
        # The least size of the first budget is the last help.
        least = relaxations.budget_help(fault.request, fault.found.budgets[0], plans=limits.plans)
        last = () if least is None else (least,)
        shown = helps[: limits.shown - len(last)]
        unshown += len(helps) - len(shown)
        helps = (*shown, *last)
    return Diagnostic(
        code=code,
        severity="error",
        title=f"{title} on mesh axis `{fault.axis}`",
        labels=_labels(fault, node, text),
        rule=heading,
        rows=tuple(near[: limits.rows]),
        notes=(
            *notes(fault, node),
            *limit_notes(fault, helps, unshown, untried, len(near) - limits.rows),
        ),
        helps=helps,
        scope=scope_of(node),
    )


def _is_conflict(fault: BlamedFault, node: Node) -> bool:
    """Whether pins conflict that are not on operands of the node itself. Where a partial value
    arrives, a reduction is missing, which is no conflict."""
    return len(fault.found.pins) > 1 and (
        fault.found.sink[0].because.at_region
        or (
            all(c >= 0 for codes in fault.made.values() for c in codes)
            and not any(fault.direct(node, c) for c in fault.found.pins)
        )
    )


def _labels(fault: BlamedFault, node: Node, text: str) -> tuple[Label, ...]:
    """The labels of a fault, at its line and at its pins.

    Arguments:
      fault: the fault.
      node: the node at which it shows.
      text: what the label at its line says.
    """
    at = users_span(node)
    pins = (
        Label(span=c.site.span, text=fault.pin_text(c, node))
        for c in fault.pins
        if c.site.span and c.site.span != at
    )
    return (*([Label(span=at, text=text, primary=True)] if at else []), *pins)


def diagnostic_without_pins(fault: BlamedFault) -> Diagnostic:
    """The diagnostic of a fault that shows at no operation, or for which nothing that the user asks
    is to blame."""
    reasons = [c.because.text for c in fault.found.equations]
    more = len(reasons) - SHOWN
    shown = [*reasons[:SHOWN], *([f"and {counted(more, 'more constraint')}"] if more > 0 else [])]
    labels = labels_at((c.because.span for c in fault.found.equations), "part of the conflict")
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"no types fit on mesh axis `{fault.axis}`",
        labels=labels[:SHOWN],
        notes=(
            f"the constraints in conflict: {', '.join(shown)}",
            *budget_notes(fault),
            *limit_notes(fault),
        ),
    )


def impossible(fault: BlamedFault) -> Diagnostic:
    """The diagnostic of a pin that its own tensor cannot have."""
    pin = fault.found.pins[0]
    site, graph, n = pin.site, fault.request.graph, fault.request.mesh.sizes[fault.position]
    aval, asked = graph.aval(pinned_value(graph, site)), asked_text(site, pin.code)
    why = (
        f"{n} devices do not divide dim {pin.code - 1} of size {aval.shape[pin.code - 1]};"
        " JAX needs equal shards of inputs and outputs, so pad the dim"
        if pin.code > 0 and aval.shape[pin.code - 1] % n
        else f"the array has shape {tuple(aval.shape)} and dtype {aval.dtype}"
    )
    # The pins of another fault would leave the program without a plan.
    drop = pin_changes.without_pins(fault.request, site, position=fault.position)
    found = tried([drop], plans=1 if len(fault.diagnosis.groups) == 1 else 0)
    helps = tuple(one.help(program) for one, program in found.accepted)
    return Diagnostic(
        code="no-typing",
        severity="error",
        title=f"{fault.names.site(site)} cannot be {asked} on mesh axis `{fault.axis}`",
        labels=labels_at([site.span], f"pinned {asked} on `{fault.axis}`"),
        notes=(why, *limit_notes(fault, helps, untried=found.untried)),
        helps=helps,
    )
