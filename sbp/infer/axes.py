"""Three and more mesh axes: pairs of axes are chosen jointly in turn, the others held, until no pair improves."""

from __future__ import annotations

import itertools

import numpy as np

from sbp.infer.costgraph import CostGraph
from sbp.infer.solver import TOLERANCE, Solution, solve

JOINT_AXES = 2
"""Up to this many axes are chosen in one go: the types of a value are the product over the axes."""


def solve_axes(graph: CostGraph, profiles: list[np.ndarray], axes: int) -> Solution | None:
    """The cheapest states over all mesh axes.

    Arguments:
      graph: the costs.
      profiles: for each variable an array [state, axis] that tells apart what the state says on that axis; 0 is all B.
      axes: the number of mesh axes of size above 1.

    Returns:
      A solution, or None when no choice has a finite cost. With more than two axes the bound is the trivial one, 0.
    """
    if axes <= JOINT_AXES:
        return solve(graph)
    # Start: the first pair, the other axes B wherever something lets them be.
    held = [_restrict(p, list(range(JOINT_AXES, axes)), np.zeros(axes, dtype=int)) for p in profiles]
    best = _solve_within(graph, held)
    if best is None:
        return solve(graph)
    pairs = list(itertools.combinations(range(axes), JOINT_AXES))[::-1]
    stale = 0
    for pair in itertools.cycle(pairs):
        others = [a for a in range(axes) if a not in pair]
        held = [_match(p, others, p[s]) for p, s in zip(profiles, best.states, strict=True)]
        found = _solve_within(graph, held)
        stale = 0 if found is not None and found.cost < best.cost * (1 - TOLERANCE) else stale + 1
        if found is not None and found.cost < best.cost:
            best = found
        if stale >= len(pairs) - 1:  # every other pair has had its turn since the last gain
            return best
    return best


def _restrict(profile: np.ndarray, axes: list[int], wanted: np.ndarray) -> np.ndarray:
    """States that are B on the given axes, or as near to it as the variable has."""
    off = (profile[:, axes] != wanted[axes]).sum(axis=1)
    return np.flatnonzero(off == off.min())


def _match(profile: np.ndarray, axes: list[int], like: np.ndarray) -> np.ndarray:
    return np.flatnonzero((profile[:, axes] == like[axes]).all(axis=1))


def _solve_within(graph: CostGraph, held: list[np.ndarray]) -> Solution | None:
    small = CostGraph([u[k] for u, k in zip(graph.unary, held, strict=True)])
    small.pairs = {(a, b): m[np.ix_(held[a], held[b])] for (a, b), m in graph.pairs.items()}
    found = solve(small)
    if found is None:
        return None
    states = tuple(int(k[s]) for k, s in zip(held, found.states, strict=True))
    return Solution(states=states, cost=found.cost, lower_bound=0.0)
