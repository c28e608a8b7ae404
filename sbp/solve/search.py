"""Minimises a cost graph: by exact elimination where its tables are small, elsewhere by message
passing, which gives a lower bound, and by searches near that bound."""

import heapq
import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbp.solve.costgraph import Core, CostGraph
from sbp.solve.messages import Bounded, pass_messages

# ---- elimination --------------------------------------------------------------------------------
# Minimisation by variable elimination (bucket elimination). It is exact while tables stay small.
# Where a table would be too large, the variable with the clearest best state is set to that state.


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
    order = _order(core, limit, smallest=True) or _order(core, ordered_limit, smallest=False)
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

    def cost(v: int) -> tuple[int, int]:
        others = near[v]
        links = 0 if smallest else sum(len(others - near[w]) - 1 for w in others)
        return links, math.prod([sizes[w] for w in others], start=sizes[v])

    queue, order = [(cost(v), v) for v in near], []
    for (_, size), v in _cheapest_first(queue, cost, near):
        if size > limit:
            return None
        others = near.pop(v)
        order.append(v)
        for w in others:
            near[w] = (near[w] | others) - {v, w}
        for w in others:
            heapq.heappush(queue, (cost(w), w))
    return order


def _cheapest_first(
    queue: list[tuple[Any, int]], cost: Callable[[int], Any], left: Container[int]
) -> Iterator[tuple[Any, int]]:
    """The variables that are left, each with its cost, the cheapest first, and of equally
    cheap ones the smallest number. The caller may remove variables from `left` and change costs.

    Arguments:
      queue: variables with their costs. The caller adds a variable again when its cost may have
        become less.
      cost: the present cost of a variable.
      left: the variables that are left.
    """
    heapq.heapify(queue)
    while queue:
        expected, v = heapq.heappop(queue)
        if v in left:
            current = cost(v)
            if current > expected:
                heapq.heappush(queue, (current, v))
            else:
                yield current, v


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
    return _Elimination(core, table_limit).run()


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
            for w in (w for w in core.near[v] if v < w):
                self.enter(_Table((v, w), core.near[v][w]))

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

    def run(self) -> tuple[dict[int, int], int]:
        left, conditioned = set(self.sizes), 0
        queue = [(self.weight(v), v) for v in left]
        for current, v in _cheapest_first(queue, self.weight, left):
            if current > self.limit:
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
        axes, parts = (*scope, v), sorted(self.tables[v], key=lambda t: t.scope)
        joined = np.zeros([self.sizes[w] for w in axes])
        for t in parts:
            order = sorted(range(len(t.scope)), key=[axes.index(w) for w in t.scope].__getitem__)
            sizes = [self.sizes[w] if w in t.scope else 1 for w in axes]
            joined += t.costs.transpose(order).reshape(sizes)
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
        self.leads |= {v: self.lead_of(v) for v in left if v not in self.leads}
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


# ---- search -------------------------------------------------------------------------------------


TABLE_LIMIT = 300_000
"""Most entries of a table that elimination builds."""

ORDERED_LIMIT = 8_000_000
"""Most entries of a table where variables are eliminated in the order that links the fewest. One
table of this size has 64 MB."""

NEAR_LIMIT = 2_000_000
"""Most entries of a table where only states near the bound are searched. There are few such states,
so few tables are that large."""

STALE = 1e-3
"""Share by which a round has to raise the bound. Otherwise the search ends."""

TOLERANCE = 3e-4
"""Gap, as a share of the cost, at which the search stops. The report shows the gap. The cost model
itself is less precise than that."""

SHARES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3e-3, 6e-3, 1.2e-2)
"""Shares of the bound, tried in turn. States are searched together whose bound is at most such a
share above the bound of the best state of their variable. A share that improves no solution is the
last one."""

ROUNDING = 1e-9
"""Share by which the cost of a solution within a core and in the whole graph may differ, by the
order of the sums."""

WINDOW, PASSES = 48, 3
"""Variables with successive numbers that are solved together while the others stay fixed, and most
passes over all such windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The cheapest choice of states that a search found.

    Arguments:
      states: the chosen state of each variable.
      cost: the total cost of `states`, in seconds.
      lower_bound: seconds. No choice costs less. It equals `cost` when the choice is optimal.
    """

    states: tuple[int, ...]
    cost: float
    lower_bound: float


