"""The notes of a fault: facts that explain it, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sbp.errors import Help, Span
from sbp.explain.blame import BlamedFault
from sbp.explain.loosening import blamed
from sbp.explain.regions import carry_of
from sbp.infer.constraints import Constraint
from sbp.infer.space import decode
from sbp.plan.text import place
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node
from sbp.trace.regions import interface_of


def notes(
    fault: BlamedFault, node: Node, pins: Sequence[Constraint], helps: Sequence[Help]
) -> Iterator[str]:
    """The notes of a fault.

    Arguments:
      fault: the fault.
      node: where it shows.
      pins: the pins to blame.
      helps: its helps.
    """
    here = users_span(node)
    if here != node.span and node.span is not None:
        yield (f"inside the call it is `{source_text(node.span) or node.op}` at {place(node.span)}")
    for c in pins:
        if c.site and c.site.source == "input":
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
        yield f"{' and '.join(others)}{each} alone would end here, too"
    lines = [
        s for s in through if s and (here is None or (s.file, s.line) != (here.file, here.line))
    ]
    if lines:
        yield f"the pinned types flow here through {_lines(lines, here)}"
    yield from carried(fault, node)
    for number in fault.found.budgets:
        yield f"the budget: {fault.request.budgets[number]}"
    yield from policy_note(fault, node)
    errors = len(fault.trials.faults) - 1
    if errors and any(not h.clears_all_errors for h in helps):
        yield (f"helps are priced with the other {errors} error{'s' * (errors > 1)} out of the way")
    untold = 1 + errors - fault.shown
    if untold > 0:
        yield f"{untold} more error{'s are' if untold > 1 else ' is'} told when these are gone"


def policy_note(fault: BlamedFault, node: Node) -> Iterator[str]:
    """The policy that is to blame, and where it stands."""
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
    """What in the loop asks a type of a carry that cannot keep it."""
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
    """Pins that are not shown, at most three; each leads to the same line when the shown ones are
    gone."""
    whole = next(
        same
        for f, same in zip(fault.trials.faults, fault.trials.same, strict=True)
        if f is fault.found
    )
    others = {
        c.name: c for r in whole if r.mesh_axis == fault.axis and len(r.pins) == 1 for c in r.pins
    }
    texts = list[str]()
    for c in others.values():
        if c.site and c.name not in {p.name for p in pins}:
            where = f" at line {c.site.span.line}" if c.site.span else ""
            texts.append(f"{fault.names.site(c.site)} as {decode(c.code)!r}{where}")
    return texts[:3]


def _lines(spans: Sequence[Span], here: Span | None) -> str:
    """Lines by number, those of another file with its name."""
    near = sorted({s.line for s in spans if here is None or s.file == here.file})
    far = sorted({place(s) for s in spans if here is not None and s.file != here.file})
    texts = [f"line{'s' * (len(near) > 1)} {', '.join(map(str, near))}"] if near else []
    texts += [", ".join(far[:4]) + (" .." if len(far) > 4 else "")] if far else []
    return " and ".join(texts)
