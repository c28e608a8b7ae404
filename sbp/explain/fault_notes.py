"""The words of a fault: titles and labels at the edge of a region, the rows of a rule that come
nearest, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from sbp.errors import RuleRow, Span
from sbp.explain.change import Arriving, BlamedFault, more_text, unshown_text
from sbp.explain.helps import ChangeKind, FoundHelps
from sbp.explain.insertions import axis_rows, blamed
from sbp.explain.names import Frames, Names, asked_text
from sbp.infer.accumulation import allowing
from sbp.infer.check import CheckResult
from sbp.infer.constraints import Constraint, ReadBecause
from sbp.infer.space import Code, decode, encode
from sbp.plan.text import place
from sbp.source.reader import called_name, source_text, users_span
from sbp.trace.graph import Node
from sbp.trace.regions import interface_of
from sbp.types import P

# ---- regions ------------------------------------------------------------------------------------
# Titles and labels of faults at the edge of a loop or branch: predicates, carries, results of
# branches, scanned operands.


def atoms_text(codes: Sequence[Code]) -> str:
    """Atoms that are possible, in words.

    >>> atoms_text((1, -1)), atoms_text(())
    ('S(0) or P(sum)', 'of no type')
    """
    return " or ".join(repr(decode(c)) for c in codes) or "of no type"


def left(codes: Sequence[Code]) -> str:
    """How a value that should be B arrives: "partial" or "split"."""
    return "partial" if codes and all(c < 0 for c in codes) else "split"


def region_words(node: Node, fault: CheckResult, names: Names, subject: str) -> tuple[str, str]:
    """The title, up to the mesh axis, and the primary label of a fault at the edge of a region.

    Arguments:
      node: the scan, while or cond.
      fault: a fault whose sink is conversions into one variable of the region.
      names: the user's names of the values.
      subject: the name of the node in the title.
    """
    first = _read(fault.sink[0])
    entry, left_by = first.entry, first.exit
    if first.predicate or (entry is not None and entry.decides):
        return _predicate_words(fault, names, subject)
    if first.carry is not None:
        return _carry_words(first, fault, names, subject)
    if left_by is not None and left_by.kind == "result":
        return _result_words(node, fault, subject)
    made = fault.made[0]
    said = _value(fault.sink[0], names) or first.role
    if entry is not None and entry.kind == "slice" and set(made) == {1}:
        return (
            f"{subject} runs along the split dim of `{said}`",
            f"{said} is S(0), and the scan takes its rows one after the other",
        )
    return (
        f"{said} of {subject} cannot keep one type",
        f"{said} is {atoms_text(made)}, but {atoms_text(fault.wanted[0])} is kept here",
    )


def _predicate_words(fault: CheckResult, names: Names, subject: str) -> tuple[str, str]:
    """A predicate that is not B, or a constant that the predicate of a while reads.

    Arguments:
      fault: the fault.
      names: the user's names of the values.
      subject: the name of the node in the title.
    """
    made = fault.made[0]
    hint = "; reduce it first" if left(made) == "partial" else ""
    what, said = f"the predicate of {subject}", "the predicate"
    if not _read(fault.sink[0]).predicate:
        name = _value(fault.sink[0], names)
        said = name or "what the predicate reads"
        what = (
            f"`{said}`, which the predicate of {subject} reads,"
            if name.isidentifier()
            else f"{said} in {subject}"
        )
    return (
        f"{what} is left {left(made)}",
        f"{said} is {atoms_text(made)}, but all devices have to decide alike{hint}",
    )


def _carry_words(
    first: ReadBecause, fault: CheckResult, names: Names, subject: str
) -> tuple[str, str]:
    """A carry that enters a step in another type than it leaves it.

    Arguments:
      first: why the first constraint of the fault stands.
      fault: the fault.
      names: the user's names of the values.
      subject: the name of the node in the title.
    """
    initial, after = list[Sequence[Code]](), list[Sequence[Code]]()
    name = ""
    for constraint, codes in zip(fault.sink, fault.made, strict=True):
        if _read(constraint).initial_carry:
            initial.append(codes)
            name = name or _value(constraint, names)
        else:
            after.append(codes)
    title = f"carry {first.carry}"
    if initial and after:
        called = title + (f" ({name})" if name else "")
        return (
            f"{called} of {subject} cannot keep one type",
            (
                f"{called} enters as {atoms_text(initial[-1])} and is {atoms_text(after[-1])} after"
                " a step"
            ),
        )
    which = f"initial {title}" if initial else title
    made, wanted = atoms_text(fault.made[0]), atoms_text(fault.wanted[0])
    return (
        f"{title} of {subject} cannot keep one type",
        f"{which} is {made}, but {wanted} is kept here",
    )


def _result_words(node: Node, fault: CheckResult, subject: str) -> tuple[str, str]:
    """A result that the branches of a cond return in different types.

    Arguments:
      node: the cond.
      fault: the fault.
      subject: the name of the node in the title.
    """
    told = [
        f"{_branch(node, _read(c))} returns {atoms_text(codes)}"
        for c, codes in zip(fault.sink, fault.made, strict=True)
    ]
    if len(told) == 1:
        told.append(f"{atoms_text(fault.wanted[0])} is kept here")
    number = fault.sink[0].operand
    return f"result {number} of {subject} is not of one type in all branches", ", ".join(told)


def _read(constraint: Constraint) -> ReadBecause:
    """Why a constraint at the edge of a region stands: a value is read there."""
    assert isinstance(constraint.because, ReadBecause)
    return constraint.because


def carry_of(constraint: Constraint) -> int | None:
    """The number of the carry that enters or leaves a step; None for a value that is no carry."""
    return _read(constraint).carry


def _branch(node: Node, because: ReadBecause) -> str:
    """Which branch of a cond returns."""
    number = because.exit.region if because.exit is not None else 0
    if len(node.regions) == 2 and called_name(users_span(node)) == lax.cond.__name__:
        # lax.cond(predicate, true branch, false branch)
        return "the true branch" if number else "the false branch"
    return f"branch {number}"


def _value(constraint: Constraint, names: Names) -> str:
    """The user's name of the value that enters or leaves."""
    return names.value(constraint.convert.value) if constraint.convert else ""


