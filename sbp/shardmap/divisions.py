"""Divisions by a number: those in `lax.pmean` and `jnp.mean`, and those that the user writes.

A division that a function of JAX makes carries the frame of that function: in a `lax.pmean` the
divisor is the number of devices, in a `jnp.mean` the number of elements. `x / lax.axis_size(axis)`
is traced like `x / 8`: the equation has the number and not its origin. A number that equals the
number of devices is *read* as that number, and `Divisions.open` gets the division. `analyse` then
tries the other reading of each of these divisions. A finding under only one reading becomes a
warning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sbp.shardmap.distribution import Distribution, Doubt, Fault, LocalValue
from sbp.shardmap.excess import close
from sbp.shardmap.operators import divides, function_of, multiplies, sums, sums_dims
from sbp.shardmap.specs import divisor_of
from sbp.shardmap.state import Reading, State
from sbp.signatures import traits_of
from sbp.trace.collectives import SUMS, names_of
from sbp.trace.graph import Constant, Node
from sbp.trace.regions import LOOPS, trips_are_assumed, trips_of
from sbp.types import B, P

# ---- counts -------------------------------------------------------------------------------------
# Divisions by hand whose number equals the count of a shard's own elements.
#
# `(y - t) / y.size` and `x.T @ d / x.shape[0]` are traced with a number. Where it equals the local
# count along a split dim, it may be that count, and then a sum over devices of what follows is as
# many times too large as there are devices; or it is another number, and then it says nothing. The
# program is analysed under both readings (`analyse`). It is right if it is right under one of
# them.


LEAST = 3
"""The least number that is taken for a count of elements: halves and wholes are no evidence."""


def of_shard(
    state: State, node: Node, operand: LocalValue, divisor: float
) -> dict[int, int | None]:
    """The change of the excess by a division that the user wrote, if its number is read as a count
    of one shard's elements: +1 on the mesh axes that split the counted dims.

    Arguments:
      state: the region; `state.divisions.shards` gets the reading.
      node: the division.
      operand: what it divides.
      divisor: the number.
    """
    if not divides(node) or divisor < LEAST:
        return {}
    axes = _split_axes(state, node, operand, divisor) or _contracted(state, node, operand, divisor)
    if not axes or any(close(divisor, state.sizes[k]) for k in axes):
        return {}
    state.divisions.shards[node.id] = Reading(node, "elements", divisor)
    return dict.fromkeys(axes, 1) if node.id in state.divisions.counted else {}


def _split_axes(state: State, node: Node, operand: LocalValue, divisor: float) -> list[int]:
    """The mesh axes along which a split value is divided by the length of the split dim, or by the
    number of all its elements."""
    shape = state.graph.aval(node.inputs[0]).shape
    split = {k: h.split.dim for k, h in enumerate(operand.per_axis) if h.split and h.excess == 0}
    every = close(divisor, math.prod(shape))
    return [k for k, dim in split.items() if every or close(divisor, shape[dim])]


def _contracted(state: State, node: Node, operand: LocalValue, divisor: float) -> list[int]:
    """The mesh axes along which a product of matrices is divided by the length that one device
    contracts, or by one less."""
    at, over = state.maker(node.inputs[0]), set[int]()
    while at is not None and (at.op in SUMS or traits_of(at.op).carries):
        over |= set(state.axes_of(names_of(at)) if at.op in SUMS else ())
        at = state.maker(at.inputs[0])
    if at is None or not any(close(divisor, n) for n in _lengths(state, at)):
        return []
    return [
        k
        for k, h in enumerate(operand.per_axis)
        if h.made and h.excess == 0 and (B in h.atoms if k in over else h.partial == P)
    ]


def _lengths(state: State, node: Node) -> Iterator[float]:
    """The number of products that each element of a product of matrices adds up, and one less."""
    dims = node.params.get("dimension_numbers")
    if not traits_of(node.op).multiplies or not isinstance(dims, tuple):
        return
    shape = state.graph.aval(node.inputs[0]).shape
    ((contracted, _), _) = dims
    length = math.prod(shape[d] for d in contracted)
    yield from (length, length - 1)


# ---- divisions ----------------------------------------------------------------------------------


HALF = 2.0
"""The divisor in `x**2 / 2`: no evidence that it counts devices."""

PMEAN = "lax.parallel.pmean"
"""The function of JAX that divides a sum over devices by their number."""

_ARITHMETIC = (
    "lax.lax.div",
    "lax.lax.mul",
    "numpy.array_methods._forward_operator_to_aval",
    "numpy.ufuncs.divide",
    "numpy.ufuncs.multiply",
    "numpy.ufuncs.true_divide",
)
"""The functions of JAX by which a user divides or multiplies."""


Change = dict[int, int | None]
"""The change of the excess by a division, for each mesh axis: -1 divides by the axis size, +1 means
that a division by the axis size is still needed, None makes the excess unknown."""


def divided(state: State, node: Node, ins: Sequence[LocalValue], result: LocalValue) -> LocalValue:
    """The result of an operation. If it divides by a constant that may count devices or summed
    elements, the excess changes accordingly.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      result: its result if the constant counts nothing.
    """
    at = _constant_operand(node, ins)
    if at is None:
        return result
    divisor = float(ins[at].const) if divides(node) else 1.0 / float(ins[at].const)
    if divisor <= 1.0:
        return result
    change = _change(state, node, ins[1 - at], divisor)
    per_axis = list(result.per_axis)
    for axis in _shares(state, result, divisor) if not change else ():
        again = _divided_again(state, node, per_axis[axis], axis, divisor)
        per_axis[axis] = replace(per_axis[axis], share=True, twice=again)
    for axis, by in change.items():
        h = per_axis[axis]
        if h.fault or h.excess is None:
            continue
        excess = None if by is None else h.excess + by
        kind = "averaged" if by is not None and by < 0 else "pending"
        cause = h.cause or Fault(kind, node, h.reduced or h.made)
        per_axis[axis] = replace(h, excess=excess, cause=cause if excess else None)
        if by is not None and by < 0:
            state.divisions.by_devices.add(node.id)
    return replace(result, per_axis=tuple(per_axis))


def _constant_operand(node: Node, ins: Sequence[LocalValue]) -> int | None:
    """The position of the operand that is a number to divide by or to multiply with; None for any
    other operation."""
    if divides(node) and len(ins) == 2:
        at = 1
    elif multiplies(node) and len(ins) == 2:
        at = next((i for i in (0, 1) if isinstance(node.inputs[i], Constant)), None)
    else:
        return None
    const = None if at is None else ins[at].const
    number = isinstance(const, int | float) and not isinstance(const, bool)
    return at if number and const and math.isfinite(const) else None


def axes_of_size(sizes: Sequence[int], axes: Sequence[int], number: float) -> list[tuple[int, ...]]:
    """The sets of mesh axes whose sizes multiply to a number, those of fewest axes first.

    Arguments:
      sizes: the sizes of all mesh axes.
      axes: the positions of the mesh axes to choose from.
      number: the number; 1 is the product of no axis.

    >>> axes_of_size((2, 4, 4), (0, 1, 2), 8.0)
    [(0, 1), (0, 2)]
    """
    return [some for some in _subsets(axes) if close(number, math.prod(sizes[k] for k in some))]


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for many in range(len(axes) + 1):
        yield from itertools.combinations(axes, many)


def _by_user(node: Node) -> bool:
    """Whether the user wrote a division, rather than called a function that divides."""
    return not node.library or node.library[-1] in _ARITHMETIC


def _change(state: State, node: Node, operand: LocalValue, divisor: float) -> Change:
    """The change of the excess by a division."""
    if axes := _of_pmean(state, node, divisor):
        return dict.fromkeys(axes, -1)
    if node.backward:
        return _in_gradient(state, node, divisor)
    if _is_mean(operand, node, divisor):
        return _entered(state, node, divisor, _mean(operand))
    over = [k for k, h in enumerate(operand.per_axis) if h.excess is not None and h.excess > 0]
    if _by_user(node) and (found := _devices(state, node, over, divisor)):
        change: Change = dict.fromkeys(found, -1)
        counts = _counts_turns(state, node, divisor) or _counts_terms(state, node, divisor)
        other = multiplies(node) or counts
        reading = Reading(node, "devices", divisor)
        return _entered(state, node, divisor, _read(state, reading, change, other=other))
    partial = [
        k
        for k, h in enumerate(operand.per_axis)
        if h.partial == P and h.made and sums_dims(h.made) and h.excess == 0
    ]
    if partial and operand.added:
        return _counted(state, node, operand.count, divisor, partial)
    if not _by_user(node):
        return {}
    if found := _of_reduced(state, node, operand, divisor):
        return found
    counted = of_shard(state, node, operand, divisor)
    return _entered(state, node, divisor, counted) if counted else {}


def _entered(state: State, node: Node, divisor: float, change: Change) -> Change:
    state.divisions.enter(node, divisor, change)
    return change


def _read(state: State, reading: Reading, change: Change, *, other: bool = False) -> Change:
    """A division whose number may count devices or elements, or be another one.

    Arguments:
      state: the region; `state.divisions.open` gets the reading.
      reading: the division, and what its number may count.
      change: the change of the excess if the number is that count.
      other: whether the first reading is that of another number; it is for a number that the
          program computes.
    """
    node = reading.node
    state.divisions.open[node.id] = reading
    other = other or _computes_divisor(state, node)
    return {} if (node.id in state.divisions.flipped) != other else change


def _computes_divisor(state: State, node: Node) -> bool:
    """Whether the program computes the number that it divides by, as `jnp.sqrt(16.0)`. Converting
    a literal, or summing it over devices, does not count."""
    operand = next((i for i in node.inputs if isinstance(i, Constant)), node.inputs[-1])
    while (maker := state.maker(operand)) is not None and (
        traits_of(maker.op).carries or sums(maker)
    ):
        operand = maker.inputs[0]
    return not isinstance(operand, Constant)


def _of_pmean(state: State, node: Node, divisor: float) -> tuple[int, ...]:
    """The mesh axes of the `lax.pmean` that a division belongs to; empty for any other division."""
    if PMEAN not in node.library:
        return ()
    maker = state.maker(node.inputs[0])
    axes = state.divisions.pmeans.get(node.stack, ())
    if maker is not None and maker.op in SUMS and "axes" in maker.params and not node.backward:
        axes = (state.axes_of(maker.params["axes"]),)
    return next(
        (a for a in axes if close(divisor, math.prod(state.sizes[k] for k in a))),
        (),
    )


def _in_gradient(state: State, node: Node, divisor: float) -> Change:
    """The change by a division of the backward pass: the change of its forward part, or -1 where
    it makes a share of a cotangent for each device."""
    forward = state.divisions.of_gradient(node, divisor)
    if forward is not None:
        return forward
    found = axes_of_size(state.sizes, range(len(state.sizes)), divisor)
    return dict.fromkeys(found[0]) if found else {}


def _devices(state: State, node: Node, over: Sequence[int], divisor: float) -> tuple[int, ...]:
    """The mesh axes whose size a number is, or that times the trips of a loop, as in a mean over
    devices and microbatches; empty where it is neither."""
    for trips in (1, *_turns(state, node)):
        found = axes_of_size(state.sizes, over, divisor / trips)
        if found and found[0]:
            return found[0]
    return ()


def _counts_turns(state: State, node: Node, divisor: float) -> bool:
    """Whether a number is the number of trips of a loop around a division, or of the loop that made
    its operand, as in a mean over microbatches."""
    return any(close(divisor, t) for t in _turns(state, node))


def _turns(state: State, node: Node) -> list[int]:
    """The trips of the loops around a division, and of the loop that made its operand, before it
    was reduced."""
    at = state.maker(node.inputs[0])
    while at is not None and (at.op in SUMS or traits_of(at.op).carries):
        at = state.maker(at.inputs[0])
    made = at is not None and at.op in LOOPS and not trips_are_assumed(at)
    return [*state.turns, *([trips_of(at)] if at is not None and made else [])]


def _counts_terms(state: State, node: Node, divisor: float) -> bool:
    """Whether a number is the number of terms that the user adds up to what it divides, as in the
    mean of two losses."""
    at = state.maker(node.inputs[0])
    while at is not None and (
        sums(at)
        or traits_of(at.op).carries
        or (divides(at) and isinstance(at.inputs[1], Constant) and not _by_user(at))
    ):
        at = state.maker(at.inputs[0])
    if at is None or at.backward:
        return False
    terms, todo = 0, [at]
    while todo:
        one = todo.pop()
        if function_of(one) is not np.add:
            return False
        for operand in one.inputs:
            maker = state.maker(operand)
            added = maker is not None and function_of(maker) is np.add
            todo += [maker] if maker is not None and added else []
            terms += not added
    return close(divisor, terms)


# ---- shares -------------------------------------------------------------------------------------


def _shares(state: State, value: LocalValue, divisor: float) -> tuple[int, ...]:
    """The mesh axes whose size a whole value is divided by, so that it may be a share for each
    device."""
    whole = [k for k, h in enumerate(value.per_axis) if B in h.atoms and h.excess == 0]
    found = axes_of_size(state.sizes, whole, divisor)
    return found[0] if found else ()


def _divided_again(
    state: State, node: Node, h: Distribution, axis: int, divisor: float
) -> Doubt | None:
    """The doubt about a mean over devices that is divided by their number a second time: the result
    is a share, or the number counts something else, or the result is too small."""
    written = _by_user(node) and divides(node) and not _computes_divisor(state, node)
    if node.backward or not written or not (h.made and h.reduced):
        return None
    at = state.maker(node.inputs[0])
    while at is not None and at.id not in state.divisions.by_devices:
        scales = (divides(at) or multiplies(at)) and any(isinstance(i, Constant) for i in at.inputs)
        if not scales and not traits_of(at.op).carries:
            break
        at = state.maker(next((i for i in at.inputs if isinstance(i, int)), at.inputs[0]))
    if at is None or (not sums(at) and at.id not in state.divisions.by_devices):
        return None
    return Doubt(node, "divided-again", axis=state.names[axis], number=divisor, severity="warning")


# ---- sums that are still partial ----------------------------------------------------------------


def _is_mean(operand: LocalValue, node: Node, divisor: float) -> bool:
    """Whether a function of JAX divides a sum by the number of its elements."""
    return (
        operand.added is not None
        and not _by_user(node)
        and close(divisor, math.prod(length for length, _ in _own_lengths(operand)))
    )


def _own_lengths(operand: LocalValue) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The dims that the last sum ran along, without those of sums before it."""
    many = len(operand.added.params["axes"]) if operand.added else 0
    return operand.lengths[-many:] if many else ()


