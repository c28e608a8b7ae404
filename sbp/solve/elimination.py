"""Minimisation by variable elimination (bucket elimination). It is exact while tables stay small.
Where a table would be too large, the variable with the clearest best state is set to that state."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from sbp.solve.reduction import Core


@dataclass(slots=True, eq=False)
class _Table:
    scope: tuple[int, ...]
    costs: np.ndarray


def eliminate_exactly(core: Core, limit: int, ordered_limit: int) -> dict[int, int] | None:
    """The cheapest states of a core, by elimination where no table is too large.

    The smallest table comes first, or else the variable that links the fewest others. Programs that
    read their results on several levels, such as `lax.associative_scan`, have small tables in the
    second order, and large ones in the first.

    Arguments:
      core: the problem.
      limit: most entries of a table in the first order.
      ordered_limit: most entries of a table in the second order.

    Returns:
      A state for each variable; None where a table would be larger in both orders.
    """
    order = _order(core, limit, smallest=True)
    if order is None:
        order = _order(core, ordered_limit, smallest=False)
    if order is None:
        return None
    elimination = _Elimination(core, max(limit, ordered_limit))
    for v in order:
        elimination.solve_away(v)
    return elimination.states()


def _order(core: Core, limit: int, *, smallest: bool) -> list[int] | None:
    """An order of variables, found without any table. None where a table would be too large.

    Arguments:
      core: the problem.
      limit: most entries of a table.
      smallest: whether the variable with the smallest table comes next; otherwise the one that
        links the fewest pairs of variables by a new table, and of equals the one with the smallest.
    """
    sizes = {v: len(u) for v, u in core.unary.items()}
    near = {v: set(others) for v, others in core.near.items()}

    def key(v: int) -> tuple[int, int, int]:
        others = near[v]
        links = 0 if smallest else sum(len(others - near[w]) - 1 for w in others)
        return links, math.prod([sizes[w] for w in others], start=sizes[v]), v

    queue, order = [key(v) for v in near], []
    heapq.heapify(queue)
    while queue:
        expected = heapq.heappop(queue)
        v = expected[2]
        if v not in near:
            continue
        current = key(v)
        if current > expected:
            heapq.heappush(queue, current)
            continue
        if current[1] > limit:
            return None
        others = near.pop(v)
        order.append(v)
        for w in others:
            near[w] = (near[w] | others) - {v, w}
        for w in others:
            heapq.heappush(queue, key(w))
    return order


def eliminate(core: Core, table_limit: int) -> tuple[dict[int, int], int]:
    """Searches the cheapest states of a core.

    The variable with the smallest joined table is eliminated first; of equals the one with the
    smallest number. Where that table would have more than `table_limit` entries, one variable is
    set to its best state instead: the variable for which the second best state costs most more than
    the best one, in the tables of that variable.

    Arguments:
      core: the problem.
      table_limit: most entries of a table.

    Returns:
      A state for each variable, and the number of variables that were set instead of eliminated. If
      that is 0, the states are optimal.
    """
    found = eliminate_unless_unsure(core, table_limit, len(core.unary))
    assert found is not None
    return found


def eliminate_unless_unsure(
    core: Core, table_limit: int, unsure: int
) -> tuple[dict[int, int], int] | None:
    """As `eliminate`; None where more than `unsure` variables would be set instead of
    eliminated."""
    return _Elimination(core, table_limit).run(unsure)


class _Elimination:
    """The tables of a core while its variables are eliminated.

    Arguments:
      core: the problem.
      table_limit: most entries of a table.
    """

    def __init__(self, core: Core, table_limit: int) -> None:
        self.limit = table_limit
        self.sizes = {v: len(u) for v, u in core.unary.items()}
        self.tables: dict[int, dict[_Table, None]] = {v: {} for v in self.sizes}  # in order
        self.leads: dict[int, tuple[float, int]] = {}
        self.order: list[tuple[int, tuple[int, ...], np.ndarray]] = []
        for v, u in core.unary.items():
            self.enter(_Table((v,), u))
            for w, t in core.near[v].items():
                if v < w:
                    self.enter(_Table((v, w), t))

    def enter(self, table: _Table) -> None:
        for v in table.scope:
            self.tables[v][table] = None
            self.leads.pop(v, None)

    def leave(self, table: _Table) -> None:
        for v in table.scope:
            self.tables[v].pop(table, None)
            self.leads.pop(v, None)

    def scope_of(self, v: int) -> tuple[int, ...]:
        return tuple(sorted({w for t in self.tables[v] for w in t.scope} - {v}))

    def weight(self, v: int) -> int:
        return math.prod(self.sizes[w] for w in self.scope_of(v)) * self.sizes[v]

    def run(self, unsure: int) -> tuple[dict[int, int], int] | None:
        left = set(self.sizes)
        queue = [(self.weight(v), v) for v in left]
        heapq.heapify(queue)
        conditioned = 0
        while queue:
            expected, v = heapq.heappop(queue)
            if v not in left:
                continue
            current = self.weight(v)
            if current > expected:
                heapq.heappush(queue, (current, v))
                continue
            if current > self.limit:
                if conditioned >= unsure:
                    return None
                heapq.heappush(queue, (current, v))
                v, scope = self.condition(left)
                conditioned += 1
            else:
                scope = self.solve_away(v)
            left.discard(v)
            for x in scope:
                heapq.heappush(queue, (self.weight(x), x))
        return self.states(), conditioned

    def states(self) -> dict[int, int]:
        """The state of each variable that was solved away or set."""
        states: dict[int, int] = {}
        for v, scope, best in reversed(self.order):
            states[v] = int(best[tuple(states[x] for x in scope)])
        return states

    def solve_away(self, v: int) -> tuple[int, ...]:
        scope = self.scope_of(v)
        parts = sorted(self.tables[v], key=lambda t: t.scope)
        joined = _join((*scope, v), [(t.scope, t.costs) for t in parts], self.sizes)
        best = joined.argmin(axis=-1)
        self.order.append((v, scope, best.astype(np.int32)))
        for t in parts:
            self.leave(t)
        if scope:
            # The entries at `best` are the least ones; to look for these again takes longer.
            choices = joined.reshape(-1, self.sizes[v])
            least = choices[np.arange(len(choices)), best.ravel()]
            self.enter(_Table(scope, least.reshape(best.shape)))
        return scope

    def condition(self, left: set[int]) -> tuple[int, tuple[int, ...]]:
        """Sets the variable whose lead is largest to its best state.

        Returns:
          The variable, and the variables that share a table with it.
        """
        for v in left:
            if v not in self.leads:
                self.leads[v] = self.lead_of(v)
        v = min(left, key=lambda v: (-self.leads[v][0], v))
        state = self.leads[v][1]
        scope = self.scope_of(v)
        for t in sorted(self.tables[v], key=lambda t: t.scope):
            self.leave(t)
            rest = tuple(x for x in t.scope if x != v)
            if rest:
                self.enter(_Table(rest, np.take(t.costs, state, axis=t.scope.index(v))))
        self.order.append((v, (), np.array(state)))
        return v, scope

    def lead_of(self, v: int) -> tuple[float, int]:
        """By how much the second best state of a variable costs more than the best one, times one
        more than the number of its tables; and the best state."""
        marginal = np.zeros(self.sizes[v])
        for t in sorted(self.tables[v], key=lambda t: t.scope):
            axis = t.scope.index(v)
            marginal += t.costs.min(axis=tuple(i for i in range(len(t.scope)) if i != axis))
        if len(marginal) == 1:
            return math.inf, 0
        best, second = np.partition(marginal, 1)[:2]
        margin = float(second - best) if math.isfinite(second) else 1e30
        return margin * (1 + len(self.tables[v])), int(marginal.argmin())


def _join(
    scope: tuple[int, ...], parts: list[tuple[tuple[int, ...], np.ndarray]], sizes: dict[int, int]
) -> np.ndarray:
    """Adds up tables.

    Arguments:
      scope: the variables of the sum, in the order of its array axes.
      parts: the tables, each with its variables.
      sizes: the number of states of each variable.
    """
    total = np.zeros([sizes[v] for v in scope])
    place = {v: i for i, v in enumerate(scope)}
    for part, costs in parts:
        order = sorted(range(len(part)), key=lambda i: place[part[i]])
        shape = [1] * len(scope)
        for v in part:
            shape[place[v]] = sizes[v]
        total += costs.transpose(order).reshape(shape)
    return total
