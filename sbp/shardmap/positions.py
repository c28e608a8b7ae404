"""Integers that depend on the index of a device: `axis_index(axis) * n + arange(n)` is the split
iota of a dim of which each device has n elements.

An integer array is followed as long as it is linear in the indices of its device and in its own
local indices, plus a term of any kind (`Position`). It is split along a dim if one step of the
device's index is as much as the whole local length of that dim. Comparisons of two such arrays
depend on their difference, so `labels - axis_index(axis) * n == arange(n)` is split, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.shardmap.distribution import UNKNOWN, WHOLE, Distribution, LocalValue, Position
from sbp.shardmap.operators import compares, counts, function_of, reshapes, selects
from sbp.shardmap.state import State
from sbp.signatures import traits_of
from sbp.trace.collectives import names_of
from sbp.trace.graph import Node
from sbp.types import Atom, B, Split

Typed = Callable[[Sequence[LocalValue]], tuple[Distribution, ...]]
"""The distributions of an operation's result, from values in place of its operands."""


def index_of_device(state: State, node: Node) -> Position:
    """The position of an `axis_index`; over several mesh axes the first one is the outermost."""
    steps = [0] * len(state.sizes)
    step = 1
    for k in reversed(state.axes_of(names_of(node))):
        steps[k] = step
        step *= state.sizes[k]
    return Position(tuple(steps), ())


def position_of(v: LocalValue, aval: Any, axes: int) -> Position | None:
    """An integer value as a position; None for other values."""
    if v.position is not None or not jnp.issubdtype(aval.dtype, jnp.integer):
        return v.position
    none = (0,) * axes, (0,) * len(aval.shape)
    if isinstance(v.const, int):
        return Position(*none, start=v.const)
    return Position(*none, term=v.per_axis)


def moved(state: State, node: Node, ins: Sequence[LocalValue], typed: Typed) -> Position | None:
    """The position of an operation's result; None where it is not linear, or not followed.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      typed: gives the distributions of the result from other operands.
    """
    if len(node.outputs) != 1:
        return None
    aval = state.graph.avals[node.outputs[0]]
    if not jnp.issubdtype(aval.dtype, jnp.integer):
        return None
    if counts(node):
        steps = tuple(int(d == node.params["dimension"]) for d in range(len(aval.shape)))
        return _unit_dims(Position((0,) * len(state.sizes), steps), aval.shape)
    if not any(v.position for v in ins):
        return None
    given = [
        position_of(v, state.graph.aval(o), len(state.sizes))
        for v, o in zip(ins, node.inputs, strict=True)
    ]
    if selects(node):
        chosen = ins[0].const
        return given[1 + int(chosen)] if isinstance(chosen, bool | int) else None
    found = [p for p in given if p is not None]
    if len(found) < len(given):
        return None
    function = function_of(node)
    if len(found) == 2 and function in (np.add, np.subtract):
        sign = 1 if function is np.add else -1
        return _sum(found[0], found[1], sign, len(aval.shape), ins, typed)
    if len(found) == 2 and function is np.multiply:
        return _multiple(found, ins, len(aval.shape))
    if len(found) == 1:
        return _of_one(node, found[0], state.graph.aval(node.inputs[0]).shape, aval.shape, typed)
    return None


def _sum(
    one: Position, other: Position, sign: int, rank: int, ins: Sequence[LocalValue], typed: Typed
) -> Position:
    one, other = _wide(one, rank), _wide(other, rank)
    term = one.term or other.term
    if one.term and other.term:
        term = typed([_with_term(v, p) for v, p in zip(ins, (one, other), strict=True)])
    return Position(
        tuple(a + sign * b for a, b in zip(one.axes, other.axes, strict=True)),
        tuple(a + sign * b for a, b in zip(one.dims, other.dims, strict=True)),
        one.start + sign * other.start,
        term,
    )


def _wide(p: Position, rank: int) -> Position:
    """A position with a scalar's term read along all dims of the other operand."""
    if len(p.dims) == rank:
        return p
    every = frozenset(Split(d) for d in range(rank))
    term = (
        None
        if p.term is None
        else tuple(replace(h, atoms=h.atoms | every) if B in h.atoms else h for h in p.term)
    )
    return replace(p, dims=(0,) * rank, term=term)


def _with_term(v: LocalValue, p: Position) -> LocalValue:
    return LocalValue(p.term or v.per_axis)


def _multiple(found: Sequence[Position], ins: Sequence[LocalValue], rank: int) -> Position | None:
    for p, v in ((found[0], ins[1]), (found[1], ins[0])):
        factor = v.const
        if isinstance(factor, int):
            p = _wide(p, rank)
            steps = tuple(factor * a for a in p.axes), tuple(factor * a for a in p.dims)
            return Position(*steps, start=factor * p.start, term=p.term)
    return None


def _of_one(
    node: Node, p: Position, shape: Sequence[int], out: Sequence[int], typed: Typed
) -> Position | None:
    """The position of an operation with one operand."""
    term = None if p.term is None else typed([LocalValue(p.term)])
    carries = traits_of(node.op).carries
    if carries == "negated":
        axes, dims = tuple(-a for a in p.axes), tuple(-a for a in p.dims)
        return Position(axes, dims, -p.start, term)
    if carries in ("copied", "rounded"):
        return replace(p, term=term)
    if carries != "arranged":
        return None
    steps = [0] * len(out)
    if "permutation" in node.params:
        steps = [p.dims[d] for d in node.params["permutation"]]
    elif "broadcast_dimensions" in node.params:
        for d, target in enumerate(node.params["broadcast_dimensions"]):
            steps[target] = p.dims[d]
    elif any(p.dims):
        kept = [d for d, n in enumerate(shape) if n != 1]
        targets = [d for d, n in enumerate(out) if n != 1]
        same = [shape[d] for d in kept] == [out[d] for d in targets]
        if not same or (reshapes(node) and node.params.get("dimensions") is not None):
            return None
        for d, target in zip(kept, targets, strict=True):
            steps[target] = p.dims[d]
    return _unit_dims(Position(p.axes, tuple(steps), p.start, term), out)


