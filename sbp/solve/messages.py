"""Sequential tree-reweighted message passing (TRW-S; Kolmogorov, PAMI 2006): a lower bound on the
cost of a core, and a good solution."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from sbp.solve.levels import Levels, batches
from sbp.solve.reduction import Core

SWEEPS, PATIENCE = 64, 5
"""Most sweeps, and the sweeps without gain after which message passing stops."""

GAIN = 5e-5
"""Share by which a sweep has to raise the bound to count as a gain."""

READ = 4
"""Sweeps from one solution that is read off the messages to the next."""

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
    best = np.arange(0)
    best_cost, bound = np.inf, -np.inf
    stale = 0
    finished = False
    for sweep in range(sweeps + 1):
        passing.forward()
        gained, last = False, finished or sweep == sweeps
        if last or sweep % READ == 0:
            states, cost = passing.solution()
            gained = cost < best_cost - 1e-12
            if cost < best_cost:
                best, best_cost = states, cost
        if last:
            break  # this forward pass computed the marginals
        total = passing.backward()
        gained = gained or total > bound + GAIN * max(abs(bound), 1e-12)
        bound = max(bound, total)
        stale = 0 if gained else stale + 1
        finished = best_cost - bound <= 1e-9 * max(1e-9, abs(best_cost)) or stale >= patience
    return Bounded(
        states=dict(zip(passing.layout.order, best.tolist(), strict=True)),
        cost=best_cost,
        lower_bound=bound,
        marginals=passing.marginals(),
        kept={v: core.kept[v] for v in passing.layout.order},
        messages=passing.sent(),
    )


class _Passing:
    """The messages between neighbours of a core. A sweep visits the levels of its variables in one
    direction, then in the other one.

    Arguments:
      core: a feasible core.
      forbidden: seconds that stand for an infinite cost.
    """

    def __init__(self, core: Core, forbidden: float) -> None:
        layout = self.layout = Levels.of(core)
        order, starts = layout.order, layout.starts
        self.sizes = [len(core.unary[v]) for v in order]
        # The rows of unary costs are infinite in the padding, so no padded state is ever chosen.
        self.messages = np.zeros((len(layout.pairs), layout.width))
        self.messages[starts[:-1]] = np.inf
        for v, row in zip(order, starts.tolist(), strict=False):
            unary = core.unary[v]
            self.messages[row, : len(unary)] = np.where(np.isfinite(unary), unary, forbidden)
        self.later = batches(core, layout, forbidden, later=True)
        self.earlier = batches(core, layout, forbidden, later=False)
        tables = [b.tables.size for level in (*self.later, *self.earlier) for b in level]
        self.room = np.empty(max(tables, default=0))
        self.beliefs = np.empty((len(order), layout.width))
        rank = layout.rank
        before = [sum(rank[w] < rank[v] for w in core.near[v]) for v in order]
        most = [max(1, b, len(core.near[v]) - b) for b, v in zip(before, order, strict=True)]
        self.shares = 1.0 / np.array(most)[:, None]
        self.levels = [
            (slice(a, b), slice(starts[a], starts[b]), starts[a:b] - starts[a])
            for a, b in itertools.pairwise(layout.levels)
        ]

    def resume(self, start: Bounded, core: Core) -> None:
        """Takes the messages of an earlier run, for the states that are left. Any messages give a
        valid bound."""
        starts = self.layout.starts.tolist()
        for number, t in enumerate(self.layout.order):
            if t in start.kept:
                left = np.searchsorted(start.kept[t], core.kept[t])
                for row in range(starts[number] + 1, starts[number + 1]):
                    known = start.messages.get(self.layout.pairs[row])
                    if known is not None:
                        self.messages[row, : len(left)] = known[left]

    def forward(self) -> None:
        """Passes messages to later variables."""
        messages = self.messages
        for (level, rows, parts), later in zip(self.levels, self.later, strict=True):
            belief = self.beliefs[level] = np.add.reduceat(messages[rows], parts, axis=0)
            scaled = belief * self.shares[level]
            for batch in later:
                # Not normalised: a constant in a message changes no difference of costs, and
                # `backward` takes it out again.
                message = batch.send(scaled, messages, self.room)
                messages[batch.sent, : message.shape[1]] = message

    def solution(self) -> tuple[np.ndarray, float]:
        """A state for each variable, the best one for the states of the earlier variables and the
        messages of the later ones; and the cost of these states."""
        states, cost = np.zeros(len(self.sizes), dtype=int), 0.0
        for (level, rows, parts), earlier in zip(self.levels, self.earlier, strict=True):
            received = self.messages[rows].copy()
            for batch in earlier:
                costs = batch.rows(states)
                received[batch.received - rows.start, : costs.shape[1]] = costs
            chosen = np.add.reduceat(received, parts, axis=0).argmin(axis=1)
            states[level] = chosen
            cost += float(received[parts, chosen].sum())
            for batch in earlier:
                cost += float(received[batch.received - rows.start, chosen[batch.sender]].sum())
        return states, cost

    def backward(self) -> float:
        """Passes messages to earlier variables.

        Returns:
          A lower bound on the core's cost.
        """
        total, messages = 0.0, self.messages
        for (level, rows, parts), earlier in zip(
            reversed(self.levels), reversed(self.earlier), strict=True
        ):
            belief = np.add.reduceat(messages[rows], parts, axis=0)
            least = belief.min(axis=1)
            total += float(least.sum())
            scaled = (belief - least[:, None]) * self.shares[level]
            for batch in earlier:
                message = batch.send(scaled, messages, self.room)
                least = message.min(axis=1)
                total += float(least.sum())
                messages[batch.sent, : message.shape[1]] = message - least[:, None]
        return total

    def marginals(self) -> dict[int, np.ndarray]:
        """For each variable and state, seconds by which the bound with this state is above the
        bound. Messages from both sides were up to date at each variable of the forward pass."""
        above = self.beliefs - self.beliefs.min(axis=1, initial=np.inf)[:, None]
        return {
            v: row[:size] for v, size, row in zip(self.layout.order, self.sizes, above, strict=True)
        }

    def sent(self) -> dict[tuple[int, int], np.ndarray]:
        """The messages by the variables between which they were passed."""
        return dict(zip(self.layout.pairs, self.messages, strict=True))
