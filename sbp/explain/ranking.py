"""The order of helps: what was probably meant comes first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sbp.errors import Help
from sbp.explain.change import HelpKind
from sbp.explain.costly import DEARER


@dataclass(frozen=True, slots=True)
class RankedHelp:
    """An accepted help.

    Arguments:
      help: the help.
      kind: what it changes.
      seconds: the modelled seconds of the plan after it.
    """

    help: Help
    kind: HelpKind
    seconds: float


RankedKind = Literal[HelpKind, "dear pin"]
"""A kind of help as it is ranked. "dear pin": an atom for which the plan takes much longer than
without the pin, such as a weight that is B where it may be split."""

_MEANT: tuple[RankedKind, ...] = (
    *("pin", "conversion", "other pin", "drop", "dear pin", "policy", "pair"),
)
"""Kinds of helps, the likeliest first."""

_PLACES = {"pin": "pin", "conversion": "line", "policy": "policy"}
"""What a kind of help changes; the others give up a pin or its kind of atom. The first help of each
place is shown before the second of any."""


def chosen(found: Sequence[RankedHelp], most: int) -> list[RankedHelp]:
    """The helps that are shown, what was probably meant first: a split of another dim for a pin
    that is odd, a conversion before the line, another atom for a pin, a pin dropped, another
    policy; helps of one kind by their bytes. The first of each of `_PLACES` are shown before the
    second of any. A change of two pins of which one gives up its split comes last, and is shown
    where there is room.

    A pin is odd where another split makes the plan no dearer than a conversion does: the rest of
    the program agrees with that split. A pin that loses its split is odd where the plan is as dear
    as with a conversion, which then takes back what the pin does.

    Arguments:
      found: the accepted helps, in the order in which they were tried.
      most: how many are shown.
    """

    def least(kind: HelpKind) -> tuple[float, float]:
        of = [f for f in found if f.kind == kind]
        bytes_ = min((f.help.bytes_per_device for f in of), default=math.inf)
        return bytes_, min((f.seconds for f in of), default=math.inf)

    conversion, converted = least("conversion")
    _, dropped = least("drop")

    def kind(f: RankedHelp) -> RankedKind:
        if f.kind == "pin" and f.help.bytes_per_device <= conversion:
            return "pin"
        if f.kind == "other pin" and f.help.bytes_per_device == conversion:
            return "pin" if f.seconds <= converted else "other pin"
        dear = f.kind == "other pin" and dropped <= DEARER * f.seconds
        return "dear pin" if dear else "other pin" if f.kind == "pin" else f.kind

    def rank(f: RankedHelp) -> tuple[int, float]:
        return _MEANT.index(kind(f)), f.help.bytes_per_device

    ranked = sorted(found, key=rank)
    single = (f for f in reversed(ranked) if kind(f) != "pair")
    first = list({_PLACES.get(kind(f), "given up"): f for f in single}.values())
    shown = [*sorted(first, key=rank), *(f for f in ranked if f not in first)][:most]
    return sorted(shown, key=rank)