def _unit_dims(p: Position, shape: Sequence[int]) -> Position:
    """A position without steps along dims of one element."""
    return replace(p, dims=tuple(s if n != 1 else 0 for s, n in zip(p.dims, shape, strict=True)))


# ---- what the position says of the distribution -------------------------------------------------


def placed(
    state: State, p: Position, shape: Sequence[int], found: Sequence[Distribution]
) -> tuple[Distribution, ...]:
    """The distributions of a value that depends on the index of its device.

    Arguments:
      state: the region.
      p: its position.
      shape: its local shape.
      found: its distributions by the rows of its operation.
    """
    even: frozenset[Atom] = frozenset(Split(d) for d, step in enumerate(p.dims) if not step)
    given = []
    for k, h in enumerate(found):
        if p.axes[k]:
            given.append(_split(state, p, shape, k))
        elif p.term is None:
            h = WHOLE if h.unknown else h
            given.append(replace(h, atoms=h.atoms | even) if B in h.atoms else h)
        else:
            given.append(p.term[k] if h.unknown and not any(p.dims) else h)
    return tuple(given)


def _split(state: State, p: Position, shape: Sequence[int], axis: int) -> Distribution:
    """The distribution on a mesh axis whose index the value depends on."""
    found: dict[Atom, frozenset[int]] = {}
    for d, length in enumerate(shape):
        if p.term is not None and Split(d) not in p.term[axis].atoms:
            continue
        steps = [p.dims[d] * length] if length > 1 else sorted({a for a in p.axes if a}, key=abs)
        for step in steps:
            inside = outer_axes(state, p.axes, step)
            if axis in inside:
                found[Split(d)] = frozenset(inside[: inside.index(axis)])
    under = set(found.values())
    if not found:
        return UNKNOWN
    return Distribution(frozenset(found), under=under.pop() if len(under) == 1 else None)


def outer_axes(state: State, steps: Sequence[int], step: int) -> list[int]:
    """The mesh axes that split a dim, the outermost first: an index on the innermost one is worth
    the shard's own length, one on the next as much as all shards inside of it.

    Arguments:
      state: the region.
      steps: for each mesh axis, the number that the index of the device is multiplied by.
      step: the same number times the length of one shard.
    """
    found: list[int] = []
    while step and (k := next((k for k, s in enumerate(steps) if s == step), None)) is not None:
        if k in found:
            break
        found.insert(0, k)
        step *= state.sizes[k]
    return found


def compared(
    state: State, node: Node, ins: Sequence[LocalValue], typed: Typed, found: list[Distribution]
) -> tuple[list[Distribution], bool | None]:
    """The distributions of a comparison of values that depend on the index of their device, and its
    result where that is the same for all elements on all devices.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      typed: gives the distributions of the result from other operands.
      found: its distributions by the rows of its operation.
    """
    if not compares(node) or not any(v.position for v in ins):
        return found, None
    shape = state.graph.avals[node.outputs[0]].shape
    given = [
        position_of(v, state.graph.aval(o), len(state.sizes))
        for v, o in zip(ins, node.inputs, strict=True)
    ]
    if given[0] is None or given[1] is None:
        return found, None
    p = _sum(given[0], given[1], -1, len(shape), ins, typed)
    if p.term is None and (sure := _decided(state, node, p, shape)) is not None:
        return [WHOLE] * len(found), sure
    if not any(v.position and any(v.position.axes) for v in ins):
        return found, None
    given = placed(state, p, shape, found)
    return [g if h.unknown else h for g, h in zip(given, found, strict=True)], None


def _decided(state: State, node: Node, p: Position, shape: Sequence[int]) -> bool | None:
    """The result of comparing a position with zero, where it is the same everywhere."""
    function = function_of(node)
    ends = [s * (n - 1) for s, n in zip(p.axes, state.sizes, strict=True)]
    ends += [s * (n - 1) for s, n in zip(p.dims, shape, strict=True)]
    least = p.start + sum(min(e, 0) for e in ends)
    most = p.start + sum(max(e, 0) for e in ends)
    if function is None or 0 in shape:
        return None
    low, high = bool(function(least, 0)), bool(function(most, 0))
    if function in (np.equal, np.not_equal):
        return (function is np.not_equal) if least > 0 or most < 0 else None
    return low if low == high else None


# ---- blocks -------------------------------------------------------------------------------------


def own_block(
    state: State, starts: Sequence[LocalValue], sizes: Sequence[int], axis: int
) -> tuple[int, frozenset[int]] | None:
    """The dim along which each device of a mesh axis takes the block that its index numbers, and
    the mesh axes outside of that one; None where it takes another place.

    Arguments:
      state: the region.
      starts: the index of the first element along each dim.
      sizes: the lengths of the block.
      axis: the mesh axis.
    """
    moving = [d for d, v in enumerate(starts) if B not in v.per_axis[axis].atoms]
    if len(moving) != 1:
        return None
    p = starts[moving[0]].position
    if p is None or (p.term is not None and B not in p.term[axis].atoms):
        return None
    over = outer_axes(state, p.axes, sizes[moving[0]])
    return (moving[0], frozenset(over[: over.index(axis)])) if axis in over else None
