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
    text = "sbp knows nothing about this value" if doubt.kind in _ENDS else ""
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
        "{what} sums the local shards over {axis}; sbp cannot tell whether you want that sum or the"
        " sum of the whole array"
    ),
    "candidates": (
        "each device picks from its own shard, and the picks are gathered; sbp cannot tell whether"
        " the program then picks one of them"
    ),
    "carry": "the type of a carry of {op} changes with every iteration",
    "claim": (
        "the region states that result {result} is B on {name}; sbp cannot tell whether it is"
    ),
    "collective": "sbp does not analyze {op}",
    "compares-means": (
        "{op} compares means of the local shards; sbp cannot tell whether you want that"
    ),
    "copies-back": (
        "every device sends equal copies and gets its own back, so all devices compute the same"
    ),
    "counted": (
        "an operand of {what} is counted once for each device; sbp cannot tell whether the other"
        " operand makes up for that"
    ),
    "counts-tests": "{op} counts the devices on which a test of the local part is true",
    "crossed": (
        "{what} combines blocks of values that are split along different dims on {axis}: each"
        " device has one block of each value and combines only these"
    ),
    "divided-again": (
        "{what} divides a value that is reduced on {axis} by {number}: if that is the number of"
        " devices, the result is {number} times too small; if it is another number, nothing is"
        " wrong"
    ),
    "each-shard": (
        "{what} works on each local shard of a value that is {types} on {axis}; sbp cannot tell"
        " whether you want that"
    ),
    "gathered-inside-out": (
        "shards are gathered along a dim that stays split on an inner mesh axis, which changes the"
        " order of the elements"
    ),
    "groups": "sbp does not analyze {op} in groups of an axis",
    "joins-shards": (
        "{op} joins the shards of a value that is {types}; sbp does not check the result"
    ),
    "nested": "sbp does not analyze a shard_map inside a shard_map",
    "no-rule": "sbp has no signature for {op}",
    "own-positions": (
        "{what} counts from zero in each shard of a value that is {types} on {axis}; in the whole"
        " value, a device's shard begins at {index} times its length"
    ),
    "reordered": (
        "{what} joins the elements of each shard on {axis}, which changes the order of the whole"
        " value"
    ),
    "replaced": (
        "{what} replaces values that are not finite in each device's part, before the parts are"
        " reduced"
    ),
    "routed": (
        "{what} multiplies a partial value by a value that each device computes from its own"
        " tokens; sbp cannot tell whether you want that"
    ),
    "same-block": (
        "{what} takes the same block of a whole value on every device, and the device's own shard"
        " of a value that is {types} on {axis}; the block that belongs to the shard begins at"
        " {index} times its length"
    ),
    "weighs": (
        "{what} weighs results of the local shards; sbp cannot tell whether you want their total"
    ),
    "with-whole": (
        "{what} combines a value that is {types} on {axis} with a value that every device has;"
        " sbp cannot tell whether you want that"
    ),
}


def source_of(node: Node) -> str:
    """The user's expression for a node."""
    return source_text(users_span(node)) or node.op


def types_text(atoms: tuple[Atom, ...]) -> str:
    """Types that a value may have, in words."""
    return " or ".join(map(repr, atoms)) or "of unknown type"
