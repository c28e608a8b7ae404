"""Divisions by hand of what was summed over devices: by their number, by how many elements one shard has, or by how many there are.

`lax.pmean(x, axis)` is traced as a psum and a division by a literal, and a mean written out is no different. What a literal counts is
told by its value, and by the user's own words where the value is that of several counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from sbp.plan.source import source_text, users_span
from sbp.shardmap.excess import close
from sbp.shardmap.held import Value
from sbp.shardmap.state import State
from sbp.trace.graph import Node
from sbp.types import B

HALF = 2.0
"""What squares are divided by: no evidence of a count."""


def by_hand(state: State, node: Node, operand: Value, divisor: float) -> dict[int, int | None]:
    """What a division of a psum's result does to the excess, by mesh axis.

    Arguments:
      state: the region; a note is entered where a literal may count one thing as well as another.
      node: the division.
      operand: what is divided.
      divisor: the literal.

    Returns:
      -1 for the axes whose size the sum is divided by, so that parts were averaged; 1 for those whose shards were counted alone.
    """
    summed = [k for k, h in enumerate(operand.held) if B in h.atoms and h.excess == 0 and h.made and _directly(node, h.reduced)]
    counts = set(_counts(state, operand, summed))
    if not summed or any(close(divisor, count) and not left for count, left in counts):
        return {}
    devices = [axes for axes in _some(summed) if axes and close(divisor, math.prod(state.sizes[k] for k in axes))]
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
        why = f"the {divisor:g} that `{what}` divides a sum over devices by may be their number, that of the elements, or another one"
        state.unanalysed(node, why, "note")
        return {}
    return dict.fromkeys(devices[0], -1) if devices else dict.fromkeys(shards[0], 1)


def _directly(node: Node, reduced: Node | None) -> bool:
    return reduced is not None and reduced.op in ("psum", "psum_invariant") and any(i in reduced.outputs for i in node.inputs)


def _some(axes: list[int]) -> Iterator[tuple[int, ...]]:
    for many in range(len(axes) + 1):
        yield from itertools.combinations(axes, many)


def _counts(state: State, operand: Value, summed: list[int]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every count that a mean may be divided by: along some of the summed dims, with the axes whose shards are counted alone."""
    for some in itertools.chain.from_iterable(itertools.combinations(operand.lengths, k) for k in range(1, len(operand.lengths) + 1)):
        split = sorted({k for _, axes in some for k in axes if k in summed})
        local = math.prod(length * math.prod(state.sizes[k] for k in axes if k not in summed) for length, axes in some)
        for left in _some(split):
            yield local * math.prod(state.sizes[k] for k in split if k not in left), left


def _is_a_length(state: State, divisor: float) -> bool:
    """Whether an operand of the region has a dim of that length."""
    for i, spec in zip(state.graph.inputs, state.region.params["in_specs"], strict=True):
        for length, entry in itertools.zip_longest(state.graph.aval(i).shape, spec):
            if close(divisor, length * math.prod(state.sizes[k] for k in state.axes_of(entry))):
                return True
    return False
