"""Minimises a cost graph: exact reductions, exact elimination where its tables are small, message
passing with a certified bound elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sbp.solve.costgraph import CostGraph
from sbp.solve.elimination import eliminate
from sbp.solve.messages import Bounded, pass_messages
from sbp.solve.reduction import Core

TABLE_LIMIT = 300_000
"""Entries of the largest table that elimination may build."""

NEAR_LIMIT = 2_000_000
"""The same where only states near the bound are searched, which are few."""

ROUNDS = 6
"""How often message passing may shrink the problem before its best solution is taken as it is."""

STALE = 1e-4
"""Share by which a round must raise the bound for states near it to be searched again."""

SHARES = (
    1e-6,
    1e-5,
    1e-4,
    2e-4,
    4e-4,
    6e-4,
    8e-4,
    1e-3,
    1.3e-3,
    1.6e-3,
    2e-3,
    3e-3,
    4e-3,
    8e-3,
    1.6e-2,
)
"""Shares of the bound by which states may be dearer than the best of their variable, to be searched
together."""

UNSURE, HALVINGS = 8, 3
"""Variables that elimination may set by guess before a search of more states is given up, and how
often what is between is tried."""

TOLERANCE = 2e-3
"""Gap at which the search stops: the cost model itself is coarser than that. The gap that is left
is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver found.

    Arguments:
      states: the chosen state of each variable.
      cost: the total cost of `states`.
      lower_bound: no choice costs less; equal to `cost` when the choice is optimal.
    """

    states: tuple[int, ...]
    cost: float
    lower_bound: float


class Search:
    """Searches a cost graph, whole or in parts, and keeps the cheapest states found.

    Arguments:
      graph: the costs.
      table_limit: the largest table elimination may build, in entries.
      near_limit: the same where only states near the bound are searched.
      cutoff: the search ends when a bound shows that no choice costs less than this.

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
        near_limit: int = NEAR_LIMIT,
        cutoff: float = math.inf,
    ) -> None:
        self.graph, self.table_limit, self.near_limit, self.cutoff = (
            graph,
            table_limit,
            near_limit,
            cutoff,
        )
        self.best: tuple[int, ...] | None = None
        self.cost = math.inf

    def solution(self, bound: float) -> Solution | None:
        """The best states found, with a lower bound; None when none has a finite cost."""
        if self.best is None or not math.isfinite(self.cost):
            return None
        return Solution(states=self.best, cost=self.cost, lower_bound=min(bound, self.cost))

    def is_near(self, bound: float, share: float) -> bool:
        """Whether the best states found cost at most a share more than a bound, or the bound is
        above the cutoff."""
        return math.isfinite(self.cost) and (
            bound > self.cutoff or self.cost - bound <= share * self.cost
        )

    def run(self, core: Core, rounds: int = ROUNDS) -> float:
        """Searches a reduced core, which it may shrink, in at most `rounds` rounds; returns a lower
        bound on the core's cost."""
        if not core.feasible:
            return math.inf
        bound = -math.inf
        for _ in range(rounds):
            states, conditioned = eliminate(core, self.table_limit)
            self._offer(states, core)
            if conditioned == 0:
                # States dropped earlier could only have led to costs of at least the best known
                # then.
                return self.cost
            self._offer(_windows(core, states, self.table_limit), core)
            found = pass_messages(core)
            before, bound = bound, max(bound, core.constant + found.lower_bound)
            if bound <= self.cutoff:
                self._offer(_windows(core, found.states, self.table_limit), core)
            if self.is_near(bound, TOLERANCE):
                break
            # `found` speaks of the core as it is before states are dropped.
            if bound - before <= STALE * abs(bound):
                break
            if self._near(core, found, core.constant + found.lower_bound):
                return self.cost
            if not _fix(core, found.marginals, self.cost - (core.constant + found.lower_bound)):
                break
            if not core.feasible:
                return self.cost
        return min(bound, self.cost)

    def _near(self, core: Core, found: Bounded, bound: float) -> bool:
        """Searches the states that by their marginals cost little more than the bound, more of them
        in each turn; whether all states were searched."""
        low, high = 0.0, 0.0
        for share in SHARES:
            slack = self.cost - bound
            unsure = self._within(core, found, min(share * bound, slack))
            if unsure == 0 and share * bound >= slack:
                return True
            if unsure > UNSURE:
                high = share
                break
            low = share
        for _ in range(HALVINGS if low and high else 0):
            middle = math.sqrt(low * high)
            if self._within(core, found, min(middle * bound, self.cost - bound)) > UNSURE:
                high = middle
            else:
                low = middle
        return False

    def _within(self, core: Core, found: Bounded, slack: float) -> int:
        """Searches the states within `slack` of the best state of their variable; returns how many
        variables elimination set by guess, -1 where no state fits."""
        part = core.fork()
        part.solved, kept = [], list(core.kept)
        part.kept = [np.arange(0)] * len(kept)
        for v, u in core.unary.items():
            part.kept[v] = np.arange(len(u))
        for v in core.unary:
            part.keep(v, found.marginals[v] <= slack + 1e-12)
        part.reduce()
        if not part.feasible:
            return -1
        states, unsure = eliminate(part, self.near_limit)
        states = part.extend_over(states)
        self._offer(states, core)
        if unsure > UNSURE:
            self._offer(_windows(core, states, self.table_limit), core)
        return unsure

    def _offer(self, states: dict[int, int], core: Core) -> None:
        full = core.extend(states)
        cost = self.graph.cost_of(full)
        if cost < self.cost:
            self.best, self.cost = tuple(full), cost


def _windows(
    core: Core, states: dict[int, int], table_limit: int, width: int = 48, passes: int = 3
) -> dict[int, int]:
    """Improves states by solving windows of neighbouring variables exactly while the others stay
    fixed, until no window improves.

    Arguments:
      core: the problem.
      states: a state for each variable.
      table_limit: entries of the largest table.
      width: variables in a window.
      passes: the most passes over all windows.
    """
    order = sorted(core.unary)
    states = dict(states)
    for _ in range(passes):
        improved = False
        for start in range(0, len(order), width // 2):
            window = set(order[start : start + width])
            part = Core(unary={}, near={v: {} for v in window}, kept=[])
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
                states.update(found)
                improved = True
        if not improved:
            break
    return states


def _local_cost(core: Core, states: dict[int, int]) -> float:
    total = sum(float(u[states[v]]) for v, u in core.unary.items())
    return total + sum(
        float(t[states[v], states[w]]) for v in core.unary for w, t in core.near[v].items() if v < w
    )


def _fix(core: Core, marginals: dict[int, np.ndarray], slack: float) -> bool:
    """Drops states whose lower bound is above the best solution known (reduced-cost fixing);
    whether any went."""
    touched: set[int] = set()
    for v in sorted(core.unary):
        alive = marginals[v] <= slack + 1e-12
        if not alive.all():
            if not alive.any():
                core.feasible = False  # nothing better than the best known is left
                return True
            touched |= {v} | core.keep(v, alive)
    if touched:
        core.reduce(sorted(touched & core.unary.keys()))
    return bool(touched)
