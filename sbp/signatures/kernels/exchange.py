"""Exchange of elements along a split dim.

A need says which elements each device of a mesh axis gets from which: a range of global indices
(`Need`), or several pieces of an array, each at a place of its own in the result (`Pieces`). Needs
are known when the plan is made, and so are the messages. A round is one collective-permute: all its
messages have the same width, and each device sends to at most one other device and receives from at
most one. A halo of one neighbor takes one round. A reversal takes one round in which shards change
places. In `jnp.roll`, the elements that wrap round and the others go the same distance round the
ring of devices, so that they travel in one round. A device sends nothing to itself.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.rule import LocalContext


@dataclass(frozen=True, slots=True)
class Message:
    """Elements that one device sends to another one, or to itself.

    Arguments:
      source: the device that has the elements, as its index along the mesh axis.
      target: the device that needs them.
      first: the position of the first one in the source's shard.
      place: its position in what the target gets.
      width: number of elements.
    """

    source: int
    target: int
    first: int
    place: int
    width: int


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

    @property
    def n(self) -> int:
        """Number of devices along the mesh axis."""
        return len(self.starts)

    @property
    def leaves_dim(self) -> bool:
        """Whether some device needs indices outside of the dim."""
        return min(self.starts) < 0 or max(self.starts) + self.width > self.size

    def wanted(self, device: int) -> tuple[int, int]:
        """The first and the last global index (exclusive) of the elements that a device needs."""
        start = self.starts[device]
        count = self.width if self.counts is None else self.counts[device]
        return min(max(start, 0), self.size), max(0, min(start + count, self.size))

    def messages(self) -> list[Message]:
        """What each device sends to each, itself included."""
        found = []
        for target, start in enumerate(self.starts):
            low, high = self.wanted(target)
            for source in range(low // self.chunk, -(-high // self.chunk)) if low < high else ():
                shard = source * self.chunk
                first = max(low, shard)
                width = min(high, shard + self.chunk) - first
                found.append(Message(source, target, first - shard, first - start, width))
        return found


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of one array that a result has along a dim that is split in both.

    Arguments:
      size: number of elements of the array's dim.
      out: number of elements of the result's dim.
      n: number of devices along the mesh axis.
      parts: for each piece, its first index in the result, its first index in the array, and its
          number of elements.
    """

    size: int
    out: int
    n: int
    parts: tuple[tuple[int, int, int], ...]

    @property
    def chunk(self) -> int:
        """Elements in one device's shard of the array, padding included."""
        return -(-self.size // self.n)

    @property
    def width(self) -> int:
        """Elements in one device's shard of the result, padding included."""
        return -(-self.out // self.n)

    def messages(self) -> list[Message]:
        """What each device sends to each, itself included."""
        found = []
        for at, start, count in self.parts:
            done = 0
            while done < count:
                source, first = divmod(start + done, self.chunk)
                target, place = divmod(at + done, self.width)
                width = min(count - done, self.chunk - first, self.width - place)
                found.append(Message(source, target, first, place, width))
                done += width
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Messages of one width, sent in one collective-permute. A message that is shorter than the
    longest one starts earlier in the shard if it would reach over the end.

    Arguments:
      pairs: (source, destination) devices.
      width: number of elements in a message.
      first: for each device, the first position that it sends.
      place: for each device, where it puts the first element that it receives; it may lie outside.
          Devices that receive nothing have the place of some destination.
      low: for each device, the first position that it keeps of what it receives.
      high: for each device, the position after the last one.
      covers: whether each device may keep all that it receives: no elements of earlier rounds lie
          there that it needs.
      fills: whether every device receives all that it needs in this round.
    """

    pairs: tuple[tuple[int, int], ...]
    width: int
    first: tuple[int, ...]
    place: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    covers: bool
    fills: bool

    @property
    def is_own(self) -> bool:
        """Whether each device copies from its own shard, so that nothing is sent."""
        return self.pairs[0][0] == self.pairs[0][1]


@functools.lru_cache(maxsize=4096)  # needs; one that was dropped is worked out anew
def rounds(need: Need | Pieces) -> tuple[Round, ...]:
    """The rounds that fulfil a need: first a copy of each device's own elements, then messages
    between devices.

    The messages are grouped in four ways: by their distance round the ring, by the sum of the
    device numbers (for reversals), and greedily, in their order or the longest ones first. The
    result is the grouping that sends the fewest elements.
    """
    messages = need.messages()
    own = [m for m in messages if m.source == m.target]
    others = [m for m in messages if m.source != m.target]
    longest_first = sorted(others, key=lambda m: -m.width)
    ways = (
        _by(longest_first, lambda m: (m.target - m.source) % need.n),
        _by(longest_first, lambda m: m.source + m.target),
        _apart(others),
        _apart(longest_first),
    )
    best = min(ways, key=lambda groups: (sum(map(_width, groups)), len(groups)))
    return tuple(
        _round(need, group, messages if number else ())
        for number, group in enumerate(_apart(own) + best)
    )


def sent(need: Need | Pieces) -> tuple[int, int]:
    """The elements along the dim that a device sends at most, and the number of collectives."""
    found = [r.width for r in rounds(need) if not r.is_own]
    return sum(found), len(found)


def _width(group: Sequence[Message]) -> int:
    """The number of elements in the longest message of a group."""
    return max(m.width for m in group)


def _by(messages: Sequence[Message], key: Callable[[Message], int]) -> list[list[Message]]:
    """Groups of messages with one key, sorted by it; several where devices occur twice."""
    keys = sorted(set(map(key, messages)))
    return [group for k in keys for group in _apart(m for m in messages if key(m) == k)]


def _apart(messages: Iterable[Message]) -> list[list[Message]]:
    """Puts each message into the first group in which no other one has its source or its
    target."""
    groups = defaultdict[int, list[Message]](list)
    devices = defaultdict[int, set[tuple[str, int]]](set)
    for message in messages:
        ends = {("source", message.source), ("target", message.target)}
        number = next(k for k in itertools.count() if devices[k].isdisjoint(ends))
        devices[number] |= ends
        groups[number].append(message)
    return list(groups.values())


def _round(need: Need | Pieces, group: Sequence[Message], messages: Sequence[Message]) -> Round:
    """The round of a group of messages, with the tables of all devices.

    Arguments:
      need: what the devices need.
      group: the messages.
      messages: all messages that fulfil the need; none for the first round, over which the others
          are written.
    """
    width, targets, is_range = _width(group), {m.target for m in group}, isinstance(need, Need)
    first, place = [-1] * need.n, [need.width] * need.n
    low, high = [0] * need.n, [0] * need.n
    for m in group:
        first[m.source] = min(m.first, need.chunk - width)
        place[m.target] = m.place - (m.first - first[m.source])
        low[m.target], high[m.target] = m.place, m.place + m.width
        if is_range:  # what comes with a shorter message is right, too
            low[m.target], high[m.target] = place[m.target], place[m.target] + width
    place = [p if t in targets else min(place) for t, p in enumerate(place)]
    clashes = any(
        m.place < place[m.target] + width and place[m.target] < m.place + m.width
        for m in messages
        if m not in group and not (is_range and m.target in targets)
    )
    # One table entry for all devices is a constant of the program: devices that send nothing have
    # the entry of the others.
    if len({f for f in first if f >= 0}) == 1:
        first = [max(first)] * need.n
    return Round(
        pairs=tuple((m.source, m.target) for m in group),
        width=width,
        first=tuple(max(f, 0) for f in first),
        place=tuple(place),
        low=tuple(low),
        high=tuple(high),
        covers=not clashes,
        fills=set(low) == {0} and set(high) == {need.width} == {width},
    )


def of_device(table: Sequence[int | bool], axis: str) -> Any:
    """This device's entry of a table with one entry for each device of a mesh axis.

    If all entries are equal, the result is that Python value; otherwise a traced scalar.
    """
    return table[0] if len(set(table)) == 1 else jnp.asarray(np.array(table))[lax.axis_index(axis)]


def fetch(
    ctx: LocalContext, x: Any, dim: int, axis: str, need: Need | Pieces, onto: Any = None
) -> Any:
    """The elements that this device needs, from the shards of all devices of a mesh axis.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard.
      dim: the dim that is split.
      axis: the mesh axis that splits it.
      need: what the devices need.
      onto: an array that the elements are written onto; None where its other elements do not
          matter.

    Returns:
      An array with `need.width` elements along the dim.
    """
    if _jax.is_extended(x.dtype):
        under = None if onto is None else jax.random.key_data(onto)
        words = fetch(ctx, jax.random.key_data(x), dim, axis, need, under)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    found = rounds(need)
    before = max(0, *(-min(r.place) for r in found), 0)
    after = max(0, *(max(r.place) + r.width - need.width for r in found), 0)
    sides = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    shape = [need.width if d == dim else size for d, size in enumerate(x.shape)]
    zero = jnp.zeros((), x.dtype)
    window = lax.pad(jnp.zeros(shape, x.dtype) if onto is None else onto, zero, sides)
    for r in found:
        piece = lax.dynamic_slice_in_dim(x, of_device(r.first, axis), r.width, dim)
        if not r.is_own:
            piece = ctx.permute(piece, axis, r.pairs)
        placed = lax.dynamic_update_slice_in_dim(
            window, piece, of_device(r.place, axis) + before, dim
        )
        if not (r.fills or (r.covers and onto is None)):
            index = lax.broadcasted_iota(jnp.int32, window.shape, dim) - before
            kept = (index >= of_device(r.low, axis)) & (index < of_device(r.high, axis))
            placed = jnp.where(kept, placed, window)
        window = placed
    return lax.slice_in_dim(window, before, before + need.width, axis=dim)


def filled(x: Any, dim: int, axis: str, need: Need, fill: Any) -> Any:
    """A fetched range with a scalar at indices outside of the dim.

    Arguments:
      x: what `fetch` returns.
      dim: the dim.
      axis: the mesh axis that splits it.
      need: the ranges of the devices.
      fill: the scalar.
    """
    if not need.leaves_dim:
        return x
    index = lax.broadcasted_iota(jnp.int32, x.shape, dim) + of_device(need.starts, axis)
    return jnp.where((index >= 0) & (index < need.size), x, fill)
