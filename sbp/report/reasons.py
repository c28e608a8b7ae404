"""The reason of a conversion in words: short for the report, long for `plan.why`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from sbp.annotations import annotate_p
from sbp.explain.alternatives import Refusal
from sbp.explain.places import SourcePlace, ValueName
from sbp.explain.reasons import Argument, ConversionNeed, ConversionReason
from sbp.infer.space import decode
from sbp.limits import boxing_text
from sbp.plan.text import place
from sbp.report.wording import (
    SEGMENT_LIMIT,
    annotation_span,
    atoms_text,
    node_text,
    place_text,
    quoted,
)
from sbp.source.reader import source_text
from sbp.trace.graph import Node

# ---- in the report ------------------------------------------------------------------------------


def maker_text(reason: ConversionReason) -> str:
    """The maker of the value, for the report."""
    if reason.maker is not None:
        return node_text(reason.maker)
    assert reason.argument is not None
    return argument_text(reason.argument) or "an argument"


def argument_text(argument: Argument) -> str:
    """An input of the program or of a body in words; empty for an input without a name."""
    if argument.node is None:
        return f"input {argument.name}" if argument.name else ""
    if argument.kind == "carry":
        return f"the carry of {argument.node.op} {place_text(SourcePlace.of(argument.node))}"
    outside = "a constant" if argument.is_constant else ""
    if argument.outside is not None:
        outside = argument_text(argument.outside)
    outside = outside or f"an operand of {node_text(argument.node)}"
    return f"a slice of {outside}" if argument.kind == "slice" else outside


def need_text(reason: ConversionReason) -> str:
    """The reader of the converted value and its reason, for the report. Results of the program are
    not named."""
    need = reason.need
    if need.node is None:
        return "returned"
    if not need.is_read:
        return f"returned by the body of {need.node.op} {place_text(SourcePlace.of(need.node))}"
    before, after = decode(need.change.before), decode(need.change.after)
    match need.kind:
        case "pin":
            span = annotation_span(need.node)
            return "pinned by" if span is None else f"pinned by{quoted(span)} at {place(span)}"
        case "no signature":
            why = "which has no signature"
        case "rounding" | "not linear":
            why = f"which has no row for {before!r}"
        case "partners" | "choice":
            why = f"which takes {after!r} here"
        case _:
            why = f"which takes {after!r}"
    return f"needed by {node_text(need.node, reason.maker)}, {why}"


# ---- in the answer to a question ----------------------------------------------------------------


def full_maker_text(reason: ConversionReason, value: ValueName) -> str:
    """The maker of the value with its row, for `plan.why`."""
    maker = reason.maker
    if maker is None:
        return str(value)
    if maker.op == annotate_p.name:
        return f"the annotation {_expression(maker)}{place_text(SourcePlace.of(maker))}"
    row = "" if reason.row is None else f" ({atoms_text(reason.row.ins)}"
    row += "" if reason.row is None else f" -> {atoms_text(reason.row.outs)})"
    return f"{_node(maker)}{row}"


def full_need_text(need: ConversionNeed, output_names: Sequence[str]) -> str:
    """The reader of the converted value, and why it does not take the value as it was made.

    Arguments:
      need: the need for the conversion.
      output_names: names of the program's results.
    """
    if need.is_between:
        return "on the way to another type that is read"
    if need.node is None:
        return _output_need(need, output_names)
    return _read_need(need, need.node) if need.is_read else _returned_need(need, need.node)


def _read_need(need: ConversionNeed, node: Node) -> str:
    before, after = decode(need.change.before), decode(need.change.after)
    what = _node(node)
    match need.kind:
        case "pin":
            return f"pinned as {after!r} by `{source_text(node.span)}` {_place(node)}"
        case "predicate":
            return f"it is the predicate of {what}, which every device has to know"
        case "carry":
            return f"carried as {after!r} by {what}"
        case "body":
            return f"taken into the body as {after!r} by {what}"
        case "no signature":
            return f"needed by {what}, which has no signature and takes all operands B"
        case "rounding":
            dtype = need.allowing
            return (
                f"needed by {what}: a cast to {node.params['new_dtype']} would round each part, so"
                " the sum comes first"
                + (f" (reduce_dtype=jnp.{dtype} allows it to come after)" if dtype else "")
            )
        case "not linear":
            return (
                f"needed by {what}, which has no row for {before!r}: it is not linear in this"
                " operand"
            )
        case "partners":
            return f"needed by {what}, which takes {before!r} only beside {_partners(need)}"
        case "choice":
            return f"needed by {what}, which takes {before!r} as well"
        case _:
            row = "" if need.row is None else f" ({atoms_text(need.row.ins)}"
            row += "" if need.row is None else f" -> {atoms_text(need.row.outs)})"
            return f"needed by {what}, whose row takes {after!r}{row}"


def _partners(need: ConversionNeed) -> str:
    """The atoms that rows take beside the partial value, and the atoms that are there."""
    found = need.partners
    assert found is not None
    rows = sorted(
        {
            ", ".join(f"{n} {decode(c)!r}" for n, c in zip(found.names, row, strict=True))
            for row in found.rows
        }
    )
    have = ", ".join(f"{n} is {decode(c)!r}" for n, c in zip(found.names, found.atoms, strict=True))
    more = [f"{len(rows) - 3} more"] if len(rows) > 3 else []
    return f"{' or '.join([*rows[:3], *more])}, and {have}"


def _returned_need(need: ConversionNeed, node: Node) -> str:
    """Why the body of a region returns the value converted."""
    before, after = decode(need.change.before), decode(need.change.after)
    what = _node(node)
    match need.kind:
        case "predicate":
            return f"it is the predicate of {what}, which every device has to know"
        case "carry":
            text = f"carried as {after!r} over all trips of {what}"
        case _:
            text = f"returned as {after!r} by the body of {what}"
    if need.blocker is not None:
        text += f": each trip reads it in {_node(need.blocker)}, which has no row for {before!r}"
    return text


def _output_need(need: ConversionNeed, output_names: Sequence[str]) -> str:
    """Why the program returns the value converted."""
    text = f"returned as `{output_name(output_names, need.number)}`"
    match need.kind:
        case "pinned output":
            return f"{text}, which is pinned as {decode(need.change.after)!r}"
        case "donated output":
            return (
                f"{text}, which takes the buffer and so the type of the donated input {need.donor}"
            )
        case "whole output":
            return f"{text}: what a program returns is not partial unless its type says so"
        case _:
            return f"{text}, whose type is left free"


def deferred_text(need: ConversionNeed, output_names: Sequence[str]) -> str:
    """The start of a sentence about the program with the conversion elsewhere.

    Arguments:
      need: the need for the conversion.
      output_names: names of the program's results.
    """
    before = decode(need.change.before)
    match need.kind:
        case "pin":
            return "Without that pin"
        case "carry":
            return f"Carried as {before!r}"
        case "body":
            return f"{'Taken into the body' if need.is_read else 'Returned'} as {before!r}"
        case "row":
            return "The next best, where it takes another type"
        case "partners" | "choice":
            assert need.node is not None
            return f"Reduced one consumer later, after {_node(need.node)}"
        case _:
            return f"`{output_name(output_names, need.number)}` returned as {before!r}"


def refusal_text(found: Refusal) -> str:
    """Why a changed program has no plan."""
    axis = f"on `{found.mesh_axis}`"
    if found.boxing is not None:
        axis += f" under {boxing_text(found.boxing, found.axis_policies, found.axes)}"
    arrives = " or ".join(dict.fromkeys(repr(decode(c)) for c in found.arriving)) or "nothing"
    match found.kind:
        case "joint":
            return "no types of all mesh axes together"
        case "memory":
            return "nothing that fits the memory limit"
        case "exceeds memory":
            return "it does not fit the memory limit"
        case "rows":
            return f"no row reaches it {axis}"
        case "result":
            return f"the program would have to return {arrives} {axis}"
        case "reader":
            assert found.node is not None
            return f"{_node(found.node)} does not take {arrives} {axis}"
        case "not there":
            return "it was not in the program before conversions were taken together"
        case "no row":
            return "no row takes it so"
        case _:
            assert_never(found.kind)


def output_name(output_names: Sequence[str], number: int) -> str:
    """The name of a result of the program."""
    return output_names[number] if number < len(output_names) else f"result[{number}]"


def _node(node: Node) -> str:
    return f"{node.name} {_expression(node)}{_place(node)}"


def _place(node: Node) -> str:
    return place_text(SourcePlace.of(node))


def _expression(node: Node) -> str:
    """The user's expression in backticks and a blank; empty where there is no source."""
    text = source_text(node.span, SEGMENT_LIMIT).replace("`", "'")
    return f"`{text}` " if text else ""
