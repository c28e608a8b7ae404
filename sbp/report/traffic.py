"""Program -> bytes by mesh axis, phase and place, for a picture of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sbp.plan.program import Program
from sbp.report.flows import Grouping, program_flows
from sbp.report.phases import PHASES, Phase

RETURNED = "returned"
Moment = Phase | Literal["returned"]
MOMENTS: tuple[Moment, ...] = (*PHASES, RETURNED)
"""The phases of a step; last the conversions of results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Bytes sent over the same mesh axes, in one phase, at one place.

    Attributes:
      axes: the mesh axes of the collectives, in words.
      moment: the phase.
      place: the module's scope, or the function.
      bytes: that one device sends per call.
    """

    axes: str
    moment: Moment
    place: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBytes:
    """What one device sends per call.

    Attributes:
      amounts: the bytes; each byte is in one of them. All branches of a `cond` are there.
      called: bytes that one device sends per call.
      grouping: what a place is: "scope" or "function".
    """

    amounts: tuple[Amount, ...]
    called: float
    grouping: Grouping

    @property
    def bytes(self) -> float:
        """Bytes that one device sends at all places."""
        return sum(a.bytes for a in self.amounts)

    def by_moment(self) -> dict[tuple[str, str], float]:
        """Bytes by mesh axes and phase."""
        return _sums((a.axes, a.moment, a.bytes) for a in self.amounts)

    def by_place(self) -> dict[tuple[str, str], float]:
        """Bytes by mesh axes and place."""
        return _sums((a.axes, a.place, a.bytes) for a in self.amounts)


def traffic(program: Program, grouping: Grouping | None = None) -> SentBytes:
    """What one device sends per call, by mesh axes, phase and place.

    Arguments:
      program: the plan.
      grouping: what a place is; None for the scopes of `jax.named_scope` and of modules, and for
        functions where everything that sends stands in one scope.
    """
    if grouping is None:
        found = traffic(program, "scope")
        named = {a.place for a in found.amounts if a.moment != RETURNED}
        return found if len(named) > 1 else traffic(program, "function")
    flows = program_flows(program, grouping)
    amounts = [
        Amount(axes=t.axes, moment=stop.phase, place=stop.text, bytes=t.bytes)
        for stop in flows.stops
        for t in stop.transfers
    ]
    amounts += [
        Amount(axes=t.axes, moment=RETURNED, place="(results)", bytes=t.bytes)
        for t in flows.returned
    ]
    return SentBytes(
        amounts=tuple(a for a in amounts if a.bytes), called=flows.called, grouping=grouping
    )


def _sums(cells: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for row, column, bytes_ in cells:
        found[row, column] = found.get((row, column), 0.0) + bytes_
    return found
