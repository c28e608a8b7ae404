"""Primitives that move elements without computing: they carry every partial, and each dim that keeps its extent splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import Dims, FactorMap, moved_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule


def _dims(rank: int) -> Dims:
    return tuple(f"d{i}" for i in range(rank))


def _same(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, args)


@rule("transpose", local=_same)
def _transpose(op: Op) -> Sequence[Row]:
    dims = _dims(len(op.ins[0].shape))
    out = tuple(dims[i] for i in op.params["permutation"])
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *moved_rows(op)]


@rule("broadcast_in_dim", local=lambda ctx, args: bind_with(ctx, args[:1], shape=ctx.local_outs[0]))
def _broadcast_in_dim(op: Op) -> Sequence[Row]:
    """Dims that the operand lacks, or has with size 1, split freely: every part is the same."""
    out: list[str | None] = [f"new{i}" for i in range(len(op.outs[0].shape))]
    dims: list[str | None] = [None] * len(op.ins[0].shape)
    for i, j in enumerate(op.params["broadcast_dimensions"]):
        if op.ins[0].shape[i] == op.outs[0].shape[j]:
            dims[i] = out[j] = f"d{i}"
    return [*split_rows(op, FactorMap(ins=(tuple(dims),), outs=(tuple(out),))), *moved_rows(op)]


@rule("squeeze", local=_same)
def _squeeze(op: Op) -> Sequence[Row]:
    gone = {d % len(op.ins[0].shape) for d in op.params["dimensions"]}
    dims = tuple(None if i in gone else f"d{i}" for i in range(len(op.ins[0].shape)))
    out = tuple(d for i, d in enumerate(dims) if i not in gone)
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *moved_rows(op)]


def reshape_groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest common grouping of dims of a reshape: each pair of dim lists holds the same number of elements.

    >>> reshape_groups((6, 4), (2, 3, 4))
    [([0], [0, 1]), ([1], [2])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [], []
        a = b = 1
        if i < len(source):
            left, a, i = [i], source[i], i + 1
        if j < len(target):
            right, b, j = [j], target[j], j + 1
        while a != b:
            if a < b and i < len(source):
                left.append(i)
                a, i = a * source[i], i + 1
            elif b < a and j < len(target):
                right.append(j)
                b, j = b * target[j], j + 1
            else:
                return groups
        groups.append((left, right))
    return groups


@rule("reshape", local=lambda ctx, args: bind_with(ctx, args[:1], new_sizes=ctx.local_outs[0], dimensions=None))
def _reshape(op: Op) -> Sequence[Row]:
    """The leading dim of each group of dims splits when the axis divides it on both sides; a dim that is kept splits anyhow."""
    source, target = op.ins[0].shape, op.outs[0].shape
    dims: list[str | None] = [None] * len(source)
    out: list[str | None] = [None] * len(target)
    if op.params.get("dimensions") is None and 0 not in source:
        for left, right in reshape_groups(source, target):
            lead = [d for d in left if source[d] > 1][:1]
            lead_out = [d for d in right if target[d] > 1][:1]
            if not lead or not lead_out:
                continue
            a, b = source[lead[0]], target[lead_out[0]]
            if (op.divides(a) and op.divides(b)) or (a == b and a == math.prod(source[d] for d in left)):
                dims[lead[0]] = out[lead_out[0]] = f"g{lead[0]}"
    return [*split_rows(op, FactorMap(ins=(tuple(dims),), outs=(tuple(out),))), *moved_rows(op)]


@rule("concatenate", local=_same)
def _concatenate(op: Op) -> Sequence[Row]:
    dims = tuple(None if i == op.params["dimension"] else f"d{i}" for i in range(len(op.outs[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,) * len(op.ins), outs=(dims,))), *moved_rows(op)]


@rule("pad", local=_same)
def _pad(op: Op) -> Sequence[Row]:
    """Operand and padding value together: a partial operand wants a partial value, so `pad(P, 1.0)` adds 1 once."""
    dims = tuple(f"d{i}" if tuple(c) == (0, 0, 0) else None for i, c in enumerate(op.params["padding_config"]))
    return [*split_rows(op, FactorMap(ins=(dims, ()), outs=(dims,))), *moved_rows(op)]


@rule("rev", local=_same)
def _rev(op: Op) -> Sequence[Row]:
    dims = tuple(None if i in op.params["dimensions"] else f"d{i}" for i in range(len(op.ins[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *moved_rows(op)]


def _slice_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    start, limit = ctx.params["start_indices"], list(ctx.params["limit_indices"])
    for d, (whole, local) in enumerate(zip(ctx.global_ins[0].shape, ctx.local_ins[0], strict=True)):
        if whole != local:
            limit[d] = local
    return bind_with(ctx, args, start_indices=start, limit_indices=tuple(limit))


@rule("slice", local=_slice_local)
def _slice(op: Op) -> Sequence[Row]:
    start, strides = op.params["start_indices"], op.params["strides"] or (1,) * len(op.ins[0].shape)
    whole = [s == 0 and t == 1 and a == b for s, t, a, b in zip(start, strides, op.ins[0].shape, op.outs[0].shape, strict=True)]
    dims = tuple(f"d{i}" if w else None for i, w in enumerate(whole))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *moved_rows(op)]


@rule("split", local=_same)
def _split(op: Op) -> Sequence[Row]:
    dims = tuple(None if i == op.params["axis"] else f"d{i}" for i in range(len(op.ins[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,) * len(op.outs))), *moved_rows(op)]


@rule("stack", local=_same)
def _stack(op: Op) -> Sequence[Row]:
    dims = list(_dims(len(op.ins[0].shape)))
    out = [*dims[: op.params["axis"]], None, *dims[op.params["axis"] :]]
    return [*split_rows(op, FactorMap(ins=(tuple(dims),) * len(op.ins), outs=(tuple(out),))), *moved_rows(op)]


@rule("unstack", local=_same)
def _unstack(op: Op) -> Sequence[Row]:
    dims = tuple(None if i == op.params["axis"] else f"d{i}" for i in range(len(op.ins[0].shape)))
    out = tuple(d for d in dims if d is not None)
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,) * len(op.outs))), *moved_rows(op)]


@rule("tile", local=_same)
def _tile(op: Op) -> Sequence[Row]:
    dims = tuple(f"d{i}" if times == 1 else None for i, times in enumerate(op.params["reps"]))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *moved_rows(op)]


@rule("bitcast_convert_type", local=_same)
def _bitcast_convert_type(op: Op) -> Sequence[Row]:
    """Dims split, except the last one of the side with the narrower dtype, which holds the pieces of one element."""
    rank = min(len(op.ins[0].shape), len(op.outs[0].shape))
    ins, out = (tuple(f"d{i}" if i < rank else None for i in range(len(a.shape))) for a in (op.ins[0], op.outs[0]))
    return split_rows(op, FactorMap(ins=(ins,), outs=(out,)))


@rule("dynamic_slice", local=lambda ctx, args: bind_with(ctx, args, slice_sizes=ctx.local_outs[0]))
def _dynamic_slice(op: Op) -> Sequence[Row]:
    dims = tuple(f"d{i}" if a == b else None for i, (a, b) in enumerate(zip(op.ins[0].shape, op.outs[0].shape, strict=True)))
    starts = ((),) * (len(op.ins) - 1)
    return [*split_rows(op, FactorMap(ins=(dims, *starts), outs=(dims,))), *moved_rows(op, (0,))]


@rule("dynamic_update_slice", local=_same)
def _dynamic_update_slice(op: Op) -> Sequence[Row]:
    dims = tuple(f"d{i}" if a == b else None for i, (a, b) in enumerate(zip(op.ins[0].shape, op.ins[1].shape, strict=True)))
    starts = ((),) * (len(op.ins) - 2)
    return [*split_rows(op, FactorMap(ins=(dims, dims, *starts), outs=(dims,))), *moved_rows(op, (0, 1))]


def _iota_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Counted in int32 and cast once: in bfloat16 a rounded offset plus a rounded index is not the rounded sum."""
    dim, shape = ctx.params["dimension"], ctx.local_outs[0]
    if shape[dim] == ctx.global_outs[0].shape[dim]:
        return bind_with(ctx, (), shape=shape)
    return [lax.convert_element_type(lax.broadcasted_iota(jnp.int32, shape, dim) + ctx.out_offset(0, dim), ctx.params["dtype"])]


@rule("iota", local=_iota_local)
def _iota(op: Op) -> Sequence[Row]:
    return split_rows(op, FactorMap(ins=((),) * len(op.ins), outs=(_dims(len(op.outs[0].shape)),)))


@rule("empty", local=lambda ctx, args: bind_with(ctx, args, shape=ctx.local_outs[0]))
def _empty(op: Op) -> Sequence[Row]:
    """Zeros where JAX is without an uninitialised buffer, anything where it has one: of any type."""
    return split_rows(op, FactorMap(ins=((),) * len(op.ins), outs=(_dims(len(op.outs[0].shape)),)))