# ---- near rows ----------------------------------------------------------------------------------
# The rows of a rule that come nearest to what arrives at a line.


_SUM = encode(P)


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRows:
    """The rows of a rule that come nearest to what arrives.

    Arguments:
      rows: the rows that are shown.
      unshown: the number of rows that come as near and are not shown.
    """

    rows: tuple[RuleRow, ...] = ()
    unshown: int = 0


def rule(fault: BlamedFault, node: Node) -> str:
    """The heading of a rule's rows: the operator with the names of its operands and results."""
    outs = [fault.names.value(v) or "result" for v in node.outputs]
    behind = ", dims of the batched arrays" if node.is_batched else ""
    operands = ", ".join(fault.names.shown(node))
    return f"{node.name} on one mesh axis ({operands} -> {', '.join(outs)}){behind}"


def near_rows(fault: BlamedFault, node: Node, arriving: Arriving) -> NearRows:
    """The rows nearest to what arrives: the rows that fit most operands; if no row fits any, the
    rows that a conversion reaches.

    Arguments:
      fault: the fault.
      node: where it shows.
      arriving: what arrives at the node's operands.
    """
    made = arriving.made
    conversions = fault.system.conversions
    ends = {c.operand: c.convert for c in arriving.sink if c.convert}

    def fit(operand: int, wanted: Code) -> bool:
        """Whether the policies and the budgets of its reader let an operand be converted to what a
        row takes."""
        end, aval = ends[operand], fault.request.graph.aval(node.inputs[operand])
        return any(conversions.allows(code, wanted, aval, end.rules) for code in made[operand])

    ranked: list[tuple[int, int, RuleRow]] = []
    for number, row in enumerate(axis_rows(fault.request, node, fault.position)):
        codes = {i: encode(row.ins[i]) for i in made}
        fits = [i for i in made if fit(i, codes[i])]
        rest = [i for i in made if i not in fits]
        if not rest:
            # The row is impossible here: its dims are shorter than the mesh axis, or a budget
            # forbids what its kernel sends.
            continue
        remark, near = "", 0
        if fits:
            remark, near = _fit_text(fault.names.shown(node), fits, rest), 2 * len(fits)
        elif _is_short(fault, node, codes):
            continue
        elif all(encode(a) >= 0 for a in (*row.ins, *row.outs)):
            near, first = 1, rest[0]
            remark = f"after {_conversion(made[first][0], codes[first])}" if made[first] else ""
        ranked.append((-near, number, _shown_row(Frames(fault.names, node), row, remark)))
    dtype = allowing(fault.request.graph, node)
    if dtype and node.id not in fault.request.rounding and any(_SUM in c for c in made.values()):
        remark = f"only with reduce_dtype=jnp.{dtype}: the cast rounds each part"
        row = RuleRow(inputs=(repr(P),), outputs=(repr(P),), remark=remark)
        ranked.append((-1, len(ranked), row))
    ranked.sort(key=lambda r: r[:2])
    nearest = [row for near, _, row in ranked if near == ranked[0][0]]
    most = fault.trials.limits.rows
    return NearRows(rows=tuple(nearest[:most]), unshown=max(0, len(nearest) - most))


