"""The check of a plan text by itself: each conversion is the one that leads from the type before it
to the type after it. It shares no code with the chooser and the lowering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sbp.plan.text import (
    ListedBody,
    ListedConversion,
    ListedLine,
    ListedOperation,
    ListedRegion,
    Listing,
)
from sbp.types import NdSbp, Split, Unreduced

_CONVERSIONS = {
    ("P", "B"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "B"): "all_gather",
    ("S", "S"): "all_to_all",
    ("B", "S"): "slice",
    ("B", "P"): "mask",
    ("S", "P"): "zero_pad",
}


_COPIES = frozenset({"to_device", "to_host"})
"""Steps that keep the type: a value in host memory is converted in device memory."""


@dataclass(frozen=True, slots=True)
class WrongLine:
    """A line of a plan text that does not hold.

    Arguments:
      number: of the line, from 1.
      problem: what is wrong there.
    """

    number: int
    problem: str


def wrong_conversions(listing: Listing) -> Iterator[WrongLine]:
    """The conversions of a plan text whose kind does not lead from their operand's type to their
    result's type, in order."""
    names = tuple(name for name, _ in listing.mesh)
    for number, line, types in _numbered(listing.body, 2, {}):
        if not isinstance(line, ListedConversion):
            continue
        before, after = types[line.operand], line.result.type
        changed = tuple(a for a in names if before.get(a) != after.get(a))
        if changed != line.mesh_axes:
            yield WrongLine(
                number,
                f"{line.kind} over {', '.join(line.mesh_axes)} does not turn {before!r} into"
                f" {after!r}",
            )
            continue
        if not changed and line.kind not in _COPIES:
            yield WrongLine(number, f"{line.kind} over no mesh axis converts nothing")
        for axis in changed:
            needed = _CONVERSIONS.get((_letter(before, axis), _letter(after, axis)))
            if needed != line.kind:
                yield WrongLine(
                    number,
                    f"{line.kind} does not turn {before.get(axis)!r} into {after.get(axis)!r} on"
                    f" mesh axis {axis}; {needed or 'nothing'} does",
                )
                break


def _letter(t: NdSbp, axis: str) -> str:
    match t.get(axis):
        case Split():
            return "S"
        case Unreduced():
            return "P"
        case _:
            return "B"


def _numbered(
    body: ListedBody, start: int, outer: dict[str, NdSbp]
) -> Iterator[tuple[int, ListedLine, dict[str, NdSbp]]]:
    """The lines of a body with their numbers, each with the types of the registers before it."""
    types = outer | {given.name: given.type for given in body.inputs}
    number = start + len(body.inputs)
    for line in body.lines:
        yield number, line, types
        number += 1
        match line:
            case ListedConversion():
                types = types | {line.result.name: line.result.type}
            case ListedRegion():
                for inner in line.bodies:
                    yield from _numbered(inner, number + 1, types)
                    number += length(inner) + 2
                types = types | {r.name: r.type for r in line.results}
            case ListedOperation():
                types = types | {r.name: r.type for r in line.results}


def length(body: ListedBody) -> int:
    """The number of lines of a body, with its inputs and its `return`."""
    regions = [line for line in body.lines if isinstance(line, ListedRegion)]
    inside = sum(length(inner) + 2 for region in regions for inner in region.bodies)
    return len(body.inputs) + len(body.lines) + inside + 1
