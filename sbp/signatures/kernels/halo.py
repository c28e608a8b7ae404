"""Halo exchange: each element of a result reads a range of neighbouring elements, along a dim that
is split in operand and result.

`Windows` describes these reads. A result element `o` reads the positions `stride * o - low +
dilation * k` for `0 <= k < window` of a padded array. That array has `base - 1` holes between the
operand's elements. A slice has windows of one element, a pad has a base, a convolution has all of
it. The kernel fetches the elements that the device's own results read and puts them at their
positions in the padded array; the primitive then runs without padding and base dilation. The GSPMD
paper (appendix A.4) misprints the limit of a shard's range; the formula here is the right one."""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, Sent, add_kernel, rule_for

# ---- messages ------------------------------------------------------------------------------------
# A need says which elements each device of a mesh axis gets from which: a range of global indices
# (`ranges`), or several pieces of an array, each at a place of its own in the result. A
# round is one collective-permute: all its messages have the same width, and each device sends to at
# most one other device and receives from at most one. A halo of one neighbor takes one round, and
# so does a reversal, in which shards change places. In `jnp.roll`, the elements that wrap round and
# the others go the same distance round the ring of devices, in one round.


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
    """The elements that each device of a mesh axis needs of an array, along a dim that is split in
    the array and in what the devices get.

    Arguments:
      chunk: elements in one device's shard of the array, padding included.
      width: elements that a device gets, padding included.
      n: number of devices along the mesh axis.
      parts: the pieces of the array: for each, its first index in what all devices get, one after
          the other, its first index in the array, and its number of elements.
      size: number of elements of the array, if each device needs one range of it.
      starts: for each device, the global index of the first element of its range; it may lie
          outside of the dim. Empty for other needs.
    """

    chunk: int
    width: int
    n: int
    parts: tuple[tuple[int, int, int], ...]
    size: int = 0
    starts: tuple[int, ...] = ()

    @property
    def adds_zeros(self) -> bool:
        """Whether `fetch` gives zeros outside of the dim: along a line of shards without padding,
        where each device needs some elements."""
        all_need = all(count > 0 for _, _, count in self.parts)
        return all_need and self.size == self.n * self.chunk and line_of(self) is not None


def ranges(
    size: int, chunk: int, starts: Sequence[int], width: int, counts: Sequence[int] | None = None
) -> Need:
    """The need of one range for each device.

    Arguments:
      size, chunk, starts, width: as in `Need`.
      counts: for each device, how many elements of its range it needs, from the start on; None
          where each device needs its whole range.
    """
    parts = []
    for device, (start, count) in enumerate(
        zip(starts, counts or [width] * len(starts), strict=True)
    ):
        low, high = min(max(start, 0), size), max(0, min(start + count, size))
        parts.append((device * width + low - start, low, high - low))
    return Need(chunk, width, len(starts), tuple(parts), size, tuple(starts))


def messages_of(need: Need) -> Iterator[Message]:
    """What each device sends to each, itself included."""
    for at, start, count in need.parts:
        done = 0
        while done < count:
            source, first = divmod(start + done, need.chunk)
            target, place = divmod(at + done, need.width)
            width = min(count - done, need.chunk - first, need.width - place)
            yield Message(source, target, first, place, width)
            done += width


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
def rounds(need: Need) -> tuple[Round, ...]:
    """The rounds that fulfil a need: first a copy of each device's own elements, then messages
    between devices.

    Of four ways to group the messages, the one that sends the fewest elements is taken: by their
    distance round the ring, by the sum of the device numbers (for reversals), and greedily, in
    their order or the longest ones first.
    """
    messages = [*messages_of(need)]
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


def sent(need: Need) -> tuple[int, int]:
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


def _round(need: Need, group: Sequence[Message], messages: Sequence[Message]) -> Round:
    """The round of a group of messages, with the tables of all devices.

    Arguments:
      need: what the devices need.
      group: the messages.
      messages: all messages that fulfil the need; none for the first round, over which the others
          are written.
    """
    width, targets, is_range = _width(group), {m.target for m in group}, bool(need.starts)
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