def _shown_row(frames: Frames, row: Any, remark: str) -> RuleRow:
    """A row in the dims of the user's line.

    Arguments:
      frames: the dims of the row's node.
      row: the row on one mesh axis.
      remark: how near it comes.
    """
    ins = (decode(frames.operand(i, encode(a))) for i, a in enumerate(row.ins))
    outs = (decode(frames.result(i, encode(a))) for i, a in enumerate(row.outs))
    return RuleRow(inputs=tuple(map(repr, ins)), outputs=tuple(map(repr, outs)), remark=remark)


def _is_short(fault: BlamedFault, node: Node, codes: Mapping[int, Code]) -> bool:
    """Whether a row splits a dim of an operand that is shorter than the mesh axis.

    Arguments:
      fault: the fault.
      node: the node of the row.
      codes: for each operand the code that the row takes.
    """
    n = fault.request.mesh.sizes[fault.position]
    return any(
        c > 0 and fault.request.graph.aval(node.inputs[i]).shape[c - 1] < n
        for i, c in codes.items()
    )


def _fit_text(shown: Sequence[str], fits: Sequence[int], rest: Sequence[int]) -> str:
    """Which operands fit a row and which do not.

    Arguments:
      shown: the names of the operands.
      fits: the operands that fit.
      rest: the operands that do not.
    """
    return (
        f"{_sides(shown, fits)} {'fits' if len(fits) == 1 else 'fit'},"
        f" {_sides(shown, rest, fits)} {'does' if len(rest) == 1 else 'do'} not"
    )


def _sides(shown: Sequence[str], operands: Sequence[int], beside: Sequence[int] = ()) -> str:
    """The names of some operands; "the other side" for a value that is also one of `beside`.

    Arguments:
      shown: the names of all operands.
      operands: the operands to name.
      beside: the operands that have been named.
    """
    both = {shown[i] for i in operands} & {shown[i] for i in beside}
    if beside and both:
        return "the other side"
    return ", ".join(dict.fromkeys(shown[i] for i in operands))


def _conversion(source: Code, target: Code) -> str:
    """The collective that turns one atom into another."""
    if source < 0:
        return "an all-reduce" if target == 0 else "a reduce-scatter"
    return "an all-gather" if target == 0 else "an all-to-all"


# ---- notes --------------------------------------------------------------------------------------
# The notes of a fault: facts that explain it, one sentence each, and what limits left out.


OTHER_PINS = 3
"""Pins without a label that a note names. It counts the rest."""

_CHANGES: Mapping[ChangeKind, str] = {
    "annotation": "changes of the annotations",
    "new split": "annotations that split a value",
    "pair": "changes of two pins",
    "policy": "other policies",
}


def notes(fault: BlamedFault, node: Node, pins: Sequence[Constraint]) -> Iterator[str]:
    """The facts that explain a fault.

    Arguments:
      fault: the fault.
      node: the node at which it shows.
      pins: the pins to blame.
    """
    here = users_span(node)
    if here != node.span and node.span is not None:
        yield (
            f"inside the call it is `{source_text(node.span) or node.name}` at {place(node.span)}"
        )
    for c in pins:
        if c.site and c.site.is_input:
            where = (
                f"{decode(c.code)!r} on `{fault.axis}` by in_types or by the sharding it arrives"
                " with"
            )
            yield f"input {fault.names.site(c.site)} is pinned {where}"
        elif c.site and c.site.span and c.site.span == here:
            yield f"line {c.site.span.line} also pins {fault.pin_text(c, node)}"
    through = [
        users_span(c.node)
        for c in fault.found.equations
        if c not in fault.found.sink and c.node and c.node is not node
    ]
    others = other_pins(fault, pins)
    if others:
        each = " each" if len(others) > 1 else ""
        named = others[:OTHER_PINS]
        named += [more_text(len(others) - OTHER_PINS, "pin")] if len(others) > OTHER_PINS else []
        yield f"{' and '.join(named)}{each} alone would end here, too"
    lines = [
        s for s in through if s and (here is None or (s.file, s.line) != (here.file, here.line))
    ]
    if lines:
        yield f"the pinned types flow here through {_lines(lines, here)}"
    yield from carried(fault, node)
    yield from budget_notes(fault)
    yield from policy_note(fault, node)


