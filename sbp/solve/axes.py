"""Minimises over mesh axes: over all axes jointly where the cost matrices are small enough, then
over some axes at a time while the states on the other axes stay fixed.

The types of a value are the product over the axes, so tables grow exponentially in the number of
axes. Message passing still bounds three axes jointly. Its solution is improved two axes at a time;
elimination solves problems of that size well.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from sbp.solve.costgraph import CostGraph
from sbp.solve.reduction import Core
from sbp.solve.search import Search, Solution

NEAR = 0.02
"""Gap of a joint solution, as a share of its cost, below which pairs of axes are not searched: such
searches rarely improve a joint solution."""

JOINT_ENTRIES = 80_000_000
"""Most entries of all cost matrices together, 8 bytes each, with which three or more axes are
chosen jointly."""


def solve_axes(
    graph: CostGraph,
    profiles: list[np.ndarray],
    axes: int,
    cutoff: float = math.inf,
    *,
    joint_entries: int = JOINT_ENTRIES,
) -> Solution | None:
    """Searches the cheapest states over all mesh axes.

    Arguments:
      graph: the costs, in seconds.
      profiles: for each variable an array [state, axis] of numbers. Two states with the same number
        on an axis have the same atoms on that axis; 0 is B everywhere.
      axes: the number of mesh axes.
      cutoff: seconds. The search ends when a bound shows that no choice costs less.
      joint_entries: most entries of all cost matrices with which three or more axes are chosen
        jointly.

    Returns:
      A solution, or None when no choice has a finite cost. With more than `joint_entries` its bound
      is 0, the trivial one, unless no solution is B on all axes but two: then the joint problem is
      searched all the same, since the searches of two axes need a solution to start from.
    """
    search, core, bound = Search(graph, cutoff=cutoff), Core.of(graph), 0.0
    together = min(2, axes - 1)
    if axes <= 2 or sum(m.size for m in graph.pairs.values()) <= joint_entries:
        core.reduce()
        bound = search.run(core)
        if not core.feasible or axes == 1 or search.is_near(bound, NEAR):
            return search.solution(bound)
    else:
        # Start: the first pair of axes is searched, the other axes are B wherever possible.
        _within(search, core, profiles, list(range(2, axes)), None)
        if search.best is None:  # a pin forbids B on another axis
            core.reduce()
            return search.solution(search.run(core))
    some = list(itertools.combinations(range(axes), together))[::-1]
    stale = 0
    for free in itertools.cycle(some):
        before = search.cost
        _within(search, core, profiles, [a for a in range(axes) if a not in free], search.best)
        # The pair just searched need not be searched next.
        stale = 1 if search.cost < before else stale + 1
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
    """Searches with some axes fixed: of each variable, the states that differ from `like` on the
    fewest fixed axes.

    Arguments:
      search: keeps the best states found.
      core: the problem.
      profiles: as for `solve_axes`.
      fixed: positions of the fixed axes.
      like: a state for each variable of the whole graph; None for B on the fixed axes.
    """
    part = core.fork()
    for v in core.unary:
        have = profiles[v][core.kept[v]][:, fixed]
        off = (have != (0 if like is None else profiles[v][like[v], fixed])).sum(axis=1)
        part.keep(v, off == off.min())
    part.reduce()
    search.run(part)
