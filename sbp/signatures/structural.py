"""Primitives that move elements without computing: all linear, and each dim that keeps its extent splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.factors import Dims, FactorMap, linear_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule


def _moved(op: Op, positions: Sequence[int] | None = None) -> list[Row]:
    """Partial rows of a primitive that only moves elements: linear, except on booleans and keys."""
    if any(_jax.is_extended(a.dtype) or a.dtype == np.bool_ for a in op.outs):
        return []
    return linear_rows(op, positions)


def _dims(rank: int) -> Dims:
    return tuple(f"d{i}" for i in range(rank))


def _same(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, args)


@rule("transpose", local=_same)
def _transpose(op: Op) -> Sequence[Row]:
    dims = _dims(len(op.ins[0].shape))
    out = tuple(dims[i] for i in op.params["permutation"])
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *_moved(op)]


@rule("broadcast_in_dim", local=lambda ctx, args: bind_with(ctx, args[:1], shape=ctx.local_outs[0]))
def _broadcast_in_dim(op: Op) -> Sequence[Row]:
    """Dims that the operand lacks, or has with size 1, split freely: every part is the same."""
    out: list[str | None] = [f"new{i}" for i in range(len(op.outs[0].shape))]
    dims: list[str | None] = [None] * len(op.ins[0].shape)
    for i, j in enumerate(op.params["broadcast_dimensions"]):
        if op.ins[0].shape[i] == op.outs[0].shape[j]:
            dims[i] = out[j] = f"d{i}"
    return [*split_rows(op, FactorMap(ins=(tuple(dims),), outs=(tuple(out),))), *_moved(op)]


@rule("squeeze", local=_same)
def _squeeze(op: Op) -> Sequence[Row]:
    gone = {d % len(op.ins[0].shape) for d in op.params["dimensions"]}
    dims = tuple(None if i in gone else f"d{i}" for i in range(len(op.ins[0].shape)))
    out = tuple(d for i, d in enumerate(dims) if i not in gone)
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *_moved(op)]


@rule("expand_dims", local=_same)
def _expand_dims(op: Op) -> Sequence[Row]:
    new = {d % len(op.outs[0].shape) for d in op.params["dimensions"]}
    dims = _dims(len(op.ins[0].shape))
    rest = iter(dims)
    out = tuple(None if i in new else next(rest) for i in range(len(op.outs[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *_moved(op)]


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
    return [*split_rows(op, FactorMap(ins=(tuple(dims),), outs=(tuple(out),))), *_moved(op)]


@rule("concatenate", local=_same)
def _concatenate(op: Op) -> Sequence[Row]:
    dims = tuple(None if i == op.params["dimension"] else f"d{i}" for i in range(len(op.outs[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,) * len(op.ins), outs=(dims,))), *_moved(op)]


@rule("pad", local=_same)
def _pad(op: Op) -> Sequence[Row]:
    """Linear in operand and padding value together: a partial operand wants a partial value, so `pad(P, 1.0)` adds 1 once."""
    dims = tuple(f"d{i}" if tuple(c) == (0, 0, 0) else None for i, c in enumerate(op.params["padding_config"]))
    return [*split_rows(op, FactorMap(ins=(dims, ()), outs=(dims,))), *_moved(op)]


@rule("rev", local=_same)
def _rev(op: Op) -> Sequence[Row]:
    dims = tuple(None if i in op.params["dimensions"] else f"d{i}" for i in range(len(op.ins[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *_moved(op)]


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
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *_moved(op)]


@rule("split", local=_same)
def _split(op: Op) -> Sequence[Row]:
    dims = tuple(None if i == op.params["axis"] else f"d{i}" for i in range(len(op.ins[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,) * len(op.outs))), *_moved(op)]


@rule("dynamic_slice", local=lambda ctx, args: bind_with(ctx, args, slice_sizes=ctx.local_outs[0]))
def _dynamic_slice(op: Op) -> Sequence[Row]:
    dims = tuple(f"d{i}" if a == b else None for i, (a, b) in enumerate(zip(op.ins[0].shape, op.outs[0].shape, strict=True)))
    starts = ((),) * (len(op.ins) - 1)
    return [*split_rows(op, FactorMap(ins=(dims, *starts), outs=(dims,))), *_moved(op, (0,))]


@rule("dynamic_update_slice", local=_same)
def _dynamic_update_slice(op: Op) -> Sequence[Row]:
    dims = tuple(f"d{i}" if a == b else None for i, (a, b) in enumerate(zip(op.ins[0].shape, op.ins[1].shape, strict=True)))
    starts = ((),) * (len(op.ins) - 2)
    return [*split_rows(op, FactorMap(ins=(dims, dims, *starts), outs=(dims,))), *_moved(op, (0, 1))]


def _iota_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    dim = ctx.params["dimension"]
    (local,) = bind_with(ctx, (), shape=ctx.local_outs[0])
    offset = ctx.out_offset(0, dim)
    return [local if isinstance(offset, int) and offset == 0 else local + lax.convert_element_type(offset, local.dtype)]


@rule("iota", local=_iota_local)
def _iota(op: Op) -> Sequence[Row]:
    return split_rows(op, FactorMap(ins=((),) * len(op.ins), outs=(_dims(len(op.outs[0].shape)),)))


@rule("empty", "full_like", local=lambda ctx, args: bind_with(ctx, args, shape=ctx.local_outs[0]))
def _empty(op: Op) -> Sequence[Row]:
    return split_rows(op, FactorMap(ins=((),) * len(op.ins), outs=(_dims(len(op.outs[0].shape)),)))