def line_of(
    need: Need,
) -> tuple[tuple[Round | None, ...], tuple[int, int], tuple[int, ...]] | None:
    """A device's own shard between the elements that it receives, of which it needs a range: the
    rounds in the order of their elements, None for the shard; the number of zeros before the first
    part and after the last one; and for each device, the position of the first element that it
    needs. None where its parts have gaps or overlap, where the elements of a round
    stand at different places beside the shards of two devices, and where a device needs less than
    half of the line, which is a copy of its shard."""
    others = [r for r in rounds(need) if not r.is_own]
    places = [{(s - t) * need.chunk + r.first[s] for s, t in r.pairs} for r in others]
    spans: list[tuple[int, int, Round | None]] = [(0, need.chunk, None)]
    spans += [(min(at), r.width, r) for at, r in zip(places, others, strict=True)]
    spans.sort(key=lambda span: span[0])
    first, size = spans[0][0], sum(width for _, width, _ in spans)
    gaps = any(a + width != b for (a, width, _), (b, _, _) in itertools.pairwise(spans))
    if gaps or size > 2 * need.width or any(len(at) > 1 for at in places):
        return None
    starts = [
        start - device * need.chunk - first if count > 0 else 0
        for device, (start, (_, _, count)) in enumerate(zip(need.starts, need.parts, strict=True))
    ]
    before, after = max(0, -min(starts)), max(0, max(starts) + need.width - size)
    parts = tuple(r for _, _, r in spans)
    return parts, (before, after), tuple(start + before for start in starts)


def fetch(ctx: LocalContext, x: Any, dim: int, axis: str, need: Need, onto: Any = None) -> Any:
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
    found, pieces = rounds(need), dict[Round, Any]()
    for r in found:
        pieces[r] = lax.dynamic_slice_in_dim(x, of_device(r.first, axis), r.width, dim)
        if not r.is_own:
            pieces[r] = ctx.permute(pieces[r], axis, r.pairs)

    def padded(x: Any, before: int, after: int) -> Any:
        sides = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        return lax.pad(x, jnp.zeros((), x.dtype), sides)

    line = line_of(need) if onto is None and need.starts else None
    if line is not None:
        # Updates of an array of zeros would take a TPU longer (`python -m benchmarks.row_bytes`).
        parts, padding, starts = line
        whole = lax.concatenate([x if r is None else pieces[r] for r in parts], dim)
        whole = padded(whole, *padding) if any(padding) else whole
        return lax.dynamic_slice_in_dim(whole, of_device(starts, axis), need.width, dim)
    before = max(0, *(-min(r.place) for r in found), 0)
    after = max(0, *(max(r.place) + r.width - need.width for r in found), 0)
    shape = [need.width if d == dim else size for d, size in enumerate(x.shape)]
    window = padded(jnp.zeros(shape, x.dtype) if onto is None else onto, before, after)
    for r in found:
        placed = lax.dynamic_update_slice_in_dim(
            window, pieces[r], of_device(r.place, axis) + before, dim
        )
        if not (r.fills or (r.covers and onto is None)):
            index = lax.broadcasted_iota(jnp.int32, window.shape, dim) - before
            kept = (index >= of_device(r.low, axis)) & (index < of_device(r.high, axis))
            placed = jnp.where(kept, placed, window)
        window = placed
    return lax.slice_in_dim(window, before, before + need.width, axis=dim)


def fetch_filled(ctx: LocalContext, x: Any, dim: int, axis: str, need: Need, fill: Any) -> Any:
    """The range that this device needs, with a scalar at indices outside of the dim.

    Arguments:
      ctx, x, dim, axis, need: as for `fetch`.
      fill: the scalar; None where the elements outside do not matter.
    """
    found = fetch(ctx, x, dim, axis, need)
    is_inside = min(need.starts) >= 0 and max(need.starts) + need.width <= need.size
    is_filled = need.adds_zeros and isinstance(fill, np.ndarray) and not fill
    if fill is None or is_inside or is_filled:
        return found
    index = lax.broadcasted_iota(jnp.int32, found.shape, dim) + of_device(need.starts, axis)
    return jnp.where((index >= 0) & (index < need.size), found, fill)


