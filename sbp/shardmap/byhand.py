"""Divisions: those of means and of pmean, and those by hand, by the number of devices, or of
elements of one shard or of all.

`lax.pmean(x, axis)` is traced as a psum and a division by a literal, and a mean written out is no
different. What a literal counts is told by the sum that it divides, by its value, and by the user's
own words where the value is that of several counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sbp.shardmap.excess import close
from sbp.shardmap.held import Doubt, Fault, Held, Value
from sbp.shardmap.state import State
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Constant, Node
from sbp.types import B, P

HALF = 2.0
"""What squares are divided by: no evidence of a count."""


def divided(state: State, node: Node, ins: Sequence[Value], result: Value) -> Value:
    """The result of an operation, where it is a division by a constant that is a count: of devices,
    or of the elements that were summed.

    Arguments:
      state: the region; a note is entered where a literal may count one thing as well as another.
      node: the operation.
      ins: its operands.
      result: its result without regard to what the constant counts.
    """
    if node.op not in ("div", "mul") or len(ins) != 2:
        return result
    at = (
        1
        if node.op == "div"
        else next((i for i in (0, 1) if isinstance(node.inputs[i], Constant)), None)
    )
    if at is None:
        return result  # a product with a cotangent, whose divisors have been seen to
    const = ins[at].const
    if (
        not isinstance(const, int | float)
        or isinstance(const, bool)
        or not const
        or not math.isfinite(const)
    ):
        return result
    divisor = float(const) if node.op == "div" else 1.0 / float(const)
    if divisor <= 1.0:
        return result
    change = _change(state, node, ins[1 - at], divisor)
    held = list(result.held)
    for axis in _shares(state, result, divisor) if not change else ():
        held[axis] = replace(
            held[axis], share=True, twice=_divided_twice(state, node, held[axis], axis)
        )
    for axis, by in change.items():
        h = held[axis]
        if h.fault or h.excess is None:
            continue
        excess = None if by is None else h.excess + by
        kind = "averaged" if by is not None and by < 0 else "pending"
        cause = h.cause or Fault(kind, node, h.reduced or h.made)
        held[axis] = replace(h, excess=excess, cause=cause if excess else None)
    return replace(result, held=tuple(held))


def _change(state: State, node: Node, operand: Value, divisor: float) -> dict[int, int | None]:
    """What a division does to the excess, by mesh axis: -1 takes an axis size away, +1 leaves one
    to be divided by."""
    for axes in state.averages.get(
        node.span, ()
    ):  # the division inside of a pmean, or of its gradient
        if close(divisor, _devices(state, axes)):
            return dict.fromkeys(axes, -1)
    if not node.backward and _is_mean(operand, node, divisor):
        return _entered(state, node, divisor, _mean(operand))
    if node.backward:
        forward = state.divisions.of_gradient(node, divisor)
        if forward is not None:
            return forward
        # A cotangent's share for each device, or any other number that happens to be theirs.
        for axes in _some(range(len(state.sizes)), least=1):
            if close(divisor, _devices(state, axes)):
                return dict.fromkeys(axes)
    over = [k for k, h in enumerate(operand.held) if h.excess is not None and h.excess > 0]
    for axes in _some(over, least=1):
        if close(divisor, _devices(state, axes)):
            if _names_devices(node):
                return _entered(state, node, divisor, dict.fromkeys(axes, -1))
            # By hand. Of what is still to be reduced, it may as well be the number of microbatches.
            return {k: -1 if B in operand.held[k].atoms else None for k in axes}
    if node.backward:
        return {}
    partial = [
        k
        for k, h in enumerate(operand.held)
        if h.partial == P and h.made and h.made.op == "reduce_sum" and h.excess == 0
    ]
    if partial and operand.added:
        return _counted(state, node, operand.count, divisor, partial)
    return _of_reduced(state, node, operand, divisor)


def _entered(
    state: State, node: Node, divisor: float, change: dict[int, int | None]
) -> dict[int, int | None]:
    if not node.backward:
        state.divisions.enter(node, divisor, change)
    return change


def _devices(state: State, axes: Sequence[int]) -> int:
    return math.prod(state.sizes[k] for k in axes)


def _some(axes: Sequence[int], least: int = 0) -> Iterator[tuple[int, ...]]:
    for many in range(least, len(axes) + 1):
        yield from itertools.combinations(axes, many)


def _names_devices(node: Node) -> bool:
    """Whether the user's words are that the divisor is the number of devices."""
    text = source_text(users_span(node), limit=1000)
    return "axis_size" in text or "psum(1" in text


# ---- shares -------------------------------------------------------------------------------------


def _shares(state: State, value: Value, divisor: float) -> tuple[int, ...]:
    """The mesh axes for each device of which a value may be a share: it is whole, and divided by
    their number."""
    whole = [k for k, h in enumerate(value.held) if B in h.atoms and h.excess == 0]
    return next(
        (axes for axes in _some(whole, least=1) if close(divisor, _devices(state, axes))), ()
    )


