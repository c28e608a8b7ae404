"""Exchange of several pieces of an array along a split dim: each piece goes to a place of its own
in the result.

The pieces are known when the plan is made, and so are the messages. A round is one
collective-permute, in which each device sends at most one message and receives at most one. In
`jnp.roll`, the elements that wrap round and the others go the same distance round the ring of
devices, so that they travel in one round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.signatures.kernels.exchange import grouped, of_device
from sbp.signatures.rule import LocalContext


@dataclass(frozen=True, slots=True)
class Message:
    """Elements that one device sends to another one, or to itself.

    Arguments:
      source: the device that has the elements, as its index along the mesh axis.
      target: the device that needs them.
      first: the position of the first one in the source's shard.
      place: its position in the target's shard of the result.
      width: number of elements.
    """

    source: int
    target: int
    first: int
    place: int
    width: int


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

    def rounds(self) -> list[list[Message]]:
        """The messages in groups, one for each round; those of a device to itself come first.

        Messages are grouped by their distance round the ring, in the order of the pieces, and the
        longest ones first. The result is the grouping that sends the fewest elements.
        """
        messages = self.messages()
        others = [m for m in messages if m.source != m.target]
        longest_first = sorted(others, key=lambda m: -m.width)
        by_distance: dict[int, list[Message]] = defaultdict(list)
        for m in longest_first:
            by_distance[(m.target - m.source) % self.n].append(m)
        ways = (
            [group for _, same in sorted(by_distance.items()) for group in _apart(same)],
            _apart(others),
            _apart(longest_first),
        )
        best = min(ways, key=lambda groups: (sum(map(_width, groups)), len(groups)))
        return _apart([m for m in messages if m.source == m.target]) + best

    def sent(self) -> tuple[int, int]:
        """The elements along the dim that a device sends at most, and the number of
        collectives."""
        found = [g for g in self.rounds() if g[0].source != g[0].target]
        return sum(map(_width, found)), len(found)


def _width(group: Sequence[Message]) -> int:
    """The number of elements in the longest message of a group."""
    return max(m.width for m in group)


def _apart(messages: Sequence[Message]) -> list[list[Message]]:
    """Groups in which no two messages have the same source or target."""
    return grouped(messages, lambda m: (m.source, m.target))


def fetch_pieces(ctx: LocalContext, x: Any, dim: int, axis: str, need: Pieces, onto: Any) -> Any:
    """A shard of a result, with the pieces of one array written onto it.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard of the array.
      dim: the dim that is split.
      axis: the mesh axis that splits it.
      need: the pieces.
      onto: the shard of the result without the pieces; None where its elements do not matter.
    """
    if _jax.is_extended(x.dtype):
        under = None if onto is None else jax.random.key_data(onto)
        words = fetch_pieces(ctx, jax.random.key_data(x), dim, axis, need, under)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    for group in need.rounds():
        onto = _exchanged(ctx, x, dim, axis, _Round.of(need, group), onto)
    if onto is None:
        shape = [need.width if d == dim else size for d, size in enumerate(x.shape)]
        return jnp.zeros(shape, x.dtype)
    return onto


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Tables of one round, with an entry for each device. A message that is shorter than the
    longest one starts earlier in the shard if it would reach over the end.

    Arguments:
      pairs: (source, destination) devices.
      width: elements in each message.
      chunk: elements in a shard of the result.
      first: the first position that a device sends.
      place: where a device puts the first element that it receives; it may lie outside.
      low: the first position that a device keeps of what it receives.
      high: the position after the last one.
    """

    pairs: tuple[tuple[int, int], ...]
    width: int
    chunk: int
    first: tuple[int, ...]
    place: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    @staticmethod
    def of(need: Pieces, group: Sequence[Message]) -> _Round:
        """The tables of a group of messages."""
        width = max(m.width for m in group)
        first, place, low, high = ([0] * need.n for _ in range(4))
        for m in group:
            first[m.source] = min(m.first, need.chunk - width)
            place[m.target] = m.place - (m.first - first[m.source])
            low[m.target], high[m.target] = m.place, m.place + m.width
        targets = {m.target for m in group}
        return _Round(
            pairs=tuple((m.source, m.target) for m in group),
            width=width,
            chunk=need.width,
            first=tuple(first),
            place=tuple(p if t in targets else place[group[0].target] for t, p in enumerate(place)),
            low=tuple(low),
            high=tuple(high),
        )

    @property
    def is_own(self) -> bool:
        """Whether each device copies from its own shard, so that nothing is sent."""
        return self.pairs[0][0] == self.pairs[0][1]

    @property
    def is_whole(self) -> bool:
        """Whether every device receives its whole shard of the result."""
        return set(self.low) == {0} and set(self.high) == {self.chunk} == {self.width}


def _exchanged(ctx: LocalContext, x: Any, dim: int, axis: str, r: _Round, onto: Any) -> Any:
    """A shard of a result with the elements of one round.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard of the array.
      dim: the dim that is split.
      axis: the mesh axis that splits it.
      r: the round.
      onto: the shard without them; None where its elements do not matter.
    """
    piece = x
    if r.width != x.shape[dim]:
        piece = lax.dynamic_slice_in_dim(x, of_device(r.first, axis), r.width, dim)
    if not r.is_own:
        piece = ctx.permute(piece, axis, r.pairs)
    if r.is_whole:
        return piece
    before = max(0, -min(r.place))
    after = max(0, max(r.place) + r.width - r.chunk)
    shape = list(x.shape)
    shape[dim] = before + r.chunk + after
    room = jnp.zeros(shape, x.dtype)
    placed = lax.dynamic_update_slice_in_dim(room, piece, of_device(r.place, axis) + before, dim)
    placed = lax.slice_in_dim(placed, before, before + r.chunk, axis=dim)
    if onto is None:
        return placed
    index = lax.broadcasted_iota(jnp.int32, placed.shape, dim)
    kept = (index >= of_device(r.low, axis)) & (index < of_device(r.high, axis))
    return jnp.where(kept, placed, onto)
