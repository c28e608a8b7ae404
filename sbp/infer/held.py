"""The chooser with some ends of values held: what a program costs when a reader takes an operand in
another type."""

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
class Hold:
    """A condition on one end of a value; an annotation would not do, which any reader may convert
    behind.

    Arguments:
      end: "operand" of a node as it is read, a value as it is "made" (region inputs too), a result
          as a body has it "returned".
      at: (node id, operand), (value,), or (node id, region, number).
      codes: for each mesh axis the code it is about, None for any.
      differs: whether the end must differ from `codes` on one of those axes, rather than agree on
          all.
    """

    end: Literal["operand", "made", "returned"]
    at: tuple[int, ...]
    codes: tuple[int | None, ...]
    differs: bool = False

    def admits(self, have: Codes) -> bool:
        """Whether a type meets the condition."""
        agrees = all(want is None or want == c for want, c in zip(self.codes, have, strict=True))
        return agrees != self.differs


def choose_held(
    request: Request, holds: Sequence[Hold], *, shares: Mapping[int, float] = NOTHING
) -> Typing | None:
    """The cheapest typing in which all conditions hold, or None; `shares` as for
    `sbp.infer.choose.choose`.

    Rows that another row with conversions replaces at no more cost are not among those that are
    tried, as in `choose`.
    """
    problem = Problem(request, shares=shares)
    problem.build()
    for hold in holds:
        variable, codes = _end(problem, hold)
        admitted = np.array([hold.admits(t) for t in codes], dtype=bool)
        problem.costs.unary[variable] = np.where(admitted, problem.costs.unary[variable], np.inf)
        if not admitted.any():
            return None
    return problem.solve()


def _end(problem: Problem, hold: Hold) -> tuple[int, tuple[Codes, ...]]:
    """The variable of an end, and the end's type in each of its states."""
    flow = problem.flow
    match hold.end:
        case "operand":
            node, number = hold.at
            end = flow.operands()[node][number].end
        case "made":
            end = flow.makers[hold.at[0]]
        case "returned":
            node, region, number = hold.at
            end = flow.returned()[node, region][number].end
    return end.variable, problem.codes(end)
