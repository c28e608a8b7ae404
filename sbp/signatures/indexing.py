"""gather and the scatters: batch dims of the indices and whole slices split; linear in what is moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from sbp.signatures.factors import Dims, FactorMap, linear_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule


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


def _whole_slices(op_shape: Sequence[int], params: dict[str, Any]) -> list[bool]:
    return [size == whole for size, whole in zip(params["slice_sizes"], op_shape, strict=True)]


def _gather_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    whole = _whole_slices(ctx.global_ins[0].shape, ctx.params)
    sizes = tuple(
        min(local, size) if full else size
        for full, local, size in zip(whole, ctx.local_ins[0], ctx.params["slice_sizes"], strict=True)
    )
    return bind_with(ctx, args, slice_sizes=sizes)


@rule("gather", local=_gather_local)
def _gather(op: Op) -> Sequence[Row]:
    params = op.params | {"slice_sizes": _localised_sizes(op)}
    m = gather_factors(params, op.ins[0].shape, len(op.ins[1].shape), len(op.outs[0].shape))
    rows = split_rows(op, m)
    fills = op.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    fill = op.params["fill_value"]
    # A fill value that is added once on every part is right only when it is 0 or NaN.
    if not fills or fill == 0 or (fill is None and np.issubdtype(op.outs[0].dtype, np.inexact)):
        rows += linear_rows(op, (0,)) if op.outs[0].dtype != np.bool_ else []
    return rows


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
    window = [d for d in range(len(operand)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    for d, u in zip(window, numbers.update_window_dims, strict=True):
        if updates[u] == operand[d] and d not in numbers.scatter_dims_to_operand_dims:
            on_operand[d] = on_updates[u] = f"w{d}"
    batch = iter(on_indices[:-1])
    for u in range(len(updates)):
        if u not in numbers.update_window_dims:
            on_updates[u] = next(batch)
    return tuple(on_operand), tuple(on_indices), tuple(on_updates)


def _same(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, args)


@rule("scatter-add", "scatter_add", local=_same)
def _scatter_add(op: Op) -> Sequence[Row]:
    """Splitting the updates leaves partial sums, to which a partial operand is added."""
    operand, indices, updates = scatter_factors(op.params, op.ins[0].shape, len(op.ins[1].shape), op.ins[2].shape)
    m = FactorMap(ins=(operand, indices, updates), outs=(operand,), contract="sum", accumulate=(0,))
    return [*split_rows(op, m), *(linear_rows(op, (0, 2)) if op.outs[0].dtype != np.bool_ else [])]


@rule("scatter", "scatter-mul", "scatter-min", "scatter-max", "scatter_mul", "scatter_min", "scatter_max", local=_same)
def _scatter(op: Op) -> Sequence[Row]:
    operand, indices, updates = scatter_factors(op.params, op.ins[0].shape, len(op.ins[1].shape), op.ins[2].shape)
    kept = tuple(f if f is None or f[0] != "i" else None for f in updates)
    fixed = tuple(f if f is None or f[0] != "i" else None for f in indices)
    rows = split_rows(op, FactorMap(ins=(operand, fixed, kept), outs=(operand,)))
    return [*rows, *(linear_rows(op, (0, 2)) if op.name == "scatter" and op.outs[0].dtype != np.bool_ else [])]
