"""Minimises over three and more mesh axes: all axes jointly where the tables are small enough, then
pairs of axes in turn while the states on the other axes stay fixed.

The types of a value are the product over the axes, so tables grow exponentially in the number of
axes. Message passing still bounds three axes jointly; its solution is improved two axes at a time,
which elimination solves well.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from sbp.solve.costgraph import CostGraph
from sbp.solve.reduction import Core
from sbp.solve.search import TOLERANCE, Search, Solution

PAIR = 2
"""Axes that are searched together while the others stay fixed."""

NEAR = 0.02
"""Gap of a joint choice below which pairs are not searched: searches of pairs rarely leave the
neighbourhood of a joint choice."""

PART_ROUNDS = 2
"""Rounds of a search with some axes fixed: its bound does not hold for the whole problem."""

JOINT_ENTRIES = 80_000_000
"""Entries of all cost matrices, 8 bytes each, up to which all axes are chosen jointly."""


def solve_axes(
    graph: CostGraph, profiles: list[np.ndarray], axes: int, cutoff: float = math.inf
) -> Solution | None:
    """The cheapest states over all mesh axes.

    Arguments:
      graph: the costs.
      profiles: for each variable an array [state, axis] of numbers: two states with one number say
        the same on that axis; 0 is all B.
      axes: the number of mesh axes.
      cutoff: the search ends when a bound shows that no choice costs less than this.

    Returns:
      A solution, or None when no choice has a finite cost. Its bound is the trivial one, 0, where
      the joint problem was too large.
    """
    search, core, bound = Search(graph, cutoff=cutoff), Core.of(graph), 0.0
    together = min(PAIR, axes - 1)
    if axes <= PAIR or sum(m.size for m in graph.pairs.values()) <= JOINT_ENTRIES:
        core.reduce()
        bound = search.run(core)
        if not core.feasible or axes == 1 or search.is_near(bound, NEAR):
            return search.solution(bound)
    else:
        # Start: the first pair, the other axes B wherever that is possible.
        _within(search, core, profiles, list(range(PAIR, axes)), None)
        if search.best is None:  # a demand forbids B on another axis
            core.reduce()
            return search.solution(search.run(core))
    some = list(itertools.combinations(range(axes), together))[::-1]
    stale = 0
    for free in itertools.cycle(some):
        before = search.cost
        _within(search, core, profiles, [a for a in range(axes) if a not in free], search.best)
        stale = (
            1 if search.cost < before * (1 - TOLERANCE) else stale + 1
        )  # the pair just searched need not be searched next
        if stale >= len(some) or search.is_near(bound, NEAR):
            break
    return search.solution(bound)


def _within(
    search: Search,
    core: Core,
    profiles: list[np.ndarray],
    fixed: list[int],
    like: tuple[int, ...] | None,
) -> None:
    """Searches the states that agree with `like` on the fixed axes, or the states nearest to it
    where none agrees.

    Arguments:
      search: keeps the best states found.
      core: the problem.
      profiles: as for `solve_axes`.
      fixed: positions of the fixed axes.
      like: states of the whole graph; None for B on the fixed axes.
    """
    part = core.fork()
    for v in core.unary:
        have = profiles[v][core.kept[v]][:, fixed]
        off = (have != (0 if like is None else profiles[v][like[v], fixed])).sum(axis=1)
        part.keep(v, off == off.min())
    part.reduce()
    search.run(part, PART_ROUNDS)