# ---- windows -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The positions of a dim that each element of the result's dim reads.

    Arguments:
      size: number of elements of the operand's dim.
      out: number of elements of the result's dim.
      stride: distance between the first positions of two neighbouring windows.
      low: padding before the first element; negative where elements are cut off.
      window: number of elements in a window.
      dilation: distance between neighbouring elements of a window.
      base: distance between neighbouring elements of the operand in the padded array (base
          dilation).
    """

    size: int
    out: int
    stride: int = 1
    low: int = 0
    window: int = 1
    dilation: int = 1
    base: int = 1

    @staticmethod
    def of(params: Mapping[str, Any], dim: int, size: int, out: int) -> "Windows":
        """How a slice, a pad or a reduction over windows reads a dim.

        Arguments:
          params: parameters of the primitive.
          dim: the dim.
          size: its size in the operand.
          out: its size in the result.
        """
        if "padding_config" in params:
            low, _, interior = params["padding_config"][dim]
            return Windows(size=size, out=out, low=low, base=interior + 1)

        def along(name: str) -> int:
            return (params.get(name) or {dim: 1})[dim]

        return Windows(
            size=size,
            out=out,
            stride=along("strides" if "strides" in params else "window_strides"),
            low=params["padding"][dim][0] if "padding" in params else -params["start_indices"][dim],
            window=along("window_dimensions"),
            dilation=along("window_dilation"),
            base=along("base_dilation"),
        )

    @property
    def is_identity(self) -> bool:
        """Whether each result element reads only the operand element with the same index."""
        return (
            self.size == self.out and self.stride == self.window == self.base == 1 and self.low == 0
        )

    def is_aligned(self, n: int) -> bool:
        """Whether each device has all elements that its results read, and no others: a result has
        every `stride`-th element, or every `base`-th one of the result is an element, in shards of
        equal size.

        Arguments:
          n: number of devices along all mesh axes that split the dim.
        """
        even = not (self.window > 1 or self.size % n or self.out % n)
        return even and (
            self.size == self.stride * self.out and 0 <= -self.low < self.stride
            if self.base == 1
            else self.stride == 1
            and self.out == self.base * self.size
            and 0 <= self.low < self.base
        )

    def first(self, out: int) -> int:
        """The position in the padded array of the first element that a result element reads.
        Position 0 is the operand's element 0."""
        return self.stride * out - self.low

    def positions_read(self, chunk: int) -> int:
        """The number of positions of the padded array that `chunk` neighbouring results read."""
        return self.stride * (chunk - 1) + self.dilation * (self.window - 1) + 1

    def exchange(self, operand: int, dim: int, n: int, keeps_base: bool = False) -> "Exchange":
        """The exchange that the halo kernel makes along a dim.

        Arguments:
          operand: position of the operand.
          dim: its dim that the windows read.
          n: number of devices along the mesh axis.
          keeps_base: whether the exchange leaves the base dilation to the primitive.
        """
        need = self.need(n)
        dense = self.base == 1 or keeps_base
        return Exchange(
            operand, (dim,), need, need.width if dense else self.positions_read(-(-self.out // n))
        )

    def padding(self, n: int) -> tuple[int, int] | None:
        """The positions of the padded array before and after the operand's elements that a device
        reads; None where devices differ, or where a device reads none."""
        before, need = self.phases(n), self.need(n)
        after = (
            self.positions_read(-(-self.out // n)) - before[0] - self.base * (need.width - 1) - 1
        )
        return (before[0], after) if len(set(before)) == 1 and after >= 0 else None

    def phases(self, n: int) -> tuple[int, ...]:
        """For each device, the number of positions that its range of the padded array has before
        its first element of the operand."""
        chunk = -(-self.out // n)
        return tuple(-self.first(chunk * i) % self.base for i in range(n))

    def need(self, n: int, *, is_whole: bool = False) -> Need:
        """The elements of the operand that each device of a mesh axis reads for its own results.

        Arguments:
          n: number of devices.
          is_whole: whether the last devices, which may have fewer results than the others or none,
              get ranges of full length.
        """
        chunk = -(-self.out // n)
        reach = self.dilation * (self.window - 1)
        starts = tuple(-(-self.first(chunk * i) // self.base) for i in range(n))
        ends = (
            (self.first(min(chunk * (i + 1), self.out) - 1) + reach) // self.base for i in range(n)
        )
        widths = (
            (self.first(chunk * (i + 1) - 1) + reach) // self.base - s + 1
            for i, s in enumerate(starts)
        )
        counts = [max(0, end - start + 1) for start, end in zip(starts, ends, strict=True)]
        own = None if is_whole else counts
        return ranges(self.size, -(-self.size // n), starts, max(1, *widths), own)


def padded_shard(
    ctx: LocalContext, x: Any, dim: int, over: tuple[str, int], windows: Windows, fill: Any
) -> Any:
    """The part of the padded array that this device's results read.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard.
      dim: the dim that is split.
      over: name and size of the mesh axis that splits it.
      windows: the windows that slide along the dim.
      fill: a scalar for the positions between and around the elements of `x`; None where their
          values do not matter.

    Returns:
      An array with the elements of `x` and of its neighbours at their positions in the padded dim.
    """
    axis, n = over
    found = fetch_filled(ctx, x, dim, axis, windows.need(n), fill)
    if windows.base == 1:
        return found
    # Each device cuts at its own phase, which covers the three cases of the GSPMD paper.
    phase = of_device(windows.phases(n), axis)
    length = windows.positions_read(-(-windows.out // n))
    config = [
        (windows.base - 1, max(length, windows.base), windows.base - 1) if d == dim else (0, 0, 0)
        for d in range(x.ndim)
    ]
    return lax.dynamic_slice_in_dim(
        lax.pad(found, fill, config), windows.base - 1 - phase, length, dim
    )


def bytes_beside(aval: Any, *dims: int) -> float:
    """Bytes of the elements of a tensor that share one index along some dims."""
    return math.prod(s for d, s in enumerate(aval.shape) if d not in dims) * _jax.itemsize(
        aval.dtype
    )


@dataclass(frozen=True, slots=True)
class Exchange:
    """The elements of one operand that the kernel of a row exchanges.

    Arguments:
      operand: position of the operand.
      dims: the dim that is split, or several neighbouring dims that count as one range of elements.
      need: the range or the pieces that each device needs along these dims.
      after: number of elements along the dim of a shard after the exchange.
    """

    operand: int
    dims: tuple[int, ...]
    need: Need
    after: int


def _exchanges(op: Op, row: Row) -> Sequence[Exchange]:
    """The exchanges of an equation under a row with the halo kernel."""
    rule = rule_for(op.name)
    assert rule is not None and rule.exchanges is not None
    return rule.exchanges(op, row)


def _halo_sends(op: Op, row: Row) -> tuple[Sent, ...]:
    """One collective-permute for each round of each exchange."""
    found = [(e, *sent(e.need)) for e in _exchanges(op, row)]
    return tuple(
        Sent("permute", elements * bytes_beside(op.ins[e.operand], *e.dims), count)
        for e, elements, count in found
        if elements
    )


add_kernel(
    Kernel(
        name="aligned",
        summary="each device has the elements that its results read",
    )
)

add_kernel(
    Kernel(
        name="halo",
        summary="neighbours send the elements that windows reach",
        sends=_halo_sends,
        # The length of each shard after its exchange.
        widens=lambda op, row: tuple(
            (e.operand, e.dims[0], e.after) for e in _exchanges(op, row) if len(e.dims) == 1
        ),
        nests=False,
    )
)
