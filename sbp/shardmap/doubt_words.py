"""Doubts in words: a diagnostic for each, with a label on the user's line."""

from __future__ import annotations

from sbp.errors import Diagnostic, Label
from sbp.shardmap.distribution import Doubt, DoubtKind
from sbp.source.reader import scope_of, source_text, users_span
from sbp.trace.graph import Node
from sbp.types import Atom

_CODES: dict[DoubtKind, str] = dict.fromkeys(
    ("crossed", "own-positions", "same-block"), "wrong-placement"
)
"""The diagnostic code of a kind of doubt that shows what is probably wrong; others are
`not-analysed`."""


def doubt_diagnostic(doubt: Doubt) -> Diagnostic:
    """A doubt in words."""
    span = users_span(doubt.node)
    text = "nothing is known of this" if doubt.kind in _ENDS else ""
    return Diagnostic(
        code=_CODES.get(doubt.kind, "not-analysed"),
        severity=doubt.severity,
        title=_DOUBTS[doubt.kind].format(
            what=f"`{source_of(doubt.node)}`",
            op=doubt.node.op,
            axis=f"mesh axis `{doubt.axis}`",
            name=f"`{doubt.axis}`",
            index=f'`lax.axis_index("{doubt.axis}")`',
            types=types_text(doubt.atoms),
            number=f"{doubt.number:g}",
            result=doubt.result,
        ),
        labels=(Label(span=span, text=text, primary=True),) if span else (),
        scope=scope_of(doubt.node),
    )


_ENDS: tuple[DoubtKind, ...] = ("collective", "groups", "nested", "no-rule")
"""Kinds of doubts after which the analysis ends."""

_DOUBTS: dict[DoubtKind, str] = {
    "added-shards": (
        "{what} adds up what each device made of its own shard on {axis}; that this is meant is not"
        " shown"
    ),
    "candidates": (
        "what the shards picked is gathered; that one is picked from all of it is not shown"
    ),
    "carry": "the type of a carry of {op} differs with every turn",
    "claim": "that result {result} is B on {name}, as the region states, is not shown",
    "collective": "{op} is not analysed",
    "compares-means": (
        "{op} compares what are means of one device's shard each; that this is meant is not shown"
    ),
    "copies-back": (
        "every device sends equal copies, and gets its own back: as often as there are devices, the"
        " same is computed"
    ),
    "counted": (
        "an operand of {what} was counted once for each device; that the other one makes it good is"
        " not shown"
    ),
    "counts-tests": "{op} counts the devices on which a test of their own part says so",
    "crossed": (
        "{what} takes blocks of values that are split along different dims on {axis}: each device"
        " has one block of each value and computes with these only"
    ),
    "divided-again": (
        "{what} divides what is reduced on {axis} by {number}: if that is the number of devices,"
        " the result is {number} times too small; if it is another number, nothing is wrong"
    ),
    "each-shard": (
        "{what} takes the shards of what is {types} on {axis} each for itself; that this is meant"
        " is not shown"
    ),
    "gathered-inside-out": (
        "shards are gathered along a dim that stays split further in: as one value they come in"
        " another order"
    ),
    "groups": "{op} in groups of an axis is not analysed",
    "joins-shards": (
        "{op} joins the shards of a value that is {types}, of which nothing is checked"
    ),
    "nested": "a shard_map inside of a shard_map is not analysed",
    "no-rule": "sbp has no signature for {op}",
    "own-positions": (
        "{what} counts from zero in each shard of a value that is {types} on {axis}: in the whole"
        " value a device's shard begins at {index} times its length"
    ),
    "reordered": (
        "{what} puts the elements of each shard on {axis} together: as one value they come in"
        " another order"
    ),
    "replaced": (
        "{what} replaces what is not finite in each device's part, before the parts are reduced"
    ),
    "routed": (
        "{what} multiplies a partial value with what each device's own tokens came to; that this is"
        " meant is not shown"
    ),
    "same-block": (
        "{what} takes the same block of a whole value on every device, and the device's own shard"
        " of a value that is {types} on {axis}: the block that belongs to the shard begins at"
        " {index} times its length"
    ),
    "weighs": (
        "{what} weighs what each device found of its own shard; that together it is meant is not"
        " shown"
    ),
    "with-whole": (
        "{what} takes what is {types} on {axis} together with what every device has; that this is"
        " meant is not shown"
    ),
}


def source_of(node: Node) -> str:
    """The user's expression for a node."""
    return source_text(users_span(node)) or node.op


def types_text(atoms: tuple[Atom, ...]) -> str:
    """Types that a value may have, in words."""
    return " or ".join(map(repr, atoms)) or "of unknown type"