def budget_notes(fault: BlamedFault) -> Iterator[str]:
    """The budgets that are to blame."""
    numbers = fault.found.budgets
    for number in numbers:
        yield f"the budget: {fault.request.budgets[number]}"
    if len(numbers) > 1:
        yield "a larger size was looked for in the first of these budgets only"


def limit_notes(
    fault: BlamedFault, found: FoundHelps, near: NearRows | None = None
) -> Iterator[str]:
    """What limits left out of a diagnosis, and which program its helps are priced on.

    Arguments:
      fault: the fault.
      found: its helps.
      near: the rows of the rule; None where none are shown.
    """
    trials = fault.trials
    size = f"the program has {trials.size:,} operations"
    if not fault.found.minimal:
        yield "the solver reached its resource limit; fewer constraints may be to blame"
    if near is not None and near.unshown:
        come = "come" if near.unshown > 1 else "comes"
        yield f"{more_text(near.unshown, 'row')} of the rule {come} as near"
    if found.unshown:
        yield unshown_text(found.unshown)
    if found.untried:
        were = "were" if found.untried > 1 else "was"
        plans = "1 plan was" if found.plans == 1 else f"{found.plans} plans were"
        yield f"{more_text(found.untried, 'change')} {were} not tried, since {plans} made"
    if found.unsearched:
        kinds = " and ".join(_CHANGES[kind] for kind in found.unsearched)
        yield f"{size}, so not all {kinds} were tried"
    if found.helps and trials.reuse_left_out:
        yield f"{size}, so helps are priced without reuse of forward conversions"
    errors = len(trials.faults.first) - 1
    if errors and any(not h.clears_all_errors for h in found.helps):
        those = "error is" if errors == 1 else f"{errors} errors are"
        yield f"the prices of helps assume that the other {those} mended"
    untold = 1 + errors - fault.shown
    if untold > 0:
        least = "" if trials.faults.complete else "at least "
        yield (
            f"{least}{untold} more error{'s are' if untold > 1 else ' is'} told when these are gone"
        )


def policy_note(fault: BlamedFault, node: Node) -> Iterator[str]:
    """The policy that is to blame, and where it is set."""
    here = users_span(node)
    policy = blamed(fault.request, fault.found)
    if policy:
        what = (
            "no operand may be resharded"
            if policy.policy == "explicit"
            else "only partial values may be converted"
        )
        at = users_span(policy.node) if policy.node else None
        where = (
            "here"
            if policy.node is node or at is None or at == here
            else f"at {_lines([at], here)}"
        )
        scope = "" if policy.origin == "program" else f" on `{fault.axis}` {where}"
        yield f'boxing is "{policy.policy}"{scope}, so {what} {where}'


def carried(fault: BlamedFault, node: Node) -> Iterator[str]:
    """The line in the loop that reads a carry in a type that the carry cannot keep."""
    number = carry_of(fault.found.sink[0])
    if number is None:
        return
    region, position = interface_of(node).entering("carry")[number].inputs[0]
    value = node.regions[region].inputs[position]
    for c in fault.found.equations:
        span = (
            users_span(c.node)
            if c.node and not c.node.regions and c.convert and c.convert.value == value
            else None
        )
        if span:
            yield (
                f"in the loop carry {number} is read by `{source_text(span)}` at"
                f" {_lines([span], users_span(node))}"
            )
            return


def other_pins(fault: BlamedFault, pins: Sequence[Constraint]) -> list[str]:
    """Pins that have no label. Each of them leads to the same fault without the labelled pins."""
    others = {
        c.name: c
        for r in fault.trials.faults.others(fault.found)
        if r.mesh_axis == fault.axis and len(r.pins) == 1
        for c in r.pins
    }
    texts = list[str]()
    for c in others.values():
        if c.site and c.name not in {p.name for p in pins}:
            where = f" at line {c.site.span.line}" if c.site.span else ""
            texts.append(f"{fault.names.site(c.site)} as {asked_text(c.site, c.code)}{where}")
    return texts


def _lines(spans: Sequence[Span], here: Span | None) -> str:
    """Lines by number, those of another file with its name."""
    near = sorted({s.line for s in spans if here is None or s.file == here.file})
    far = sorted({place(s) for s in spans if here is not None and s.file != here.file})
    texts = [f"line{'s' * (len(near) > 1)} {', '.join(map(str, near))}"] if near else []
    texts += [", ".join(far[:4]) + (" .." if len(far) > 4 else "")] if far else []
    return " and ".join(texts)
