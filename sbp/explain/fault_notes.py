"""The notes of a fault: facts that explain it, one sentence each, and what limits left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sbp.errors import Span
from sbp.explain.blame import BlamedFault
from sbp.explain.helps import ChangeKind, FoundHelps
from sbp.explain.loosening import blamed
from sbp.explain.names import asked_text
from sbp.explain.near_rows import NearRows
from sbp.explain.regions import carry_of
from sbp.infer.constraints import Constraint
from sbp.infer.space import decode
from sbp.plan.text import place
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node
from sbp.trace.regions import interface_of

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


def more_text(count: int, noun: str) -> str:
    """The rest of a list.

    >>> more_text(1, "pin"), more_text(2, "pin")
    ('1 more pin', '2 more pins')
    """
    return f"{count} more {noun}{'s' * (count > 1)}"


def unshown_text(count: int) -> str:
    """The note about helps that are not shown."""
    verbs = "give a typing and are" if count > 1 else "gives a typing and is"
    return f"{more_text(count, 'change')} {verbs} not shown"


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