def _divided_twice(state: State, node: Node, h: Held, axis: int) -> Doubt | None:
    """Of what was reduced already, and is divided by the number of devices once more: it is a
    share, or too small."""
    if node.backward or not (h.made and h.reduced) or not _names_devices(node):
        return None
    what, n = source_text(users_span(node)) or node.op, state.sizes[axis]
    return Doubt(
        node,
        f"`{what}` divides what is reduced on mesh axis `{state.names[axis]}` by the number of"
        f" devices again: {n} times too small",
    )


# ---- sums that are still partial ----------------------------------------------------------------


def _is_mean(operand: Value, node: Node, divisor: float) -> bool:
    """Whether a sum is divided by the number of its elements in the same expression."""
    added = operand.added
    return (
        added is not None
        and added.span == node.span
        and close(divisor, math.prod(length for length, _ in _own_lengths(operand)))
    )


def _own_lengths(operand: Value) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The dims that the last sum ran along, without those of sums before it."""
    many = len(operand.added.params["axes"]) if operand.added else 0
    return operand.lengths[-many:] if many else ()


def _mean(operand: Value) -> dict[int, int | None]:
    """The mean along dims: those that are split leave the shards to be averaged; the parts that a
    gather put side by side are."""
    change: dict[int, int | None] = {}
    for _, axes in _own_lengths(operand):
        change |= {k: 1 for k in axes if operand.held[k].partial == P}
    return change | {
        k: -1 for k, h in enumerate(operand.held) if h.reduced is operand.added and B in h.atoms
    }


def _counted(
    state: State, node: Node, count: int, divisor: float, partial: list[int]
) -> dict[int, int | None]:
    """A sum over a split dim, divided by how many elements there are: of this shard, or of all."""
    matches = [axes for axes in _some(partial) if close(divisor, count * _devices(state, axes))]
    if len(matches) == 1:
        left = [k for k in partial if k not in matches[0]]
        if node.op == "mul":
            return dict.fromkeys(left)
        return _entered(state, node, divisor, dict.fromkeys(left, 1))
    ratio = divisor / count
    if matches or close(ratio, round(ratio)) or close(1 / ratio, round(1 / ratio)):
        return dict.fromkeys(partial)  # some count, of what is not known
    return {}


# ---- sums that were reduced ---------------------------------------------------------------------


def _of_reduced(state: State, node: Node, operand: Value, divisor: float) -> dict[int, int | None]:
    """What a division of a sum over devices does: -1 where parts were averaged, 1 where the
    elements of one shard were counted alone."""
    summed = [
        k
        for k, h in enumerate(operand.held)
        if B in h.atoms and h.excess == 0 and h.made and _directly(node, h.reduced)
    ]
    counts = set(_counts(state, operand, summed))
    if not summed or any(close(divisor, count) and not left for count, left in counts):
        return {}
    devices = [axes for axes in _some(summed, least=1) if close(divisor, _devices(state, axes))]
    shards = sorted({left for count, left in counts if left and close(divisor, count)})
    text = source_text(users_span(node), limit=1000)
    if devices and "axis_size" in text:
        return dict.fromkeys(devices[0], -1)
    if shards and ("shape" in text or "size" in text):
        return dict.fromkeys(shards[0], 1) if len(shards) == 1 else dict.fromkeys(summed)
    if operand.added is None or not (devices or shards):
        return {}
    if len(devices) + len(shards) > 1 or divisor == HALF or _is_a_length(state, divisor):
        what = text if len(text) <= 60 else node.op
        why = (
            f"the {divisor:g} that `{what}` divides a sum over devices by may be their number, that"
            " of the elements, or another one"
        )
        state.unanalysed(node, why, "note")
        return {}
    return dict.fromkeys(devices[0], -1) if devices else dict.fromkeys(shards[0], 1)


def _directly(node: Node, reduced: Node | None) -> bool:
    sums = ("psum", "psum_invariant", "reduce_sum")
    return (
        reduced is not None
        and reduced.op in sums
        and any(i in reduced.outputs for i in node.inputs)
    )


def _counts(
    state: State, operand: Value, summed: list[int]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every count that a mean may be divided by: along some of the summed dims, with the axes whose
    shards are counted alone."""
    for some in itertools.chain.from_iterable(
        itertools.combinations(operand.lengths, k) for k in range(1, len(operand.lengths) + 1)
    ):
        split = sorted({k for _, axes in some for k in axes if k in summed})
        local = math.prod(
            length * math.prod(state.sizes[k] for k in axes if k not in summed)
            for length, axes in some
        )
        for left in _some(split):
            yield local * math.prod(state.sizes[k] for k in split if k not in left), left


def _is_a_length(state: State, divisor: float) -> bool:
    """Whether an operand of the region has a dim of that length."""
    for i, spec in zip(state.graph.inputs, state.region.params["in_specs"], strict=True):
        for length, entry in itertools.zip_longest(state.graph.aval(i).shape, spec):
            if close(divisor, length * math.prod(state.sizes[k] for k in state.axes_of(entry))):
                return True
    return False
