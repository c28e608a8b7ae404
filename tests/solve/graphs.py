"""Small random cost graphs, and their cheapest states by brute force."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from sbp.solve.costgraph import CostGraph
from sbp.solve.reduction import Core


def cases(count: int) -> list[tuple[int, CostGraph, float]]:
    """Seeds from 0 on, their graphs, and the least cost of each."""
    return [_case(seed) for seed in range(count)]


@functools.cache
def _case(seed: int) -> tuple[int, CostGraph, float]:
    graph = random_graph(seed)
    return seed, graph, least(graph)


def random_graph(seed: int) -> CostGraph:
    """Two to seven variables with one to four states; a fifth of the pairs of states is
    forbidden."""
    rng = np.random.default_rng(seed)
    graph = CostGraph()
    count = int(rng.integers(2, 8))
    for _ in range(count):
        graph.variable(rng.integers(0, 9, int(rng.integers(1, 5))).astype(float))
    for a, b in itertools.combinations(range(count), 2):
        if rng.random() < 0.6:
            costs = rng.integers(0, 9, (len(graph.unary[a]), len(graph.unary[b]))).astype(float)
            costs[rng.random(costs.shape) < 0.2] = math.inf
            graph.add_pair(a, b, costs)
    return graph


def least(graph: CostGraph, variable: int = 0, state: int | None = None) -> float:
    """The least cost of a graph, of all choices or of those with a variable in a state."""
    return min(
        graph.cost_of(states)
        for states in itertools.product(*(range(len(u)) for u in graph.unary))
        if state is None or states[variable] == state
    )


def reduced(graph: CostGraph) -> Core:
    """The core of a graph after all reductions."""
    core = Core.of(graph)
    core.reduce()
    return core
