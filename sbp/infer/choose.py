"""Request -> Typing: the cheapest types on the hardware of the mesh, all mesh axes together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from sbp.infer.problem import Problem
from sbp.infer.request import Request
from sbp.infer.typing import Typing

NOTHING: Mapping[int, float] = MappingProxyType({})


def choose(
    request: Request,
    *,
    byte_price: float = 0.0,
    live: frozenset[tuple[int, bool]] = frozenset(),
    shares: Mapping[int, float] = NOTHING,
    cutoff: float = math.inf,
) -> Typing | None:
    """The cheapest typing of a program.

    Arguments:
      request: the program, and what its types are chosen by.
      byte_price: seconds charged per byte that inputs, outputs and `live` take on a device.
      live: further values that are charged: (value, whether in the type that its readers take
        instead of the type it is made in).
      shares: for values that are made more than once, the share of a conversion's seconds that each
        pays beyond the seconds of keeping its result.
      cutoff: seconds. Where a bound shows that no typing takes fewer, any typing may be returned.

    Returns:
      The typing, or None when there is none under the policy.
    """
    problem = Problem(request, byte_price, live, shares)
    problem.build()
    return problem.solve(cutoff)
