"""Sequential tree-reweighted message passing (TRW-S; Kolmogorov, PAMI 2006): a lower bound and a
good solution of a pairwise core."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp.solve.reduction import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A solution of a core with a bound below which there is none.

    Arguments:
      states: a state for each variable of the core.
      cost: its cost within the core.
      lower_bound: no solution of the core is cheaper.
      marginals: for each variable, a lower bound on the core's cost for each of its states.
    """

    states: dict[int, int]
    cost: float
    lower_bound: float
    marginals: dict[int, np.ndarray]


def pass_messages(
    core: Core, *, sweeps: int = 40, patience: int = 5, forbidden: float = 1e3
) -> Bounded:
    """Runs sweeps until the bound meets the solution, stops rising, or `sweeps` are over.

    Arguments:
      core: a feasible core.
      sweeps: the most sweeps.
      patience: sweeps without gain after which to stop.
      forbidden: seconds that stand for an infinite cost.
    """
    passing = _Passing(core, forbidden)
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
            break  # this forward pass was for the marginals
        total = passing.backward()
        gained = gained or total > bound + 1e-4 * max(abs(bound), 1e-12)
        bound = max(bound, total)
        stale = 0 if gained else stale + 1
        finished = best_cost - bound <= 1e-9 * max(1e-9, abs(best_cost)) or stale >= patience
    return Bounded(states=best, cost=best_cost, lower_bound=bound, marginals=passing.marginals)


class _Passing:
    """The messages between neighbours of a core. Variables are visited in the order of their
    numbers, forward and backward in turn.

    Arguments:
      core: a feasible core.
      forbidden: seconds that stand for an infinite cost.
    """

    def __init__(self, core: Core, forbidden: float) -> None:
        self.order = sorted(core.unary)
        self.near = core.near
        self.unary = {
            v: np.where(np.isfinite(core.unary[v]), core.unary[v], forbidden) for v in self.order
        }
        self.tables: dict[tuple[int, int], np.ndarray] = {}
        for v in self.order:
            for w, t in core.near[v].items():
                if v < w:
                    finite = np.where(np.isfinite(t), t, forbidden)
                    self.tables[v, w] = finite
                    self.tables[w, v] = np.ascontiguousarray(finite.T)
        self.later = {v: [w for w in sorted(core.near[v]) if w > v] for v in self.order}
        self.earlier = {v: [w for w in sorted(core.near[v]) if w < v] for v in self.order}
        self.share = {v: 1.0 / max(1, len(self.later[v]), len(self.earlier[v])) for v in self.order}
        # messages[s, t] has an entry per state of t.
        self.messages = {(s, t): np.zeros(self.tables[s, t].shape[1]) for s, t in self.tables}
        self.marginals: dict[int, np.ndarray] = {}

    def forward(self) -> dict[int, int]:
        """Passes messages to later variables; returns a state for each variable, chosen given the
        states of the earlier ones."""
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
            # Messages of both sides are up to date here, so these are exact: the bound with v in a
            # state is the bound plus this.
            self.marginals[v] = belief - belief.min()
            scaled = belief * self.share[v]
            for w in self.later[v]:
                message = (self.tables[v, w] + (scaled - self.messages[w, v])[:, None]).min(axis=0)
                message -= message.min()
                self.messages[v, w] = message
        return states

    def cost_of(self, states: dict[int, int]) -> float:
        """The cost of a state for each variable."""
        cost = sum(float(self.unary[v][states[v]]) for v in self.order)
        cost += sum(
            float(self.tables[v, w][states[v], states[w]])
            for v in self.order
            for w in self.later[v]
        )
        return cost

    def backward(self) -> float:
        """Passes messages to earlier variables; returns a lower bound on the core's cost."""
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
