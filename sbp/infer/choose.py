"""Request -> Typing: the cheapest types in the cost model, on all mesh axes together."""

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
    """Chooses the cheapest typing of a program.

    Arguments:
      request: the program with its mesh, demand, policies and limits.
      byte_price: seconds charged per byte that inputs, outputs and `live` take on a device.
      live: further values that are charged, as (value, False) in the type they are made in, as
        (value, True) in the type that their readers take.
      shares: for each value that is computed more than once, the share of a conversion's seconds
        that is charged, from 0 to 1. The seconds to store the result are charged in any case.
      cutoff: seconds. Where a bound shows that every typing takes more, any typing may be returned.

    Returns:
      The typing, or None when there is none under the policy.
    """
    problem = Problem(request, byte_price, live, shares)
    problem.build()
    return problem.solve(cutoff)
