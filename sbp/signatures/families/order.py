"""`argmax`, `argmin`, `top_k` and `sort`. Along a split dim, each device searches or sorts its own
shard, and the devices compare their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.factors import FactorMap, admissible, dim_factors, split_rows
from sbp.signatures.kernels.shards import without_padding
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, Sent, add_kernel, bind_with, rule
from sbp.signatures.traits import Traits
from sbp.types import B, Split, Unreduced

_NOWHERE = np.int32(np.iinfo(np.int32).max)
"""The index of padding: larger than every index of an element."""


def _size(aval: Any) -> int:
    return math.prod(aval.shape)


# ---- argmax and argmin: pairs of a value and its index ------------------------------------------


def _extreme_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Compares the winners of all shards, each with its index. Among equal elements the first wins;
    NaNs count as equal. The winner's value is reduced, since TPU gathers elements slowly."""
    (dim,) = ctx.params["axes"]
    axes = ctx.in_axes(0, dim)
    if not axes:
        return bind_with(ctx, args)
    name = "max" if ctx.primitive.name == "argmax" else "min"
    extreme = jnp.max if name == "max" else jnp.min
    x = without_padding(ctx, 0, args[0], (dim,), name)
    (at,) = bind_with(ctx, (x,), index_dtype=np.dtype(np.int32))
    value = extreme(x, dim)
    index = jnp.where(at < ctx.in_extent(0, dim), at + ctx.in_offset(0, dim), _NOWHERE)
    for axis, _ in reversed(axes):
        values, indices = lax.all_gather(value, axis), lax.all_gather(index, axis)
        value = extreme(values, 0)
        ties = (values == value) | ((values != values) & (value != value))
        index = jnp.min(jnp.where(ties, indices, _NOWHERE), 0)
    return [index.astype(ctx.global_outs[0].dtype)]


def _pair_sends(op: Op, row: Row) -> tuple[Sent, ...]:
    """Each device sends its (value, index) pairs to all others; values and indices go in two
    collectives."""
    pair = _jax.itemsize(op.ins[0].dtype) + _NOWHERE.itemsize
    return (Sent("all_gather", (op.axis_size - 1) * _size(op.outs[0]) * pair, 2),)


add_kernel(
    Kernel(
        name="pair",
        summary="(value, index) of each shard is gathered and compared",
        sends=_pair_sends,
    )
)


@rule("argmax", "argmin", traits=Traits(orderless=True), local=_extreme_local)
def _extreme(op: Op) -> Sequence[Row]:
    """Other dims split; the searched dim splits with the kernel `pair`."""
    dims = dim_factors(len(op.ins[0].shape), op.params["axes"])
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(tuple(d for d in dims if d is not None),)))
    if op.ins[0].shape[op.params["axes"][0]] > 0:
        rows.append(Row((Split(op.params["axes"][0]),), (B,), kernel="pair"))
    return rows


# ---- top_k --------------------------------------------------------------------------------------


def _top_k_axis(params: dict[str, Any], rank: int) -> int:
    return params.get("axis", rank - 1) % rank


