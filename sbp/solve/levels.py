"""The arrays of message passing: variables in levels without links inside, so that one NumPy
operation sends the messages of a whole level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp.solve.reduction import HUGE, Core

PADDING = 16_384
"""Most entries of padding in a batch of tables. To go over so many takes as long as to send another
batch."""

ENTRIES = 131_072
"""Most entries of a batch of several tables: so few that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Where the variables and messages of a core stand in arrays.

    Arguments:
      order: the variables, by level. Variables of one level are not linked.
      rank: the position of each variable in `order`.
      levels: the first position of each level, and the number of variables.
      pairs: for each row of the array of messages, its sender and its receiver. Each variable has
        a row (itself, itself) for its unary costs, followed by the messages that it receives.
      row: the row of each pair.
      starts: the first row of each variable, and the number of rows.
      width: the number of columns: the states of the variable that has most.
    """

    order: list[int]
    rank: dict[int, int]
    levels: list[int]
    pairs: list[tuple[int, int]]
    row: dict[tuple[int, int], int]
    starts: np.ndarray
    width: int

    @staticmethod
    def of(core: Core) -> Levels:
        """The layout of a core."""
        depth = _depths(core)
        order = sorted(depth, key=lambda v: (depth[v], core.places[v]))
        rank = {v: i for i, v in enumerate(order)}
        depths = [depth[v] for v in order]
        levels = [i for i, d in enumerate(depths) if i == 0 or d != depths[i - 1]]
        pairs: list[tuple[int, int]] = []
        starts: list[int] = []
        for v in order:
            starts.append(len(pairs))
            pairs.append((v, v))
            pairs += [(w, v) for w in sorted(core.near[v], key=rank.__getitem__)]
        return Levels(
            order,
            rank,
            [*levels, len(order)],
            pairs,
            {pair: i for i, pair in enumerate(pairs)},
            np.array([*starts, len(pairs)]),
            max((len(u) for u in core.unary.values()), default=0),
        )


def _depths(core: Core) -> dict[int, int]:
    """The level of each variable: one more than that of its neighbours that come before it in
    breadth-first order. There are far fewer levels than in the order of the program."""
    depth: dict[int, int] = {}
    seen: set[int] = set()
    for first in core.order:
        if first in seen:
            continue
        seen.add(first)
        found = [first]
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
      numbers: 0, 1, .., a number for each message.
    """

    tables: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    numbers: np.ndarray

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
        return self.tables[:, self.numbers, states[self.receiver]].T


def batches(
    core: Core, layout: Levels, forbidden: float, *, later: bool
) -> list[tuple[MessageBatch, ...]]:
    """The messages of each level to later or to earlier variables.

    Arguments:
      core: the problem.
      layout: its layout.
      forbidden: seconds that stand for an infinite cost.
      later: whether the receivers come later.
    """
    rank, sizes = layout.rank, {v: len(u) for v, u in core.unary.items()}
    out: list[tuple[MessageBatch, ...]] = []
    for start, end in zip(layout.levels, layout.levels[1:], strict=False):
        links = [
            (sizes[v], sizes[w], rank[v], rank[w])
            for v in layout.order[start:end]
            for w in core.near[v]
            if (rank[w] > rank[v]) == later
        ]
        out.append(tuple(_batch(core, layout, start, group, forbidden) for group in _groups(links)))
    return out


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


def _batch(
    core: Core, layout: Levels, start: int, links: list[_Sized], forbidden: float
) -> MessageBatch:
    own, other, senders, receivers = zip(*links, strict=True)
    tables = np.full((max(own), len(links), max(other)), HUGE)
    order = layout.order
    names = [(order[a], order[b]) for a, b in zip(senders, receivers, strict=True)]
    for i, (v, w) in enumerate(names):
        tables[: own[i], i, : other[i]] = core.near[v][w]
    np.copyto(tables, forbidden, where=np.isinf(tables))
    return MessageBatch(
        tables,
        np.array(senders) - start,
        np.array(receivers),
        np.array([layout.row[pair] for pair in names]),
        np.array([layout.row[w, v] for v, w in names]),
        np.arange(len(links)),
    )