def _mean(operand: LocalValue) -> Change:
    """The change by a mean along dims: along split dims the shards' means still need averaging;
    along a dim of gathered parts they are averaged."""
    change: Change = {}
    for _, axes in _own_lengths(operand):
        change |= {k: 1 for k in axes if operand.per_axis[k].partial == P}
    return change | {
        k: -1 for k, h in enumerate(operand.per_axis) if h.reduced is operand.added and B in h.atoms
    }


def _counted(state: State, node: Node, count: int, divisor: float, partial: list[int]) -> Change:
    """The change where a sum over a split dim is divided by the number of elements, of this shard
    or of all shards."""
    matches = axes_of_size(state.sizes, partial, divisor / count)
    if len(matches) == 1:
        left = [k for k in partial if k not in matches[0]]
        if multiplies(node):
            return dict.fromkeys(left)
        return _entered(state, node, divisor, dict.fromkeys(left, 1))
    ratio = divisor / count
    if matches or close(ratio, round(ratio)) or close(1 / ratio, round(1 / ratio)):
        return dict.fromkeys(partial)  # some count, of what is not known
    return {}


# ---- sums that were reduced ---------------------------------------------------------------------


def _of_reduced(state: State, node: Node, operand: LocalValue, divisor: float) -> Change:
    """The change by a division of a sum over devices: -1 where parts were averaged, 1 where the
    divisor counts the elements of one shard only."""
    summed = [
        k
        for k, h in enumerate(operand.per_axis)
        if B in h.atoms and h.excess == 0 and h.made and _directly(node, h.reduced)
    ]
    counts = set(_counts(state, operand, summed))
    if not summed or any(close(divisor, count) and not left for count, left in counts):
        return {}
    devices = axes_of_size(state.sizes, summed, divisor)
    if operand.added is None:  # a sum of products, whose length says nothing
        reading = Reading(node, "devices", divisor)
        return _read(state, reading, dict.fromkeys(devices[0], -1)) if devices else {}
    shards = sorted({left for count, left in counts if left and close(divisor, count)})
    if not (devices or shards):
        return {}
    change: Change = dict.fromkeys(devices[0], -1) if devices else dict.fromkeys(shards[0], 1)
    one = len(devices) + len(shards) == 1
    if one and divisor != HALF and not _is_a_length(state, divisor):
        return change
    return _read(state, Reading(node, "devices" if devices else "elements", divisor), change)


def _directly(node: Node, reduced: Node | None) -> bool:
    return reduced is not None and sums(reduced) and any(i in reduced.outputs for i in node.inputs)


def _counts(
    state: State, operand: LocalValue, summed: list[int]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The counts that a mean may be divided by, along some of the summed dims, each with the mesh
    axes whose size the count leaves out."""
    for some in itertools.chain.from_iterable(
        itertools.combinations(operand.lengths, k) for k in range(1, len(operand.lengths) + 1)
    ):
        split = sorted({k for _, axes in some for k in axes if k in summed})
        local = math.prod(
            length * math.prod(state.sizes[k] for k in axes if k not in summed)
            for length, axes in some
        )
        for left in _subsets(split):
            yield local * math.prod(state.sizes[k] for k in split if k not in left), left


def _is_a_length(state: State, divisor: float) -> bool:
    """Whether an operand of the region has a dim of that length."""
    sizes = dict(zip(state.names, state.sizes, strict=True))
    return any(
        close(divisor, length * divisor_of(spec, dim, sizes))
        for i, spec in zip(state.graph.inputs, state.region.params["in_specs"], strict=True)
        for dim, length in enumerate(state.graph.aval(i).shape)
    )
