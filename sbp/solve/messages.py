"""Sequential tree-reweighted message passing (TRW-S; Kolmogorov, PAMI 2006): a lower bound on the
cost of a core, and a good solution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp.solve.reduction import Core

SWEEPS, PATIENCE = 16, 5
"""Most sweeps, and the sweeps without gain after which message passing stops."""

GAIN = 1e-4
"""Share by which a sweep has to raise the bound to count as a gain."""

FORBIDDEN = 1e3
"""Seconds that stand for an infinite cost while messages are passed. The bound stays valid with any
number here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A solution of a core, and a lower bound on the cost of all solutions.

    Arguments:
      states: a state for each variable of the core.
      cost: the cost of `states` within the core, in seconds.
      lower_bound: seconds. No solution of the core costs less.
      marginals: for each variable and each of its states, seconds. No solution with this state
        costs less than the bound of the last sweep plus these seconds.
      kept: for each variable, its states by their numbers in the whole graph.
      messages: from a variable to a neighbour, an entry for each state of the neighbour.
    """

    states: dict[int, int]
    cost: float
    lower_bound: float
    marginals: dict[int, np.ndarray]
    kept: dict[int, np.ndarray]
    messages: dict[tuple[int, int], np.ndarray]


def pass_messages(
    core: Core,
    start: Bounded | None = None,
    *,
    sweeps: int = SWEEPS,
    patience: int = PATIENCE,
    forbidden: float = FORBIDDEN,
) -> Bounded:
    """Passes messages until the bound reaches the cost of the solution, until sweeps bring no gain,
    or for `sweeps` sweeps.

    Arguments:
      core: a feasible core.
      start: what was found when the core had more variables and states: its messages are the first
        ones. None to start without messages.
      sweeps: the most sweeps.
      patience: the number of sweeps without gain after which to stop.
      forbidden: seconds that stand for an infinite cost.
    """
    passing = _Passing(core, forbidden)
    if start is not None:
        passing.resume(start, core)
    best: dict[int, int] = {}
    best_cost, bound, gained = np.inf, -np.inf, False
    stale = 0
    finished = False
    for sweep in range(sweeps + 1):
        states = passing.forward()
        cost = passing.cost_of(states)
        if cost < best_cost:
            gained, best, best_cost = cost < best_cost - 1e-12, states, cost
        else:
            gained = False
        if finished or sweep == sweeps:
            break  # this forward pass computed the marginals
        total = passing.backward()
        gained = gained or total > bound + GAIN * max(abs(bound), 1e-12)
        bound = max(bound, total)
        stale = 0 if gained else stale + 1
        finished = best_cost - bound <= 1e-9 * max(1e-9, abs(best_cost)) or stale >= patience
    return Bounded(
        states=best,
        cost=best_cost,
        lower_bound=bound,
        marginals=passing.marginals,
        kept={v: core.kept[v] for v in passing.order},
        messages=passing.messages,
    )


class _Passing:
    """The messages between neighbours of a core. A sweep visits the variables in the order of their
    numbers, then in the opposite order.

    Arguments:
      core: a feasible core.
      forbidden: seconds that stand for an infinite cost.
    """

    def __init__(self, core: Core, forbidden: float) -> None:
        self.order = core.order
        rank = {v: i for i, v in enumerate(self.order)}
        self.near = core.near
        self.unary = {
            v: np.where(np.isfinite(core.unary[v]), core.unary[v], forbidden) for v in self.order
        }
        self.tables: dict[tuple[int, int], np.ndarray] = {}
        for v in self.order:
            for w, t in core.near[v].items():
                if rank[v] < rank[w]:
                    finite = np.where(np.isfinite(t), t, forbidden)
                    self.tables[v, w] = finite
                    self.tables[w, v] = np.ascontiguousarray(finite.T)
        around = {v: sorted(core.near[v], key=rank.__getitem__) for v in self.order}
        self.later = {v: [w for w in ws if rank[w] > rank[v]] for v, ws in around.items()}
        self.earlier = {v: [w for w in ws if rank[w] < rank[v]] for v, ws in around.items()}
        self.share = {v: 1.0 / max(1, len(self.later[v]), len(self.earlier[v])) for v in self.order}
        # messages[s, t] has an entry for each state of t.
        self.messages = {(s, t): np.zeros(self.tables[s, t].shape[1]) for s, t in self.tables}
        self.marginals: dict[int, np.ndarray] = {}

    def resume(self, start: Bounded, core: Core) -> None:
        """Takes the messages of an earlier run, for the states that are left. Any messages give a
        valid bound."""
        for (s, t), message in start.messages.items():
            if (s, t) in self.messages:
                self.messages[s, t] = message[np.searchsorted(start.kept[t], core.kept[t])]

    def forward(self) -> dict[int, int]:
        """Passes messages to later variables.

        Returns:
          A state for each variable, the best one for the states of the earlier variables.
        """
        states: dict[int, int] = {}
        for v in self.order:
            belief = self.unary[v].copy()
            conditioned = self.unary[v].copy()
            for w in self.earlier[v]:
                belief += self.messages[w, v]
                conditioned += self.tables[w, v][states[w]]
            for w in self.later[v]:
                belief += self.messages[w, v]
                conditioned += self.messages[w, v]
            states[v] = int(conditioned.argmin())
            # Messages from both sides are up to date here: with v in a state, the lower bound is
            # the bound of the core plus this entry.
            self.marginals[v] = belief - belief.min()
            scaled = belief * self.share[v]
            for w in self.later[v]:
                message = (self.tables[v, w] + (scaled - self.messages[w, v])[:, None]).min(axis=0)
                message -= message.min()
                self.messages[v, w] = message
        return states

    def cost_of(self, states: dict[int, int]) -> float:
        """The cost of a choice of one state for each variable."""
        cost = sum(float(self.unary[v][states[v]]) for v in self.order)
        cost += sum(
            float(self.tables[v, w][states[v], states[w]])
            for v in self.order
            for w in self.later[v]
        )
        return cost

    def backward(self) -> float:
        """Passes messages to earlier variables.

        Returns:
          A lower bound on the core's cost.
        """
        total = 0.0
        for v in reversed(self.order):
            belief = self.unary[v].copy()
            for w in self.near[v]:
                belief += self.messages[w, v]
            least = float(belief.min())
            total += least
            scaled = (belief - least) * self.share[v]
            for w in self.earlier[v]:
                message = (self.tables[v, w] + (scaled - self.messages[w, v])[:, None]).min(axis=0)
                least = float(message.min())
                total += least
                self.messages[v, w] = message - least
        return total
