"""Sequential tree-reweighted message passing (TRW-S; Kolmogorov, PAMI 2006): a lower bound on the
cost of a core, and a good solution."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sbp.solve.costgraph import HUGE, Core, CostGraph

# ---- levels -------------------------------------------------------------------------------------
# The arrays of message passing: variables in levels without links inside, so that one NumPy
# operation sends the messages of a whole level.


PADDING = 16_384
"""Most entries of padding in a batch of tables. To go over so many takes as long as to send another
batch."""

ENTRIES = 131_072
"""Most entries of a batch of several tables: so few that they stay in the processor's cache."""


def _depths(core: Core) -> dict[int, int]:
    """The level of each variable: one more than that of its neighbours that come before it in
    breadth-first order. There are far fewer levels than in the order of the program."""
    depth: dict[int, int] = {}
    seen: set[int] = set()
    for first in core.order:
        found = [] if first in seen else [first]
        seen.add(first)
        for v in found:
            near = core.near[v]
            depth[v] = 1 + max((depth[w] for w in near if w in depth), default=-1)
            fresh = [w for w in near if w not in seen]
            found += sorted(fresh, key=core.places.__getitem__)
            seen.update(fresh)
    return depth


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Messages that one level sends in one NumPy operation.

    Arguments:
      tables: costs, an array [sender's state, message, receiver's state], padded with `HUGE`.
      sender, receiver: the positions of both in the order of the layout; the former within the
        level.
      sent, received: the rows of the messages to and from the receivers.
    """

    tables: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    sent: np.ndarray
    received: np.ndarray

    def send(self, scaled: np.ndarray, messages: np.ndarray, room: np.ndarray) -> np.ndarray:
        """The messages, not normalised: an array [message, receiver's state].

        Arguments:
          scaled: the beliefs of the level that each message carries, an array [variable, state].
          messages: all messages.
          room: an array of at least as many entries as `tables`, for sums.
        """
        states = self.tables.shape[0]
        own = scaled[self.sender, :states] - messages[self.received, :states]
        sums = room[: self.tables.size].reshape(self.tables.shape)
        np.add(self.tables, own.T[:, :, None], out=sums)
        return np.minimum.reduce(sums, axis=0)

    def rows(self, states: np.ndarray) -> np.ndarray:
        """The costs of each sender's states with a state for each variable: an array [message,
        sender's state]."""
        return self.tables[:, np.arange(len(self.receiver)), states[self.receiver]].T


_Sized = tuple[int, int, int, int]


def _groups(links: list[_Sized]) -> list[list[_Sized]]:
    """Links of similar size, which share an array."""
    groups: list[list[_Sized]] = []
    states = others = entries = 0
    for link in sorted(links, reverse=True):
        size = link[0] * link[1]
        states, others, entries = max(states, link[0]), max(others, link[1]), entries + size
        padded = states * others * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded - entries > PADDING or padded > ENTRIES:
            groups.append([])
            states, others, entries = link[0], link[1], size
        groups[-1].append(link)
    return groups


# ---- messages -----------------------------------------------------------------------------------


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
      lower_bound: seconds. No solution of the core costs less.
      marginals: for each variable and each of its states, seconds. No solution with this state
        costs less than the bound of the last sweep plus these seconds.
      kept: for each variable, its states by their numbers in the whole graph.
      messages: from a variable to a neighbour, an entry for each state of the neighbour.
    """

    states: dict[int, int]
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
    best_cost, bound, stale, finished = np.inf, -np.inf, 0, False
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
        states=dict(zip(passing.order, best.tolist(), strict=True)),
        lower_bound=bound,
        marginals=passing.marginals(),
        kept={v: core.kept[v] for v in passing.order},
        messages=dict(zip(passing.pairs, passing.messages, strict=True)),
    )


class _Passing:
    """The messages between neighbours of a core. A sweep visits the levels of its variables in one
    direction, then in the other one.

    Arguments:
      core: a feasible core.
      forbidden: seconds that stand for an infinite cost.

    Attributes:
      order: the variables, by level. Variables of one level are not linked.
      rank: the position of each variable in `order`.
      pairs: for each row of the array of messages, its sender and its receiver. Each variable has
        a row (itself, itself) for its unary costs, followed by the messages that it receives.
      row: the row of each pair.
      starts: the first row of each variable, and the number of rows.
      levels: of each level the variables, their rows, and the first row of each variable in these.
      messages: an array [row, state]; as many columns as the variable with most states needs.
    """

    def __init__(self, core: Core, forbidden: float) -> None:
        self.core, self.forbidden = core, forbidden
        depth = _depths(core)
        order = self.order = sorted(depth, key=lambda v: (depth[v], core.places[v]))
        rank = self.rank = {v: i for i, v in enumerate(order)}
        self.pairs: list[tuple[int, int]] = []
        starts: list[int] = []
        for v in order:
            starts.append(len(self.pairs))
            self.pairs.append((v, v))
            self.pairs += [(w, v) for w in sorted(core.near[v], key=rank.__getitem__)]
        self.row = {pair: i for i, pair in enumerate(self.pairs)}
        self.starts = np.array([*starts, len(self.pairs)])
        self.sizes = [len(core.unary[v]) for v in order]
        # The rows of unary costs are infinite in the padding, so no padded state is ever chosen.
        self.messages = np.zeros((len(self.pairs), max(self.sizes, default=0)))
        self.messages[starts] = np.inf
        for v, row in zip(order, starts, strict=True):
            unary = core.unary[v]
            self.messages[row, : len(unary)] = np.where(np.isfinite(unary), unary, forbidden)
        first = [i for i, v in enumerate(order) if i == 0 or depth[v] != depth[order[i - 1]]]
        ends = list(itertools.pairwise([*first, len(order)]))
        self.levels = [
            (
                slice(a, b),
                slice(self.starts[a], self.starts[b]),
                self.starts[a:b] - self.starts[a],
            )
            for a, b in ends
        ]
        self.later, self.earlier = (
            [tuple(self.batches(a, b, later)) for a, b in ends] for later in (True, False)
        )
        tables = [b.tables.size for level in (*self.later, *self.earlier) for b in level]
        self.room = np.empty(max(tables, default=0))
        self.beliefs = np.empty((len(order), self.messages.shape[1]))
        before = [sum(rank[w] < rank[v] for w in core.near[v]) for v in order]
        most = [max(1, b, len(core.near[v]) - b) for b, v in zip(before, order, strict=True)]
        self.shares = 1.0 / np.array(most)[:, None]

    def batches(self, start: int, end: int, later: bool) -> Iterator[MessageBatch]:
        """The messages of one level to later or to earlier variables.

        Arguments:
          start, end: the level, as positions in the order.
          later: whether the receivers come later.
        """
        core, order, rank = self.core, self.order, self.rank
        links = [
            (self.sizes[rank[v]], self.sizes[rank[w]], rank[v], rank[w])
            for v in order[start:end]
            for w in core.near[v]
            if (rank[w] > rank[v]) == later
        ]
        for group in _groups(links):
            own, other, senders, receivers = zip(*group, strict=True)
            tables = np.full((max(own), len(group), max(other)), HUGE)
            names = [(order[a], order[b]) for a, b in zip(senders, receivers, strict=True)]
            for i, (v, w) in enumerate(names):
                tables[: own[i], i, : other[i]] = core.near[v][w]
            np.copyto(tables, self.forbidden, where=np.isinf(tables))
            yield MessageBatch(
                tables,
                np.array(senders) - start,
                np.array(receivers),
                np.array([self.row[pair] for pair in names]),
                np.array([self.row[w, v] for v, w in names]),
            )

    def resume(self, start: Bounded, core: Core) -> None:
        """Takes the messages of an earlier run, for the states that are left. Any messages give a
        valid bound."""
        starts = self.starts.tolist()
        for number, t in enumerate(self.order):
            if t in start.kept:
                left = np.searchsorted(start.kept[t], core.kept[t])
                for row in range(starts[number] + 1, starts[number + 1]):
                    known = start.messages.get(self.pairs[row])
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
        return {v: row[:size] for v, size, row in zip(self.order, self.sizes, above, strict=True)}


# ---- duals --------------------------------------------------------------------------------------
# Messages that prove a lower bound: whoever adds them to the costs can read the bound off the
# minima of the results.


DUAL_SWEEPS = 512
"""Most sweeps for a dual."""


def dual_of(
    graph: CostGraph,
) -> tuple[float, dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]]:
    """A lower bound on the cost of all solutions, and costs to move from each table of pairwise
    costs to the unary costs of its two variables. After that, the least entries of all variables
    and of all tables add up to the bound.

    A backward pass leaves, for each variable, its belief less its least entry. The share of it that
    each message to an earlier variable carries belongs to the table that the message goes through.

    Arguments:
      graph: the costs, in seconds.

    Returns:
      The bound in seconds; and for each table, the seconds to add to the states of its first and of
      its second variable.
    """
    passing = _Passing(Core.of(graph), FORBIDDEN)
    before = bound = -np.inf
    for _ in range(DUAL_SWEEPS // READ):
        for _ in range(READ):
            passing.forward()
            bound = passing.backward()
        if bound <= before + 1e-9 * abs(before):
            break
        before = bound
    starts, messages = passing.starts, passing.messages
    beliefs = np.add.reduceat(messages, starts[:-1], axis=0) if len(starts) > 1 else messages
    carried = (beliefs - beliefs.min(axis=1, initial=np.inf)[:, None]) * passing.shares
    moved: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    unary, bound = [u.copy() for u in graph.unary], 0.0
    for pair, table in graph.pairs.items():
        ends: list[np.ndarray] = []
        for own, other in (pair, pair[::-1]):
            rank = passing.rank[own]
            received = messages[passing.row[other, own], : passing.sizes[rank]]
            later = passing.rank[other] < rank
            ends.append(received - carried[rank, : passing.sizes[rank]] if later else received)
        moved[pair] = first, second = ends[0], ends[1]
        unary[pair[0]] += first
        unary[pair[1]] += second
        bound += float((table - first[:, None] - second[None, :]).min())
    return bound + sum(float(u.min()) for u in unary), moved
