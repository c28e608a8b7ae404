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
    order = sorted(core.unary)
    unary = {v: np.where(np.isfinite(core.unary[v]), core.unary[v], forbidden) for v in order}
    tables: dict[tuple[int, int], np.ndarray] = {}
    for v in order:
        for w, t in core.near[v].items():
            if v < w:
                finite = np.where(np.isfinite(t), t, forbidden)
                tables[v, w] = finite
                tables[w, v] = np.ascontiguousarray(finite.T)
    later = {v: [w for w in sorted(core.near[v]) if w > v] for v in order}
    earlier = {v: [w for w in sorted(core.near[v]) if w < v] for v in order}
    share = {v: 1.0 / max(1, len(later[v]), len(earlier[v])) for v in order}
    # messages[s, t] has an entry per state of t.
    messages = {(s, t): np.zeros(tables[s, t].shape[1]) for s, t in tables}
    best: dict[int, int] = {}
    best_cost, bound, gained = np.inf, -np.inf, False
    stale = 0
    marginals: dict[int, np.ndarray] = {}
    finished = False
    for sweep in range(sweeps + 1):
        states: dict[int, int] = {}
        for v in order:
            belief = unary[v].copy()
            conditioned = unary[v].copy()
            for w in earlier[v]:
                belief += messages[w, v]
                conditioned += tables[w, v][states[w]]
            for w in later[v]:
                belief += messages[w, v]
                conditioned += messages[w, v]
            states[v] = int(conditioned.argmin())
            # Exact here, where messages of both sides are up to date: the bound with v in a state
            # is the bound plus this.
            marginals[v] = belief - belief.min()
            scaled = belief * share[v]
            for w in later[v]:
                message = (tables[v, w] + (scaled - messages[w, v])[:, None]).min(axis=0)
                message -= message.min()
                messages[v, w] = message
        cost = sum(float(unary[v][states[v]]) for v in order)
        cost += sum(float(tables[v, w][states[v], states[w]]) for v in order for w in later[v])
        if cost < best_cost:
            gained, best, best_cost = cost < best_cost - 1e-12, states, cost
        else:
            gained = False
        if finished or sweep == sweeps:
            break  # this forward pass was for the marginals
        total = 0.0
        for v in reversed(order):
            belief = unary[v].copy()
            for w in core.near[v]:
                belief += messages[w, v]
            least = float(belief.min())
            total += least
            scaled = (belief - least) * share[v]
            for w in earlier[v]:
                message = (tables[v, w] + (scaled - messages[w, v])[:, None]).min(axis=0)
                least = float(message.min())
                total += least
                messages[v, w] = message - least
        gained = gained or total > bound + 1e-4 * max(abs(bound), 1e-12)
        bound = max(bound, total)
        stale = 0 if gained else stale + 1
        finished = best_cost - bound <= 1e-9 * max(1e-9, abs(best_cost)) or stale >= patience
    return Bounded(states=best, cost=best_cost, lower_bound=bound, marginals=marginals)
