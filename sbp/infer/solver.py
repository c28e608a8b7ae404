"""Minimises a sum of unary and pairwise costs over finite variables: exact elimination while tables stay small, then descent.

This is the optimisation behind the chooser. Variables are eliminated in the order of the smallest table they leave (bucket
elimination); one and two neighbours cost nothing (the R1 and R2 reductions of partitioned Boolean quadratic problems). Where the
next table would be larger than `table_limit`, a variable is set to the state of least marginal cost instead, and a descent over
all variables repairs what that choice may have cost. A lower bound from the same elimination with split tables gives the gap.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from sbp.errors import SbpInternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver found.

    Arguments:
      states: the chosen state of each variable.
      cost: the total cost of `states`.
      conditioned: how many variables were set by descent rather than eliminated; 0 means the solution is optimal.
    """

    states: tuple[int, ...]
    cost: float
    conditioned: int


@dataclass(slots=True)
class CostGraph:
    """Variables with unary costs, and pairwise costs between them."""

    unary: list[np.ndarray] = field(default_factory=list)
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def variable(self, costs: np.ndarray) -> int:
        """A new variable with its unary costs; returns its number."""
        self.unary.append(np.asarray(costs, dtype=float))
        return len(self.unary) - 1

    def add_unary(self, variable: int, costs: np.ndarray) -> None:
        """Adds to a variable's unary costs."""
        self.unary[variable] = self.unary[variable] + costs

    def add_pair(self, a: int, b: int, costs: np.ndarray) -> None:
        """Adds a cost matrix between two variables; between a variable and itself, its diagonal."""
        if a == b:
            self.add_unary(a, np.diagonal(costs))
            return
        key, table = ((a, b), costs) if a < b else ((b, a), costs.T)
        if key in self.pairs:
            self.pairs[key] = self.pairs[key] + table
        else:
            self.pairs[key] = table

    def cost_of(self, states: tuple[int, ...] | list[int]) -> float:
        """The total cost of a choice of states."""
        total = sum(float(u[s]) for u, s in zip(self.unary, states, strict=True))
        return total + sum(float(m[states[a], states[b]]) for (a, b), m in self.pairs.items())


def solve(graph: CostGraph, *, table_limit: int = 400_000) -> Solution | None:
    """The cheapest states, or None when no choice has a finite cost.

    Arguments:
      graph: the costs; infinite entries are forbidden.
      table_limit: the largest table elimination may build, in entries.

    >>> g = CostGraph()
    >>> a, b = g.variable(np.array([0.0, 1.0])), g.variable(np.array([0.0, 0.0]))
    >>> g.add_pair(a, b, np.array([[5.0, 5.0], [0.0, 3.0]]))
    >>> solve(g).states
    (1, 0)
    """
    reduced, kept = _without_dominated(graph)
    if reduced is None:
        return None
    found = _eliminate(reduced, table_limit)
    if found is None:
        return None
    states, conditioned = found
    if conditioned:
        states = _descend(reduced, states)
    full = [int(k[s]) for k, s in zip(kept, states, strict=True)]
    cost = graph.cost_of(full)
    if not math.isfinite(cost):
        return None
    return Solution(states=tuple(full), cost=cost, conditioned=conditioned)


def _neighbours(graph: CostGraph) -> list[dict[int, np.ndarray]]:
    """For each variable, its neighbours with the cost matrix seen from its side."""
    near: list[dict[int, np.ndarray]] = [{} for _ in graph.unary]
    for (a, b), m in graph.pairs.items():
        near[a][b] = m
        near[b][a] = m.T
    return near


def _without_dominated(graph: CostGraph) -> tuple[CostGraph | None, list[np.ndarray]]:
    """Drops states that cannot be part of a finite solution, and states that another one beats whatever the neighbours do."""
    near = _neighbours(graph)
    kept = [np.flatnonzero(np.isfinite(u)) for u in graph.unary]
    pending = sorted(range(len(graph.unary)))
    queued = set(pending)
    while pending:
        v = pending.pop()
        queued.discard(v)
        before = len(kept[v])
        if before == 0:
            return None, kept
        tables = [near[v][w][np.ix_(kept[v], kept[w])] for w in near[v]]
        alive = np.ones(before, dtype=bool)
        for table in tables:
            alive &= np.isfinite(table).any(axis=1)
        if not alive.any():
            return None, kept
        unary = graph.unary[v][kept[v]]
        if alive.sum() > 1:
            alive = _undominated(unary, tables, alive)
        if not alive.all():
            kept[v] = kept[v][alive]
            for w in near[v]:
                if w not in queued:
                    queued.add(w)
                    pending.append(w)
    small = CostGraph([u[k] for u, k in zip(graph.unary, kept, strict=True)])
    for (a, b), m in graph.pairs.items():
        small.pairs[a, b] = m[np.ix_(kept[a], kept[b])]
    return small, kept


def _undominated(unary: np.ndarray, tables: list[np.ndarray], alive: np.ndarray) -> np.ndarray:
    """State s goes when some r has u[r] - u[s] + sum over neighbours of max(T[r] - T[s]) <= 0 (Goldstein's criterion)."""
    index = np.flatnonzero(alive)
    worst = unary[index][None, :] - unary[index][:, None]  # [s, r]
    for table in tables:
        t = table[index]
        if t.shape[0] * t.shape[0] * t.shape[1] > 4_000_000:
            return alive
        with np.errstate(invalid="ignore"):
            difference = t[None, :, :] - t[:, None, :]  # [s, r, j]
        difference[np.isnan(difference)] = -np.inf  # both infinite: no matter
        worst = worst + difference.max(axis=2)
    np.fill_diagonal(worst, np.inf)
    out = alive.copy()
    gone: set[int] = set()
    for s in range(len(index) - 1, -1, -1):
        for r in np.flatnonzero(worst[s] <= 1e-15):
            # Equal states go to the one that comes first, so that a tie never removes both.
            if int(r) not in gone:
                gone.add(s)
                break
    out[index[sorted(gone)]] = False
    return out


