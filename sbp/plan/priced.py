"""Plans with a price on each byte that values take on a device."""

from __future__ import annotations

import dataclasses

from sbp.infer.certificate import Certificate
from sbp.infer.choose import choose
from sbp.plan.program import Program, resolve
from sbp.plan.reuse import room_of, without_repeats


class Priced:
    """Plans of one request at prices of memory.

    Arguments:
      program: the cheapest plan without a price.

    Attributes:
      tried: the prices at which types were chosen so far.
    """

    def __init__(self, program: Program) -> None:
        self.request, self.unpriced = program.request, program.typing
        self.certificate = Certificate(self.request)
        self.live: set[tuple[int, bool]] = set()
        self.tried = 0

    def watch(self, program: Program) -> None:
        """Charges the values that are live at the fullest moment of a plan, too. They stay charged
        at all later prices."""
        self.live |= {
            (r.value, r.codes != program.typing.values.get(r.value))
            for r in program.fullest
            if r.value in self.request.graph.avals
        }

    def at(self, price: float) -> Program | None:
        """The plan at a price; None where no typing was found.

        Arguments:
          price: seconds per byte on one device.
        """
        self.tried += 1
        typing = choose(self.request, byte_price=price, live=frozenset(self.live))
        if typing is None:
            return None
        # A bound on seconds with a price of memory bounds only typings that take no more memory.
        # The bound without a price holds for all typings.
        typing = dataclasses.replace(
            typing,
            lower_bound=self.unpriced.lower_bound,
            bounds_reuse=self.unpriced.bounds_reuse,
        )
        self.certificate.certify(typing)
        found = resolve(typing)
        return without_repeats(found, room_of([found]))
