"""Request -> Typing: the cheapest types in the cost model, on all mesh axes together; also under
conditions on types at single places, such as the operand of one reader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from sbp.infer.problem import Problem
from sbp.infer.request import Request
from sbp.infer.space import Codes
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


# ---- conditions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCondition:
    """A condition on the type of a value at one end.

    An annotation cannot express it, since any reader may convert the result of an annotation.

    Arguments:
      end: "operand": the operand of a node, in the type that its row reads; "made": a value, in the
        type in which it is made or enters a region; "returned": a result of a region.
      at: (node id, operand), (value,), or (node id, region, number).
      codes: a code for each mesh axis, None for any.
      differs: whether the type must differ from `codes` on one of these axes; otherwise it must
        agree on all.
    """

    end: Literal["operand", "made", "returned"]
    at: tuple[int, ...]
    codes: tuple[int | None, ...]
    differs: bool = False

    def admits(self, have: Codes) -> bool:
        """Whether a type meets the condition."""
        agrees = all(want is None or want == c for want, c in zip(self.codes, have, strict=True))
        return agrees != self.differs


def choose_under(
    request: Request, conditions: Sequence[EndCondition], *, shares: Mapping[int, float] = NOTHING
) -> Typing | None:
    """The cheapest typing that meets all conditions, or None.

    Rows that `sbp.infer.cost.undominated` leaves out are not tried.

    Arguments:
      request: the program with its mesh, demand, policies and limits.
      conditions: the conditions.
      shares: as for `choose`.
    """
    problem = Problem(request, shares=shares)
    problem.build()
    for condition in conditions:
        variable, codes = _end(problem, condition)
        admitted = np.array([condition.admits(t) for t in codes], dtype=bool)
        problem.costs.unary[variable] = np.where(admitted, problem.costs.unary[variable], np.inf)
        if not admitted.any():
            return None
    return problem.solve()


def _end(problem: Problem, condition: EndCondition) -> tuple[int, tuple[Codes, ...]]:
    """The variable of an end, and the end's type in each of its states."""
    flow = problem.flow
    match condition.end:
        case "operand":
            node, number = condition.at
            end = flow.operands()[node][number].end
        case "made":
            end = flow.makers[condition.at[0]]
        case "returned":
            node, region, number = condition.at
            end = flow.returned()[node, region][number].end
    return end.variable, problem.codes(end)