class Search:
    """Searches a cost graph, whole or in parts, and keeps the cheapest states found.

    Arguments:
      graph: the costs, in seconds.
      table_limit: most entries of a table that elimination builds.
      ordered_limit: the same where variables that link the fewest others come first.
      near_limit: the same where only states near the bound are searched.
      cutoff: seconds. The search ends when a bound shows that no choice costs less.

    >>> g = CostGraph()
    >>> a, b = g.variable(np.array([0.0, 1.0])), g.variable(np.array([0.0, 0.0]))
    >>> g.add_pair(a, b, np.array([[5.0, 5.0], [0.0, 3.0]]))
    >>> search = Search(g)
    >>> search.solution(search.run(Core.of(g))).states
    (1, 0)
    """

    def __init__(
        self,
        graph: CostGraph,
        *,
        table_limit: int = TABLE_LIMIT,
        ordered_limit: int = ORDERED_LIMIT,
        near_limit: int = NEAR_LIMIT,
        cutoff: float = math.inf,
    ) -> None:
        self.graph, self.cutoff = graph, cutoff
        self.table_limit, self.near_limit = table_limit, near_limit
        self.ordered_limit = ordered_limit
        self.best: tuple[int, ...] | None = None
        self.cost = math.inf

    def solution(self, bound: float) -> Solution | None:
        """The best states found, with a lower bound.

        Arguments:
          bound: seconds. No choice costs less.

        Returns:
          None when no choice with a finite cost was found.
        """
        return (
            None
            if self.best is None or not math.isfinite(self.cost)
            else Solution(states=self.best, cost=self.cost, lower_bound=min(bound, self.cost))
        )

    def run(self, core: Core) -> float:
        """Searches a reduced core.

        Arguments:
          core: the problem.

        Returns:
          A lower bound on the core's cost, in seconds; infinite where no solution is possible.
        """
        if not core.feasible:
            return math.inf
        bound, found = -math.inf, None
        while True:
            exact = eliminate_exactly(core, self.table_limit, self.ordered_limit)
            if exact is not None:
                # With a state that was dropped, no solution costs less than the best one.
                self._offer(exact, core)
                return self.cost
            found = pass_messages(core, found)
            before, bound = bound, max(bound, core.constant + found.lower_bound)
            is_first = math.isinf(self.cost)
            if is_first:
                self._offer(found.states, core)
            stale = bound - before <= STALE * abs(bound)
            if math.isfinite(self.cost) and (bound > self.cutoff or stale):
                break
            known = self.cost
            if self._near(core, found, core.constant + found.lower_bound):
                return self.cost
            if is_first and self.cost == known:  # windows take longer than the first search near it
                self._offer(windows(core, found.states, self.table_limit), core)
            if math.isinf(self.cost):
                states, _ = eliminate(core, self.table_limit)
                self._offer(states, core)
                self._offer(windows(core, states, self.table_limit), core)
            close = bound > self.cutoff or self.cost - bound <= TOLERANCE * self.cost
            if stale or (math.isfinite(self.cost) and close):
                break
            # With fewer states, messages give a higher bound.
            if not _fix(core, found.marginals, self.cost - (core.constant + found.lower_bound)):
                break
            if not core.feasible:
                return self.cost
        return min(bound, self.cost)

    def _near(self, core: Core, found: Bounded, bound: float) -> bool:
        """Searches the states whose lower bound is little above the bound of the core, more of them
        in each turn.

        Arguments:
          core: the problem.
          found: its marginals.
          bound: a lower bound on the core's cost, in seconds.

        Returns:
          Whether all states that can improve the best solution were searched, exactly.
        """
        for share in SHARES:
            slack, before = self.cost - bound, self.cost
            guessed = self._within(core, found, min(share * bound, slack))
            if guessed == 0 and share * bound >= slack:
                return True
            if guessed or not (self.cost < before or math.isinf(before)):
                return False
        return False

    def _within(self, core: Core, found: Bounded, slack: float) -> int:
        """Searches the states within some seconds of the best state of their variable.

        Arguments:
          core: the problem.
          found: its marginals.
          slack: seconds.

        Returns:
          The number of variables that elimination set by guess; 0 where these states have no
          solution of finite cost.
        """
        # States by their numbers in the core.
        numbered = [np.arange(len(core.unary.get(v, ()))) for v in range(len(core.kept))]
        near = {v: dict(tables) for v, tables in core.near.items()}
        part = replace(core, unary=dict(core.unary), near=near, kept=numbered, solved=[])
        for v in core.unary:
            part.keep(v, found.marginals[v] <= slack + 1e-12)
        part.reduce()
        if not part.feasible:
            return 0
        states, guessed = eliminate(part, self.near_limit)
        self._offer(part.extend(states), core)
        return guessed

    def _offer(self, states: dict[int, int], core: Core) -> None:
        """Keeps a solution of a core if it is cheaper than the best one."""
        # Most are not: to go over the whole graph takes ten times as long as over the core.
        if core.constant + _local_cost(core, states) > self.cost * (1 + ROUNDING):
            return
        states = core.extend(states)
        full = [states[v] for v in range(len(core.kept))]
        cost = self.graph.cost_of(full)
        if cost < self.cost:
            self.best, self.cost = tuple(full), cost


