"""The cheapest typing under conditions on types at single places, such as the operand of one
reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sbp.infer.choose import NOTHING
from sbp.infer.problem import Problem
from sbp.infer.request import Request
from sbp.infer.space import Codes
from sbp.infer.typing import Typing


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCondition:
    """A condition on the type of a value at one end.

    An annotation cannot express it, since any reader may convert the result of an annotation.

    Arguments:
      end: "operand": the operand of a node, in the type that its row reads or in which it enters a
        region; "returned": a result of a region.
      at: (node id, operand), or (node id, region, number).
      codes: a code for each mesh axis, None for any.
      differs: whether the type must differ from `codes` on one of these axes; otherwise it must
        agree on all.
    """

    end: Literal["operand", "returned"]
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
      shares: as for `sbp.infer.choose.choose`.
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
        case "returned":
            node, region, number = condition.at
            end = flow.returned()[node, region][number].end
    return end.variable, problem.codes(end)
