"""Exchange of elements along a split dim: each device of a mesh axis gets a range of global
indices.

The ranges are known when the plan is made, and so are the messages. A round is one
collective-permute: all its messages have the same width, and each device sends to at most one other
device and receives from at most one. A halo of one neighbour takes one round. A reversal takes one
round in which shards change places. A device sends nothing to itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.rule import LocalContext

Pair = tuple[int, int]
"""(source, destination): the indices of two devices along a mesh axis."""

_M = TypeVar("_M")


@dataclass(frozen=True, slots=True)
class Need:
    """The range that each device of a mesh axis needs along a dim that is split over it.

    Arguments:
      size: number of elements of the dim.
      chunk: elements in one device's shard, padding included.
      starts: for each device, the global index of the first element that it needs; it may lie
          outside of the dim.
      width: number of elements in each device's range.
      counts: for each device, how many elements of its range it needs, from the start on; None
          where each device needs its whole range.
    """

    size: int
    chunk: int
    starts: tuple[int, ...]
    width: int
    counts: tuple[int, ...] | None = None

    def wanted(self, device: int) -> tuple[int, int]:
        """The first and the last global index (exclusive) of the elements that a device needs."""
        start = self.starts[device]
        count = self.width if self.counts is None else self.counts[device]
        return min(max(start, 0), self.size), max(0, min(start + count, self.size))

    def sent(self) -> tuple[int, int]:
        """The elements along the dim that a device sends at most, and the number of
        collectives."""
        found = [r for r in rounds(self) if not r.is_own]
        return sum(r.width for r in found), len(found)

    @property
    def leaves_dim(self) -> bool:
        """Whether some device needs indices outside of the dim."""
        return min(self.starts) < 0 or max(self.starts) + self.width > self.size


@dataclass(frozen=True, slots=True)
class Round:
    """Messages of one width, sent in one collective-permute.

    Arguments:
      pairs: (source, destination) devices. In a round that sends nothing, each device is its own
          source.
      width: number of elements in a message.
      first: for each source, the position in its shard of the first element that it sends.
      place: for each destination, the position in its range where the first element goes; it may
          lie outside of the range. Other devices have the place of some destination.
      receives: for each device, whether it receives a message.
      covers: whether a device without a message may be written at `place` too, because it needs no
          elements there.
    """

    pairs: tuple[Pair, ...]
    width: int
    first: tuple[int, ...]
    place: tuple[int, ...]
    receives: tuple[bool, ...]
    covers: bool

    @property
    def is_own(self) -> bool:
        """Whether each device copies from its own shard, so that nothing is sent."""
        return self.pairs[0][0] == self.pairs[0][1]


@functools.lru_cache(maxsize=4096)  # needs; one that was dropped is worked out anew
def rounds(need: Need) -> tuple[Round, ...]:
    """The messages that fulfil a need: first a copy of each device's own elements, then messages
    between devices.

    The messages are grouped in three ways: by distance, by the sum of the device numbers (for
    reversals), and greedily. The result is the grouping that sends the fewest elements.
    """
    edges = [(j, i) for i in range(len(need.starts)) for j in _sources(need, i)]
    own = [e for e in edges if e[0] == e[1]]
    others = [e for e in edges if e[0] != e[1]]
    ways: list[list[list[Pair]]] = [
        _by(others, lambda e: e[0] - e[1]),
        _by(others, lambda e: e[0] + e[1]),
        grouped(others, lambda e: e),
    ]
    best = min(ways, key=lambda groups: (sum(_width(need, g) for g in groups), len(groups)))
    return tuple(_round(need, g) for g in ([own] if own else []) + best)


def _sources(need: Need, device: int) -> range:
    """The devices whose shards have elements that a device needs."""
    low, high = need.wanted(device)
    return range(low // need.chunk, -(-high // need.chunk)) if low < high else range(0)


def _by(edges: Iterable[Pair], key: Callable[[Pair], int]) -> list[list[Pair]]:
    """Groups (source, destination) pairs by a key; the groups are sorted by it."""
    groups: dict[int, list[Pair]] = {}
    for edge in edges:
        groups.setdefault(key(edge), []).append(edge)
    return [groups[k] for k in sorted(groups)]


def grouped(messages: Sequence[_M], ends: Callable[[_M], Pair]) -> list[list[_M]]:
    """Puts each message into the first group in which no other one has its source or its
    destination.

    Arguments:
      messages: the messages.
      ends: gives the source and the destination of a message.
    """
    groups: list[tuple[list[_M], set[int], set[int]]] = []
    for message in messages:
        source, target = ends(message)
        at = next(
            (
                k
                for k, (_, sources, targets) in enumerate(groups)
                if source not in sources and target not in targets
            ),
            len(groups),
        )
        if at == len(groups):
            groups.append(([], set(), set()))
        group, sources, targets = groups[at]
        group.append(message)
        sources.add(source)
        targets.add(target)
    return [group for group, _, _ in groups]


def _piece(need: Need, edge: Pair) -> tuple[int, int]:
    """The range of global indices that a message carries, end exclusive."""
    source, target = edge
    low, high = need.wanted(target)
    return max(low, source * need.chunk), min(high, (source + 1) * need.chunk)


def _width(need: Need, group: Sequence[Pair]) -> int:
    """The number of elements in the longest message of a group."""
    return max(high - low for low, high in (_piece(need, e) for e in group))


def _round(need: Need, group: Sequence[Pair]) -> Round:
    """The round of a group of (source, destination) pairs.

    A message shorter than the others starts earlier in the shard where it would reach over its end.
    """
    count, width = len(need.starts), _width(need, group)
    first, place = [-1] * count, [0] * count
    for source, target in group:
        low = _piece(need, (source, target))[0] - source * need.chunk
        first[source] = min(low, need.chunk - width)
        place[target] = source * need.chunk + first[source] - need.starts[target]
    receives = [False] * count
    for _, target in group:
        receives[target] = True
    common = {place[target] for _, target in group}
    covers = all(receives)
    at = min(common)
    place = [p if receives[i] else at for i, p in enumerate(place)]
    if not covers and len(common) == 1:
        # All messages go to one place. The other devices may be written there if they need no
        # elements there.
        covers = all(receives[i] or not _overlap(need, i, at, width) for i in range(count))
    if len({f for f in first if f >= 0}) == 1:
        first = [max(first)] * count
    return Round(
        tuple(group), width, tuple(max(f, 0) for f in first), tuple(place), tuple(receives), covers
    )


def _overlap(need: Need, device: int, at: int, width: int) -> bool:
    """Whether a device needs elements at positions `at` to `at + width` of its range.

    Arguments:
      need: the ranges of all devices.
      device: the device.
      at: the first position.
      width: the number of positions.
    """
    low, high = (k - need.starts[device] for k in need.wanted(device))
    return max(low, at) < min(high, at + width)


def of_device(table: Sequence[int | bool], axis: str) -> Any:
    """This device's entry of a table with one entry for each device of a mesh axis.

    If all entries are equal, the result is that Python value; otherwise a traced scalar.
    """
    return table[0] if len(set(table)) == 1 else jnp.asarray(np.array(table))[lax.axis_index(axis)]


def fetch(ctx: LocalContext, x: Any, dim: int, axis: str, need: Need, fill: Any) -> Any:
    """The elements that this device needs, from the shards of all devices of a mesh axis.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard.
      dim: the dim that is split.
      axis: the mesh axis that splits it.
      need: the ranges that the devices need.
      fill: a scalar for indices outside of the dim; None where their values do not matter.

    Returns:
      An array with `need.width` elements along the dim.
    """
    if _jax.is_extended(x.dtype):
        words = fetch(ctx, jax.random.key_data(x), dim, axis, need, None)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    messages = rounds(need)
    before = max((-min(r.place) for r in messages if min(r.place) < 0), default=0)
    ends = (max(r.place) + r.width - need.width for r in messages)
    shape = list(x.shape)
    shape[dim] = before + need.width + max(0, *ends, 0)
    window = jnp.zeros(shape, x.dtype)
    for r in messages:
        piece = lax.dynamic_slice_in_dim(x, of_device(r.first, axis), r.width, dim)
        if not r.is_own:
            piece = ctx.permute(piece, axis, r.pairs)
        placed = lax.dynamic_update_slice_in_dim(
            window, piece, of_device(r.place, axis) + before, dim
        )
        window = placed if r.covers else jnp.where(of_device(r.receives, axis), placed, window)
    window = lax.slice_in_dim(window, before, before + need.width, axis=dim)
    if fill is None or not need.leaves_dim:
        return window
    index = lax.broadcasted_iota(jnp.int32, window.shape, dim) + of_device(need.starts, axis)
    return jnp.where((index >= 0) & (index < need.size), window, fill)