@dataclass(slots=True, eq=False)
class _Table:
    scope: tuple[int, ...]
    costs: np.ndarray


def _eliminate(graph: CostGraph, table_limit: int) -> tuple[list[int], int] | None:
    count = len(graph.unary)
    sizes = [len(u) for u in graph.unary]
    tables: list[set[_Table]] = [set() for _ in range(count)]

    def enter(table: _Table) -> None:
        for v in table.scope:
            tables[v].add(table)

    for v, u in enumerate(graph.unary):
        enter(_Table((v,), u))
    for (a, b), m in graph.pairs.items():
        enter(_Table((a, b), m))

    def scope_of(v: int) -> tuple[int, ...]:
        return tuple(sorted({w for t in tables[v] for w in t.scope} - {v}))

    def weight(v: int) -> int:
        return math.prod(sizes[w] for w in scope_of(v)) * sizes[v]

    queue = [(weight(v), v) for v in range(count)]
    heapq.heapify(queue)
    done = [False] * count
    order: list[tuple[int, tuple[int, ...], np.ndarray | int]] = []
    conditioned = 0
    while queue:
        w, v = heapq.heappop(queue)
        if done[v]:
            continue
        current = weight(v)
        if current > w:
            heapq.heappush(queue, (current, v))
            continue
        scope = scope_of(v)
        if current > table_limit:
            v, near = _condition(graph, tables, done, sizes, order)
            conditioned += 1
        else:
            joined = _join((*scope, v), [(t.scope, t.costs) for t in _ordered(tables[v])], sizes)
            best = joined.argmin(axis=-1)
            order.append((v, scope, best.astype(np.int32)))
            for t in list(tables[v]):
                for x in t.scope:
                    tables[x].discard(t)
            if scope:
                enter(_Table(scope, joined.min(axis=-1)))
            near = set(scope)
        done[v] = True
        for x in near:
            if not done[x]:
                heapq.heappush(queue, (weight(x), x))
    states = [0] * count
    for v, scope, best in reversed(order):
        states[v] = best if isinstance(best, int) else int(best[tuple(states[x] for x in scope)])
    return states, conditioned


def _ordered(tables: set[_Table]) -> list[_Table]:
    return sorted(tables, key=lambda t: t.scope)


def _join(scope: tuple[int, ...], parts: list[tuple[tuple[int, ...], np.ndarray]], sizes: list[int]) -> np.ndarray:
    """The sum of tables over the union of their scopes, axes in the order of `scope`."""
    total = np.zeros([sizes[v] for v in scope])
    place = {v: i for i, v in enumerate(scope)}
    for part, costs in parts:
        order = sorted(range(len(part)), key=lambda i: place[part[i]])
        shape = [1] * len(scope)
        for v in part:
            shape[place[v]] = sizes[v]
        total += costs.transpose(order).reshape(shape)
    return total


def _condition(
    graph: CostGraph, tables: list[set[_Table]], done: list[bool], sizes: list[int], order: list[tuple[int, tuple[int, ...], np.ndarray | int]]
) -> tuple[int, set[int]]:
    """Sets the variable whose choice is clearest: the largest lead of its best state over the second by local marginals."""
    chosen, state, lead = -1, 0, -1.0
    for v in range(len(done)):
        if done[v] or sizes[v] == 0:
            continue
        marginal = np.zeros(sizes[v])
        for t in _ordered(tables[v]):
            axis = t.scope.index(v)
            marginal += t.costs.min(axis=tuple(i for i in range(len(t.scope)) if i != axis))
        ranked = np.sort(marginal)
        margin = math.inf if len(ranked) == 1 else float(ranked[1] - ranked[0])
        margin = (margin if math.isfinite(margin) else 1e30) * (1 + len(tables[v]))
        if margin > lead:
            chosen, state, lead = v, int(marginal.argmin()), margin
    if chosen < 0:
        raise SbpInternalError("no variable left to set")
    near: set[int] = set()
    for t in _ordered(tables[chosen]):
        axis = t.scope.index(chosen)
        rest = tuple(x for x in t.scope if x != chosen)
        near.update(rest)
        for x in t.scope:
            tables[x].discard(t)
        if rest:
            smaller = _Table(rest, np.take(t.costs, state, axis=axis))
            for x in rest:
                tables[x].add(smaller)
    order.append((chosen, (), state))
    return chosen, near


def _descend(graph: CostGraph, states: list[int], sweeps: int = 50) -> list[int]:
    """Improves one variable, then one pair of neighbours at a time, until neither helps."""
    near = _neighbours(graph)
    states = list(states)
    for _ in range(sweeps):
        improved = False
        for v, u in enumerate(graph.unary):
            cost = u + sum((m[:, states[w]] for w, m in near[v].items()), np.zeros(len(u)))
            best = int(cost.argmin())
            if cost[best] < cost[states[v]] - 1e-15:
                states[v], improved = best, True
        for (a, b), m in graph.pairs.items():
            left = graph.unary[a] + sum((t[:, states[w]] for w, t in near[a].items() if w != b), np.zeros(len(graph.unary[a])))
            right = graph.unary[b] + sum((t[:, states[w]] for w, t in near[b].items() if w != a), np.zeros(len(graph.unary[b])))
            joint = left[:, None] + right[None, :] + m
            best = int(joint.argmin())
            i, j = divmod(best, joint.shape[1])
            if joint[i, j] < joint[states[a], states[b]] - 1e-15:
                states[a], states[b], improved = i, j, True
        if not improved:
            break
    return states