def windows(
    core: Core,
    states: dict[int, int],
    table_limit: int,
    *,
    width: int = WINDOW,
    passes: int = PASSES,
) -> dict[int, int]:
    """Improves a solution: windows of variables with successive numbers are solved by elimination
    while the others stay fixed, until no window improves.

    Arguments:
      core: the problem.
      states: a state for each variable.
      table_limit: most entries of a table.
      width: the number of variables in a window. Windows overlap by half.
      passes: the most passes over all windows.

    Returns:
      A state for each variable, which cost no more than `states`.
    """
    order = core.order
    states = dict(states)
    # The windows whose variables or neighbours have changed since they were solved.
    starts = range(0, len(order), width // 2)
    pending = set(starts)
    reaches: dict[int, set[int]] = {v: set() for v in order}
    for start in starts:
        for v in order[start : start + width]:
            for w in (v, *core.near[v]):
                reaches[w].add(start)
    for _ in range(passes):
        for start in (start for start in starts if start in pending):
            pending.discard(start)
            window = set(order[start : start + width])
            part = Core(unary={}, near={v: {} for v in window}, kept=[], places=[])
            for v in window:
                unary = core.unary[v]
                for w, table in core.near[v].items():
                    if w in window:
                        part.near[v][w] = table
                    else:
                        unary = unary + table[:, states[w]]
                part.unary[v] = unary
            found, _ = eliminate(part, table_limit)
            if _local_cost(part, found) < _local_cost(part, {v: states[v] for v in window}) - 1e-15:
                for v, state in found.items():
                    if states[v] != state:
                        pending |= reaches[v] - {start}
                states.update(found)
    return states


def _local_cost(core: Core, states: dict[int, int]) -> float:
    total = sum(float(u[states[v]]) for v, u in core.unary.items())
    return total + sum(
        float(t[states[v], states[w]]) for v in core.unary for w, t in core.near[v].items() if v < w
    )


def _fix(core: Core, marginals: dict[int, np.ndarray], slack: float) -> bool:
    """Drops states whose lower bound is above the cost of the best solution (reduced-cost fixing).

    Arguments:
      core: the problem.
      marginals: for each variable and state, seconds by which its lower bound is above the core's.
      slack: seconds by which the best solution is above the core's lower bound.

    Returns:
      Whether a state was dropped.
    """
    touched: set[int] = set()
    for v in sorted(core.unary):
        alive = marginals[v] <= slack + 1e-12
        if not alive.all():
            if not alive.any():
                core.feasible = False  # no solution is better than the best one
                return True
            touched |= {v} | core.keep(v, alive)
    if touched:
        core.reduce(sorted(touched & core.unary.keys()))
    return bool(touched)


def solve(graph: CostGraph, cutoff: float = math.inf) -> Solution | None:
    """Searches the cheapest states of a cost graph.

    Arguments:
      graph: the costs, in seconds.
      cutoff: seconds. The search ends when a bound shows that no choice costs less.

    Returns:
      A solution, or None when no choice has a finite cost.
    """
    search, core = Search(graph, cutoff=cutoff), Core.of(graph)
    core.reduce()
    return search.solution(search.run(core))
