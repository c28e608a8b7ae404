"""Exchange of neighbouring elements along a split dim: each device of a mesh axis gets the range of
global indices it wants.

What is wanted is known when the plan is made, for each device; so are the messages: rounds of
collective-permutes, each of one width, in which a device sends to one other and receives from one
other at most. A halo of one neighbour is one round; a reversal is one round in which shards change
places; what a device holds itself is not sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.rule import LocalContext

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Need:
    """What each device of a mesh axis wants of a dim that is split over it.

    Arguments:
      size: elements of the dim.
      chunk: elements one device holds, the last ones padded.
      starts: for each device, the global index of the first element that it wants; it may lie
          outside of the dim.
      width: how many elements each wants.
    """

    size: int
    chunk: int
    starts: tuple[int, ...]
    width: int

    def wanted(self, device: int) -> tuple[int, int]:
        """The range of elements of the dim that a device wants."""
        start = self.starts[device]
        return min(max(start, 0), self.size), max(0, min(start + self.width, self.size))

    @property
    def leaves_dim(self) -> bool:
        """Whether some device wants indices outside of the dim."""
        return min(self.starts) < 0 or max(self.starts) + self.width > self.size


@dataclass(frozen=True, slots=True)
class Round:
    """Messages of one width.

    Arguments:
      pairs: (source, destination) devices; equal ones are what a device has itself, and such a
          round has no others.
      width: elements in a message.
      first: for each source device, the position in its shard of the first element it sends.
      place: for each destination, the position in its window of the first element it receives (it
          may reach outside).
      receives: whether each device receives.
      covers: whether devices that do not receive have nothing to lose where the message would go.
    """

    pairs: tuple[Pair, ...]
    width: int
    first: tuple[int, ...]
    place: tuple[int, ...]
    receives: tuple[bool, ...]
    covers: bool

    @property
    def is_own(self) -> bool:
        """Whether nothing is sent."""
        return self.pairs[0][0] == self.pairs[0][1]


@functools.lru_cache(maxsize=4096)
def rounds(need: Need) -> tuple[Round, ...]:
    """The messages that a need takes, fewest elements first: neighbours at one distance together,
    or mirrored ones."""
    edges = [(j, i) for i in range(len(need.starts)) for j in _sources(need, i)]
    own = [e for e in edges if e[0] == e[1]]
    others = [e for e in edges if e[0] != e[1]]
    ways: list[list[list[Pair]]] = [
        _by(others, lambda e: e[0] - e[1]),
        _by(others, lambda e: e[0] + e[1]),
        _colored(others),
    ]
    best = min(ways, key=lambda groups: (sum(_width(need, g) for g in groups), len(groups)))
    return tuple(_round(need, g) for g in ([own] if own else []) + best)


def _sources(need: Need, device: int) -> range:
    low, high = need.wanted(device)
    return range(low // need.chunk, -(-high // need.chunk)) if low < high else range(0)


def _by(edges: Iterable[Pair], key: Callable[[Pair], int]) -> list[list[Pair]]:
    groups: dict[int, list[Pair]] = {}
    for edge in edges:
        groups.setdefault(key(edge), []).append(edge)
    return [groups[k] for k in sorted(groups)]


def _colored(edges: Sequence[Pair]) -> list[list[Pair]]:
    """Each edge in the first group in which neither its source nor its destination occurs."""
    groups: list[tuple[list[Pair], set[int], set[int]]] = []
    for source, target in edges:
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
        group.append((source, target))
        sources.add(source)
        targets.add(target)
    return [group for group, _, _ in groups]


def _piece(need: Need, edge: Pair) -> tuple[int, int]:
    """The range of global indices that a message carries."""
    source, target = edge
    low, high = need.wanted(target)
    return max(low, source * need.chunk), min(high, (source + 1) * need.chunk)


def _width(need: Need, group: Sequence[Pair]) -> int:
    return max(high - low for low, high in (_piece(need, e) for e in group))


def _round(need: Need, group: Sequence[Pair]) -> Round:
    count, width = len(need.starts), _width(need, group)
    first, place = [-1] * count, [need.width] * count
    for source, target in group:
        low = _piece(need, (source, target))[0] - source * need.chunk
        first[source] = min(low, need.chunk - width)
        place[target] = source * need.chunk + first[source] - need.starts[target]
    receives = [False] * count
    for _, target in group:
        receives[target] = True
    common = {place[target] for _, target in group}
    covers = all(receives)
    if not covers and len(common) == 1:
        # All write to one place; the others may write there too when nothing of theirs lies there.
        (at,) = common
        place = [at] * count
        covers = all(receives[i] or not _overlap(need, i, at, width) for i in range(count))
    if len({f for f in first if f >= 0}) == 1:
        first = [max(first)] * count
    return Round(
        tuple(group), width, tuple(max(f, 0) for f in first), tuple(place), tuple(receives), covers
    )


def _overlap(need: Need, device: int, at: int, width: int) -> bool:
    low, high = (k - need.starts[device] for k in need.wanted(device))
    return max(low, at) < min(high, at + width)


def elements_sent(need: Need) -> tuple[int, int]:
    """How many elements along the dim a device sends at most, and in how many collectives."""
    sent = [r for r in rounds(need) if not r.is_own]
    return sum(r.width for r in sent), len(sent)


def of_device(table: Sequence[int | bool], axis: str) -> Any:
    """The entry of this device of a mesh axis; known now where all have the same."""
    return table[0] if len(set(table)) == 1 else jnp.asarray(np.array(table))[lax.axis_index(axis)]


def fetch(ctx: LocalContext, x: Any, dim: int, axis: str, need: Need, fill: Any) -> Any:
    """The elements that this device wants, from the shards of all devices of a mesh axis.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard.
      dim: the dim that is split.
      axis: the mesh axis.
      need: who wants what.
      fill: a scalar for indices outside of the dim; None when they do not matter.

    Returns:
      An array with `need.width` elements along the dim.
    """
    if _jax.is_extended(x.dtype):
        words = fetch(ctx, jax.random.key_data(x), dim, axis, need, None)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    messages = rounds(need)
    margin = max((r.width for r in messages), default=0)
    shape = list(x.shape)
    shape[dim] = need.width + 2 * margin
    window = jnp.zeros(shape, x.dtype)
    for r in messages:
        piece = lax.dynamic_slice_in_dim(x, of_device(r.first, axis), r.width, dim)
        if not r.is_own:
            piece = ctx.permute(piece, axis, r.pairs)
        placed = lax.dynamic_update_slice_in_dim(
            window, piece, of_device(r.place, axis) + margin, dim
        )
        window = placed if r.covers else jnp.where(of_device(r.receives, axis), placed, window)
    window = lax.slice_in_dim(window, margin, margin + need.width, axis=dim)
    if fill is None or not need.leaves_dim:
        return window
    index = lax.broadcasted_iota(jnp.int32, window.shape, dim) + of_device(need.starts, axis)
    return jnp.where((index >= 0) & (index < need.size), window, fill)