def _top_k_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Gathers the k largest elements of each shard, in order, and takes the k largest of those.
    Among equal elements the first wins, as on one device."""
    dim = _top_k_axis(ctx.params, args[0].ndim)
    if not ctx.in_axes(0, dim):
        return bind_with(ctx, args)
    ((axis, _),) = ctx.in_axes(0, dim)
    x = without_padding(ctx, 0, args[0], (dim,), "max")
    values, at = bind_with(ctx, (x,), k=min(ctx.params["k"], x.shape[dim]))
    values = lax.all_gather(values, axis, axis=dim, tiled=True)
    indices = lax.all_gather(
        at + jnp.asarray(ctx.in_offset(0, dim), at.dtype), axis, axis=dim, tiled=True
    )
    best, chosen = bind_with(ctx, (values,), k=ctx.params["k"])
    return [best, jnp.take_along_axis(indices, chosen, dim)]


def _candidate_sends(op: Op, row: Row) -> tuple[Sent, ...]:
    """Each device sends its k best elements, or its whole shard if that is shorter, to all others;
    values and indices go in two collectives."""
    dim = _top_k_axis(op.params, len(op.ins[0].shape))
    size = op.ins[0].shape[dim]
    kept = min(op.params["k"], -(-size // op.axis_size)) * _size(op.ins[0]) // size
    pair = sum(_jax.itemsize(a.dtype) for a in op.outs)
    return (Sent("all_gather", (op.axis_size - 1) * kept * pair, 2),)


add_kernel(
    Kernel(
        name="candidates",
        summary="the k best of each shard are gathered, the best of those kept",
        sends=_candidate_sends,
        nests=False,
    )
)


@rule("top_k", traits=Traits(scales="together", orderless=True), local=_top_k_local)
def _top_k(op: Op) -> Sequence[Row]:
    """Other dims split; the searched dim splits with the kernel `candidates`."""
    rank = len(op.ins[0].shape)
    axis = _top_k_axis(op.params, rank)
    dims = dim_factors(rank, [axis])
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(dims,) * len(op.outs)))
    if 0 not in op.ins[0].shape:
        rows.append(Row((Split(axis),), (B, B), kernel="candidates"))
    return rows


# ---- sort ---------------------------------------------------------------------------------------


def _network(n: int) -> list[tuple[int, int]]:
    """The stages of Batcher's bitonic sorting network on n = 2**k places, as pairs: the size of the
    runs, and the distance between partners."""
    stages, run = [], 2
    while run <= n:
        distance = run // 2
        while distance:
            stages.append((run, distance))
            distance //= 2
        run *= 2
    return stages


def _sort_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Sorts shards, then merges and splits pairs of shards along a sorting network.

    Padding sorts last. Equal keys are in the order of their indices, as in a stable sort.
    """
    dim, keys = ctx.params["dimension"], ctx.params["num_keys"]
    if not ctx.in_axes(0, dim):
        return bind_with(ctx, args)
    ((axis, n),) = ctx.in_axes(0, dim)
    size = args[0].shape[dim]
    place = lax.broadcasted_iota(jnp.int32, args[0].shape, dim)
    is_padding = (place >= ctx.in_extent(0, dim)).astype(jnp.int32)
    even = isinstance(ctx.in_extent(0, dim), int)
    first = [] if even else [is_padding]
    operands = [*first, *args[:keys], place + ctx.in_offset(0, dim), *args[keys:]]

    def ordered(values: Sequence[Any]) -> list[Any]:
        return list(bind_with(ctx, values, num_keys=len(first) + keys + 1, is_stable=False))

    operands = ordered(operands)
    me = lax.axis_index(axis)
    for run, distance in _network(n):
        theirs = [ctx.permute(x, axis, [(i, i ^ distance) for i in range(n)]) for x in operands]
        merged = ordered(
            [lax.concatenate(pair, dim) for pair in zip(operands, theirs, strict=True)]
        )
        low = ((me & run) == 0) == ((me & distance) == 0)
        halves = (
            (lax.slice_in_dim(x, 0, size, axis=dim), lax.slice_in_dim(x, size, 2 * size, axis=dim))
            for x in merged
        )
        operands = [jnp.where(low, a, b) for a, b in halves]
    own = operands[len(first) :]
    return [*own[:keys], *own[keys + 1 :]]


def _sort_sends(op: Op, row: Row) -> tuple[Sent, ...]:
    """Each stage of the network sends the whole shard of every operand to a partner."""
    dim, n = op.params["dimension"], op.axis_size
    size = op.ins[0].shape[dim]
    elements = -(-size // n) * (_size(op.ins[0]) // size)
    # With each element go its index and, where shards are uneven, whether it is padding.
    itemsize = sum(_jax.itemsize(a.dtype) for a in op.ins) + 4 + (0 if op.divides(size) else 4)
    count = len(_network(n))
    return (Sent("permute", count * elements * itemsize, count * (len(op.ins) + 1)),)


add_kernel(
    Kernel(
        name="sorting_network",
        summary="shards are merged and split along a bitonic network",
        sends=_sort_sends,
        nests=False,
    )
)


@rule("sort", traits=Traits(moves=True, scales="together", orderless=True), local=_sort_local)
def _sort(op: Op) -> Sequence[Row]:
    """Other dims split; the sorted dim splits over 2**k devices with the kernel
    `sorting_network`."""
    axis = int(op.params["dimension"])
    dims = dim_factors(len(op.ins[0].shape), [axis])
    rows = split_rows(op, FactorMap(ins=(dims,) * len(op.ins), outs=(dims,) * len(op.outs)))
    if op.axis_size & (op.axis_size - 1) == 0 and 0 not in op.ins[0].shape:
        rows.append(
            Row(
                (Split(axis),) * len(op.ins),
                (Split(axis),) * len(op.outs),
                kernel="sorting_network",
            )
        )
    return [*rows, *_moved_along(op)]


def _moved_along(op: Op) -> list[Row]:
    """Rows in which operands that are not keys are partial: the keys, which are B, determine the
    order of a stable sort."""
    keys = op.params["num_keys"]
    moved = op.ins[keys:]
    if not moved or not op.params["is_stable"]:
        return []
    common = set.intersection(*(set(admissible(a.dtype)) for a in moved))
    atoms = [(B,) * keys + (Unreduced(m),) * len(moved) for m in sorted(common)]
    return [Row(a, a) for a in atoms]
