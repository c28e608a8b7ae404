"""gather and the scatters: index batches and whole slices split; linear in what is moved; a split indexed dim masks or shifts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import Dims, FactorMap, admissible, linear_rows, moved_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.shards import clipped, without_padding
from sbp.types import B, Split, Unreduced

_MODE = lax.GatherScatterMode
_SCATTER_MONOID = {"scatter-add": "sum", "scatter-sub": "sum", "scatter-mul": "prod", "scatter-min": "min", "scatter-max": "max"}


def gather_factors(params: dict[str, Any], operand_shape: Sequence[int], indices_rank: int, out_rank: int) -> FactorMap:
    """Factors of a gather: whole slices (`w`), index batches (`i`) and operand batch dims (`b`)."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    operand: list[str | None] = [None] * len(operand_shape)
    indices: list[str | None] = [f"i{d}" for d in range(indices_rank - 1)] + [None]
    for n, (d, i) in enumerate(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)):
        operand[d] = indices[i] = f"b{n}"
    window = [d for d in range(len(operand_shape)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    out: list[str | None] = [None] * out_rank
    for d, o in zip(window, numbers.offset_dims, strict=True):
        if sizes[d] == operand_shape[d] and d not in numbers.start_index_map:
            operand[d] = out[o] = f"w{d}"
    batch = iter(indices[:-1])
    for o in range(out_rank):
        if o not in numbers.offset_dims:
            out[o] = next(batch)
    return FactorMap(ins=(tuple(operand), tuple(indices)), outs=(tuple(out),))


def _looked_up(numbers: Any) -> list[int]:
    """Operand dims of a gather that an index picks one element of (the vocabulary of an embedding)."""
    return [int(d) for d in numbers.collapsed_slice_dims if d in numbers.start_index_map]


def _local_sizes(ctx: LocalContext) -> tuple[int, ...]:
    """Slice sizes on the shard: a whole slice is the shard's, one element stays one element."""
    wholes = zip(ctx.params["slice_sizes"], ctx.global_ins[0].shape, ctx.local_ins[0], strict=True)
    return tuple(min(local, size) if size == whole else size for size, whole, local in wholes)


def _gather_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The gather on the shard; where a looked-up dim is split, by its owner alone.

    The owner of an index is the device that holds the element it is clipped to, so that each result has exactly one; an index outside
    stays outside on its owner, which then fills.
    """
    operand, indices = args
    numbers, mode = ctx.params["dimension_numbers"], _MODE.from_any(ctx.params["mode"])
    changes: dict[str, Any] = {"slice_sizes": _local_sizes(ctx)}
    mine = None
    for d in _looked_up(numbers):
        whole, local = ctx.global_ins[0].shape[d], ctx.local_ins[0][d]
        if whole == local:
            continue
        c = numbers.start_index_map.index(d)
        inside, outside = clipped(indices[..., c], whole)
        here = inside - ctx.in_offset(0, d)
        owned = (here >= 0) & (here < ctx.in_extent(0, d))
        mine = owned if mine is None else mine & owned
        here = jnp.clip(here, 0, local - 1)
        if mode == _MODE.FILL_OR_DROP:
            here = jnp.where(outside, local, here)
        # The other components keep their meaning: all are compared as int32, into which each is clipped first.
        others = [here if k == c else _as_int32(indices[..., k]) for k in range(indices.shape[-1])]
        indices = jnp.stack(others, -1)
    if args[1].shape != tuple(ctx.global_ins[1].shape) or mine is not None:
        changes["indices_are_sorted"] = False  # padding and foreign indices are not
    if mine is None:
        return bind_with(ctx, args, **changes)
    (out,) = bind_with(ctx, (operand, indices), **changes)
    batch = [o for o in range(out.ndim) if o not in numbers.offset_dims]
    return [jnp.where(lax.broadcast_in_dim(mine, out.shape, batch), out, jnp.zeros((), out.dtype))]


def _as_int32(index: Any) -> Any:
    """An index as int32, one that does not fit as the nearest that does: it is outside every dim all the same."""
    info = jnp.iinfo(index.dtype)
    low, high = max(info.min, -(2**31)), min(info.max, 2**31 - 1)
    return jnp.clip(index, jnp.asarray(low, index.dtype), jnp.asarray(high, index.dtype)).astype(jnp.int32)


@rule("gather", local=_gather_local)
def _gather(op: Op) -> Sequence[Row]:
    numbers, mode = op.params["dimension_numbers"], _MODE.from_any(op.params["mode"])
    params = op.params | {"slice_sizes": _localised_sizes(op)}
    rows = split_rows(op, gather_factors(params, op.ins[0].shape, len(op.ins[1].shape), len(op.outs[0].shape)))
    monoids = admissible(op.outs[0].dtype)
    if monoids and mode != _MODE.ONE_HOT:
        joined = Unreduced("sum" if "sum" in monoids else "or")
        rows += [Row((Split(d), B), (joined,), kernel="masked_gather") for d in _looked_up(numbers) if op.ins[0].shape[d] > 1]
    for row in moved_rows(op, (0,)):
        if mode != _MODE.FILL_OR_DROP or _fill_is_joined(op, row.ins[0]):
            rows.append(row)
    return rows


def _fill_is_joined(op: Op, atom: Any) -> bool:
    """Whether joining the fill values of all parts gives the fill value: always for idempotent monoids, for a sum when it is 0 or NaN."""
    fill = op.params["fill_value"]
    match atom.monoid:
        case "max" | "min" | "and" | "or":
            return True
        case "sum":
            return fill == 0 if fill is not None else jnp.issubdtype(op.outs[0].dtype, jnp.inexact)
        case _:
            return fill in (0, 1) if fill is not None else jnp.issubdtype(op.outs[0].dtype, jnp.inexact)


def _localised_sizes(op: Op) -> tuple[int, ...]:
    """Slice sizes on shapes that outer mesh axes have localised: a result's window dims tell them."""
    numbers = op.params["dimension_numbers"]
    sizes = list(op.params["slice_sizes"])
    window = [d for d in range(len(sizes)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for d, o in zip(window, numbers.offset_dims, strict=True):
        sizes[d] = op.outs[0].shape[o]
    return tuple(sizes)


def scatter_factors(params: dict[str, Any], operand: Sequence[int], indices_rank: int, updates: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """Factors of a scatter's operand, indices and updates."""
    numbers = params["dimension_numbers"]
    on_operand: list[str | None] = [None] * len(operand)
    on_indices: list[str | None] = [f"i{d}" for d in range(indices_rank - 1)] + [None]
    on_updates: list[str | None] = [None] * len(updates)
    for n, (d, i) in enumerate(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)):
        on_operand[d] = on_indices[i] = f"b{n}"
    for d, u in zip(_scatter_window(numbers, len(operand)), numbers.update_window_dims, strict=True):
        if updates[u] == operand[d] and d not in numbers.scatter_dims_to_operand_dims:
            on_operand[d] = on_updates[u] = f"w{d}"
    batch = iter(on_indices[:-1])
    for u in range(len(updates)):
        if u not in numbers.update_window_dims:
            on_updates[u] = next(batch)
    return tuple(on_operand), tuple(on_indices), tuple(on_updates)


def _scatter_window(numbers: Any, rank: int) -> list[int]:
    return [d for d in range(rank) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]


def _hit(numbers: Any) -> list[int]:
    """Operand dims of a scatter that an index picks one element of."""
    return [int(d) for d in numbers.inserted_window_dims if d in numbers.scatter_dims_to_operand_dims]


def _scatter_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The scatter on the shard; where a dim that indices hit is split, indices are shifted and foreign ones dropped."""
    operand, indices, updates = args
    numbers, mode = ctx.params["dimension_numbers"], _MODE.from_any(ctx.params["mode"])
    monoid = _SCATTER_MONOID.get(ctx.primitive.name)
    batch = [u for u in range(updates.ndim) if u not in numbers.update_window_dims]
    if monoid is not None:
        updates = without_padding(ctx, 2, updates, tuple(batch), monoid)
    split = [d for d in _hit(numbers) if ctx.global_ins[0].shape[d] != ctx.local_ins[0][d]]
    changes: dict[str, Any] = {}
    if split or tuple(indices.shape) != tuple(ctx.global_ins[1].shape):
        changes = {"indices_are_sorted": False, "unique_indices": False}  # padding and dropped indices are neither
    if split:
        window = dict(zip(_scatter_window(numbers, operand.ndim), (updates.shape[u] for u in numbers.update_window_dims), strict=True))
        components = []
        for c, d in enumerate(numbers.scatter_dims_to_operand_dims):
            whole = ctx.global_ins[0].shape[d]
            index = _as_int32(indices[..., c])
            if mode == _MODE.CLIP:
                index = jnp.clip(index, 0, whole - window.get(d, 1))
            if d in split:
                local = ctx.local_ins[0][d]
                here = index - ctx.in_offset(0, d)
                index = jnp.where((index >= 0) & (index < whole) & (here >= 0) & (here < local), here, local)
            components.append(index)
        indices = jnp.stack(components, -1)
        changes["mode"] = _MODE.FILL_OR_DROP
    return bind_with(ctx, (operand, indices, updates), **changes)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", local=_scatter_local)
def _scatter(op: Op) -> Sequence[Row]:
    """Splitting the updates leaves partials of the scatter's monoid, to which a partial operand is added."""
    numbers = op.params["dimension_numbers"]
    operand, indices, updates = scatter_factors(op.params, op.ins[0].shape, len(op.ins[1].shape), op.ins[2].shape)
    monoid = _SCATTER_MONOID.get(op.name)
    if monoid not in admissible(op.outs[0].dtype):
        monoid = None
    m = FactorMap(ins=(operand, indices, updates), outs=(operand,), contract=monoid, accumulate=(0,), masks_padding=True)
    rows = split_rows(op, m)
    rows += [Row((Split(d), B, B), (Split(d),), kernel="shifted_scatter") for d in _hit(numbers) if op.ins[0].shape[d] > 1]
    match op.name:
        case "scatter-add" | "scatter-sub":
            rows += linear_rows(op, (0, 2)) if monoid else []
        case "scatter" if _once(op):
            rows += moved_rows(op, (0, 2))
        case _ if monoid is not None:
            rows.append(Row((Unreduced(monoid), B, Unreduced(monoid)), (Unreduced(monoid),)))
        case _:
            pass
    return rows


def _once(op: Op) -> bool:
    """Whether no element is written twice: which write wins is open, and parts in which different ones won do not belong together."""
    return bool(op.params["unique_indices"]) or all(size == 1 for size in op.ins[1].shape[:-1])
