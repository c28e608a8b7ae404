"""Three and more mesh axes: all of them jointly where the tables allow it, then pairs of axes in
turn, the others held.

The types of a value are the product over the axes, so tables grow by powers. Message passing still
bounds three axes jointly; what it finds is improved two axes at a time, which elimination solves
well.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from sbp.solve.costgraph import CostGraph
from sbp.solve.reduction import Core
from sbp.solve.search import TOLERANCE, Search, Solution

PAIR = 2
"""Axes that are searched together while the others are held."""

NEAR = 0.02
"""Gap of a joint choice that searches of pairs are not spent on: they stay in its valley."""

PART_ROUNDS = 2
"""Rounds of a search that holds some axes: its bound says nothing of the whole."""

JOINT_ENTRIES = 80_000_000
"""Entries of all cost matrices up to which every axis is chosen in one go (8 bytes each)."""


def solve_axes(
    graph: CostGraph, profiles: list[np.ndarray], axes: int, cutoff: float = math.inf
) -> Solution | None:
    """The cheapest states over all mesh axes.

    Arguments:
      graph: the costs.
      profiles: for each variable an array [state, axis] that tells apart what the state says on
          that axis; 0 is all B.
      axes: the number of mesh axes.
      cutoff: costs above this are of no interest; the search ends when a bound shows that there are
          no others.

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
        # Start: the first pair, the other axes B wherever something lets them be.
        _within(search, core, profiles, list(range(PAIR, axes)), None)
        if search.best is None:  # what is asked for holds another axis
            core.reduce()
            return search.solution(search.run(core))
    some = list(itertools.combinations(range(axes), together))[::-1]
    stale = 0
    for free in itertools.cycle(some):
        before = search.cost
        _within(search, core, profiles, [a for a in range(axes) if a not in free], search.best)
        stale = (
            1 if search.cost < before * (1 - TOLERANCE) else stale + 1
        )  # what has just gained need not be searched again
        if stale >= len(some) or search.is_near(bound, NEAR):
            break
    return search.solution(bound)


def _within(
    search: Search,
    core: Core,
    profiles: list[np.ndarray],
    held: list[int],
    like: tuple[int, ...] | None,
) -> None:
    """Searches the states that say on the held axes what `like` says there, or B; the nearest to it
    where there are none."""
    part = core.fork()
    for v in core.unary:
        have = profiles[v][core.kept[v]][:, held]
        off = (have != (0 if like is None else profiles[v][like[v], held])).sum(axis=1)
        part.keep(v, off == off.min())
    part.reduce()
    search.run(part, PART_ROUNDS)
