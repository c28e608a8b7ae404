"""A value that comes by one of two ways: the carry of a loop, the result of a branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp.shardmap.distribution import (
    UNKNOWN,
    Distribution,
    Fault,
    LocalValue,
    faulty,
    unsure,
)
from sbp.trace.graph import Node
from sbp.types import B, P, Split


def join(a: LocalValue, b: LocalValue, node: Node) -> LocalValue:
    """A value that is one of two, with the readings of both."""
    given = tuple(
        replace(_join(x, y, a, b, node), sources=x.sources | y.sources, away=x.away or y.away)
        for x, y in zip(a.per_axis, b.per_axis, strict=True)
    )
    same = a.const is not None and a.const == b.const
    return LocalValue(
        given,
        const=a.const if same else None,
        literal=a.literal and b.literal,
        position=a.position if a.position == b.position else None,
    )


def joined(values: Sequence[LocalValue], node: Node) -> LocalValue:
    """A value that is one of several, with the readings of all."""
    first, *rest = values
    for v in rest:
        first = join(first, v, node)
    return first


def _join(
    x: Distribution, y: Distribution, a: LocalValue, b: LocalValue, node: Node
) -> Distribution:
    if x.unknown or y.unknown:
        return replace(unsure((x, y)), rewritten=x.rewritten or y.rewritten)
    if x.fault or y.fault:
        return x if x.fault else y
    excess = y.excess if a.zero else x.excess if b.zero or x.excess == y.excess else None
    atoms = x.atoms & y.atoms
    doubt, twice = x.doubt or y.doubt, x.twice or y.twice
    under = x.under if x.under is not None else y.under
    made, reduced, cause = x.made or y.made, x.reduced or y.reduced, x.cause or y.cause
    if atoms:
        if (
            excess is None
            and None not in (x.excess, y.excess)
            and cause
            and not any(isinstance(t, Split) for t in atoms)
        ):
            return faulty(cause)  # each iteration multiplies by the axis size
        return Distribution(
            atoms,
            excess,
            None,
            made,
            reduced,
            cause,
            x.blocks or y.blocks,
            doubt=doubt,
            twice=twice,
            under=under,
        )
    for p, w in ((x, y), (y, x)):
        if p.partial == P and B in w.atoms:
            if p.excess is not None and w.excess is not None and p.excess != w.excess + 1:
                return faulty(Fault("added", node, p.made))
            return Distribution(
                p.atoms, p.excess, None, made, reduced, cause, doubt=doubt, twice=twice
            )
    return UNKNOWN
