"""Lookups by position in a device's own shard: `logp[jnp.arange(n), labels]` on a split batch.

The indices of such a lookup are columns, one for each dim. Where the column of a split dim counts
the rows of the shard, each device looks up in its own rows, so that the result is split as the
other columns are. The gradient, which adds at the same places, is split as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from sbp.shardmap.distribution import UNKNOWN, Distribution, Doubt, LocalValue
from sbp.shardmap.operators import joins, looks_up
from sbp.shardmap.state import State
from sbp.signatures import traits_of
from sbp.trace.graph import Node
from sbp.types import Split


def columns_of(state: State, node: Node, ins: Sequence[LocalValue]) -> tuple[LocalValue, ...]:
    """The columns that an operation joins to the indices of a lookup; empty for any other
    operation."""
    if not joins(node):
        return ()
    aval = state.graph.avals[node.outputs[0]]
    last = len(aval.shape) - 1
    single = all(state.graph.aval(o).shape[last] == 1 for o in node.inputs)
    whole = jnp.issubdtype(aval.dtype, jnp.integer)
    return tuple(ins) if single and whole and node.params["dimension"] == last else ()


def own_rows(
    state: State, node: Node, ins: Sequence[LocalValue], found: Sequence[Distribution]
) -> list[Distribution]:
    """The distributions of a lookup or a write at the rows of each device's own shard.

    Arguments:
      state: the region.
      node: the operation.
      ins: its operands.
      found: the distributions of its result by its rows.
    """
    if not looks_up(node) or "dimension_numbers" not in node.params:
        return list(found)
    return [
        _on_axis(state, node, ins, k) or h
        if h.unknown or (h.fault and h.fault.kind == "local")
        else h
        for k, h in enumerate(found)
    ]


def _on_axis(state: State, node: Node, ins: Sequence[LocalValue], axis: int) -> Distribution | None:
    shape, at = state.graph.aval(node.inputs[0]).shape, state.graph.aval(node.inputs[1]).shape
    columns = ins[1].columns or (ins[1],)
    if len(columns) != at[-1]:
        return None
    dims, window = _dims(node)
    writes = len(ins) == 3
    looked = ins[2] if writes else ins[0]
    outer = len(state.graph.aval(node.inputs[2]).shape if writes else _out(state, node))
    places = [d for d in range(outer) if d not in window]
    for c, d in enumerate(dims):
        row = _row(columns[c], shape[d], at)
        if row is None:
            continue
        others = [v for i, v in enumerate(columns) if i != c]
        if any(Split(row) not in v.per_axis[axis].atoms for v in others):
            return _same_columns(state, node, others, looked.per_axis[axis], axis)
        here, there = Split(d), Split(places[row])
        if not writes and looked.per_axis[axis].split == here:
            return replace(looked.per_axis[axis], atoms=frozenset({there}), under=None)
        if writes and there in looked.per_axis[axis].atoms and here in ins[0].per_axis[axis].atoms:
            return replace(looked.per_axis[axis], atoms=frozenset({here}), under=None)
    return None


def _same_columns(
    state: State, node: Node, others: Sequence[LocalValue], h: Distribution, axis: int
) -> Distribution | None:
    """Columns that are the same on every device, beside one that counts the device's own rows."""
    numbered = any(v.numbered and not (v.position and any(v.position.axes)) for v in others)
    if not numbered or not h.split or node.backward:
        return None
    name = state.names[axis]
    return replace(
        UNKNOWN, doubt=Doubt(node, "own-positions", "warning", axis=name, atoms=(h.split,))
    )


def _out(state: State, node: Node) -> tuple[int, ...]:
    return tuple(state.graph.avals[node.outputs[0]].shape)


def _dims(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dim of the first operand that each column indexes; the dims of what is looked up or
    written that belong to the window."""
    numbers = node.params["dimension_numbers"]
    if traits_of(node.op).scatters or hasattr(numbers, "update_window_dims"):
        return numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
    return numbers.start_index_map, numbers.offset_dims


def _row(column: LocalValue, length: int, shape: Sequence[int]) -> int | None:
    """The dim along which a column counts all rows of a shard; None for any other column."""
    p = column.position
    if p is None or any(p.axes) or p.start or p.term is not None:
        return None
    steps = [d for d, step in enumerate(p.dims) if step]
    one = len(steps) == 1 and p.dims[steps[0]] == 1 and shape[steps[0]] == length
    return steps[0] if one else None
