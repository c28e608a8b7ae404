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
    best: list[int] = []
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
        states=dict(zip(passing.order, best, strict=True)),
        cost=best_cost,
        lower_bound=bound,
        marginals=passing.marginals(),
        kept={v: core.kept[v] for v in passing.order},
        messages=passing.sent(),
    )


@dataclass(frozen=True, slots=True)
class _Link:
    """A pair of neighbours, seen from one of them.

    Arguments:
      other: the position of the neighbour in the order.
      table: costs, an array [neighbour's state, own state].
      sent, received: the numbers of the messages to and from the neighbour.
      room: an array of the table's shape, for sums.
    """

    other: int
    table: np.ndarray
    sent: int
    received: int
    room: np.ndarray

    def send(self, scaled: np.ndarray, messages: list[np.ndarray]) -> np.ndarray:
        """The message to the neighbour, not normalised."""
        np.add(self.table, scaled - messages[self.received], self.room)
        return _least(self.room, 1)


_least = np.minimum.reduce


@dataclass(frozen=True, slots=True)
class _Visit:
    """What a sweep does at one variable.

    Arguments:
      unary: the costs of its states.
      earlier, later: its links to neighbours on both sides.
      share: the share of its belief that each message carries.
    """

    unary: np.ndarray
    earlier: tuple[_Link, ...]
    later: tuple[_Link, ...]
    share: float


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
        self.pairs = [(v, w) for v in self.order for w in core.near[v]]
        number = {pair: i for i, pair in enumerate(self.pairs)}
        # messages[i] has an entry for each state of the second variable of pairs[i].
        self.messages = [np.zeros(len(core.unary[w])) for _, w in self.pairs]
        self.beliefs: list[np.ndarray] = []
        rooms: dict[tuple[int, ...], np.ndarray] = {}

        def link(v: int, w: int) -> _Link:
            # The other direction is the transpose: `send` reads rows as fast as columns.
            table = core.near[w][v]
            table = np.where(np.isfinite(table), table, forbidden)
            if table.shape not in rooms:
                rooms[table.shape] = np.empty(table.shape)
            return _Link(rank[w], table, number[v, w], number[w, v], rooms[table.shape])

        self.visits: list[_Visit] = []
        for v in self.order:
            unary = np.where(np.isfinite(core.unary[v]), core.unary[v], forbidden)
            around = sorted(core.near[v], key=rank.__getitem__)
            earlier = tuple(link(v, w) for w in around if rank[w] < rank[v])
            later = tuple(link(v, w) for w in around if rank[w] > rank[v])
            share = 1.0 / max(1, len(later), len(earlier))
            self.visits.append(_Visit(unary, earlier, later, share))

    def resume(self, start: Bounded, core: Core) -> None:
        """Takes the messages of an earlier run, for the states that are left. Any messages give a
        valid bound."""
        for number, (s, t) in enumerate(self.pairs):
            if (s, t) in start.messages:
                left = np.searchsorted(start.kept[t], core.kept[t])
                self.messages[number] = start.messages[s, t][left]

    def forward(self) -> list[int]:
        """Passes messages to later variables.

        Returns:
          A state for each variable, the best one for the states of the earlier variables.
        """
        states: list[int] = []
        messages, beliefs = self.messages, []
        for visit in self.visits:
            belief = visit.unary
            for link in visit.later:
                belief = belief + messages[link.received]
            conditioned = belief
            for link in visit.earlier:
                belief = belief + messages[link.received]
                conditioned = conditioned + link.table[states[link.other]]
            states.append(int(conditioned.argmin()))
            beliefs.append(belief)
            scaled = belief * visit.share
            for link in visit.later:
                # Not normalised: a constant in a message changes no difference of costs, and
                # `backward` takes it out again.
                messages[link.sent] = link.send(scaled, messages)
        self.beliefs = beliefs
        return states

    def marginals(self) -> dict[int, np.ndarray]:
        """For each variable and state, seconds by which the bound with this state is above the
        bound. Messages from both sides were up to date at each variable of the forward pass."""
        return {v: b - b.min() for v, b in zip(self.order, self.beliefs, strict=True)}

    def sent(self) -> dict[tuple[int, int], np.ndarray]:
        """The messages by the variables between which they were passed."""
        return dict(zip(self.pairs, self.messages, strict=True))

    def cost_of(self, states: list[int]) -> float:
        """The cost of a choice of one state for each variable."""
        cost = 0.0
        for visit, state in zip(self.visits, states, strict=True):
            cost += float(visit.unary[state])
            for link in visit.earlier:
                cost += float(link.table[states[link.other], state])
        return cost

    def backward(self) -> float:
        """Passes messages to earlier variables.

        Returns:
          A lower bound on the core's cost.
        """
        total, messages = 0.0, self.messages
        for visit in reversed(self.visits):
            belief = visit.unary
            for link in visit.earlier:
                belief = belief + messages[link.received]
            for link in visit.later:
                belief = belief + messages[link.received]
            least = float(_least(belief))
            total += least
            scaled = (belief - least) * visit.share
            for link in visit.earlier:
                message = link.send(scaled, messages)
                least = float(_least(message))
                total += least
                messages[link.sent] = message - least
        return total
