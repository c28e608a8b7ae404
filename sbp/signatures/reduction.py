"""Reductions, cumulative operators, windows, sorting: the reduced dim contracts, the others split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sbp.signatures.factors import Dims, FactorMap, admissible, linear_rows, monoid_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.shards import without_padding

_MONOID = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod", "reduce_and": "and", "reduce_or": "or"}


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, args)


def _dims(rank: int, whole: Callable[[int], bool] = lambda d: False) -> Dims:
    """A factor for each dim, except for those that stay whole."""
    return tuple(None if whole(i) else f"d{i}" for i in range(rank))


def _reduce_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, [without_padding(ctx, 0, args[0], tuple(ctx.params["axes"]), _MONOID[ctx.primitive.name])])


@rule(*_MONOID, local=_reduce_local)
def _reduce(op: Op) -> Sequence[Row]:
    dims = _dims(len(op.ins[0].shape))
    kept = tuple(d for i, d in enumerate(dims) if i not in op.params["axes"])
    monoid: str | None = _MONOID[op.name]
    if monoid not in admissible(op.ins[0].dtype):
        monoid = None
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(kept,), contract=monoid, masks_padding=True))
    # A reduction commutes with its own monoid: the sum of partial sums, the maximum of partial maxima.
    return [*rows, *(monoid_rows(op, monoid) if monoid else [])]


@rule("reduce_xor", "argmax", "argmin", local=_local)
def _reduce_whole(op: Op) -> Sequence[Row]:
    dims = _dims(len(op.ins[0].shape), lambda d: d in op.params["axes"])
    return split_rows(op, FactorMap(ins=(dims,), outs=(tuple(d for d in dims if d is not None),)))


@rule("reduce", local=_local)
def _reduce_by(op: Op) -> Sequence[Row]:
    """A reduction by any function, from initial values."""
    count = len(op.ins) // 2
    dims = _dims(len(op.ins[0].shape), lambda d: d in op.params["dimensions"])
    kept = tuple(d for d in dims if d is not None)
    return split_rows(op, FactorMap(ins=(dims,) * count + ((),) * count, outs=(kept,) * count))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", local=_local)
def _cumulative(op: Op) -> Sequence[Row]:
    dims = _dims(len(op.ins[0].shape), lambda d: d == op.params["axis"])
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(dims,)))
    monoid = {"cumsum": "sum", "cummax": "max", "cummin": "min", "cumprod": "prod"}.get(op.name)
    return [*rows, *(monoid_rows(op, monoid) if monoid in admissible(op.ins[0].dtype) else [])]


@rule("sort", local=_local)
def _sort(op: Op) -> Sequence[Row]:
    dims = _dims(len(op.ins[0].shape), lambda d: d == op.params["dimension"])
    return split_rows(op, FactorMap(ins=(dims,) * len(op.ins), outs=(dims,) * len(op.outs)))


@rule("top_k", local=_local)
def _top_k(op: Op) -> Sequence[Row]:
    rank = len(op.ins[0].shape)
    axis = op.params.get("axis", rank - 1) % rank
    dims = _dims(rank, lambda d: d == axis)
    return split_rows(op, FactorMap(ins=(dims,), outs=(dims,) * len(op.outs)))


@rule("approx_top_k", local=_local)
def _approx_top_k(op: Op) -> Sequence[Row]:
    axis = op.params["reduction_dimension"] % len(op.ins[0].shape)
    dims = _dims(len(op.ins[0].shape), lambda d: d == axis)
    return split_rows(op, FactorMap(ins=(dims,), outs=(dims,) * len(op.outs)))


def _slides(op: Op) -> Callable[[int], bool]:
    """Whether a window covers more than one element along a dim, or leaves some out; such a dim stays whole."""
    p = op.params
    ones = [p["window_dimensions"], p["window_strides"], p.get("base_dilation"), p.get("window_dilation")]
    return lambda d: any(o is not None and o[d] != 1 for o in ones) or tuple(p["padding"][d]) != (0, 0)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", local=_local)
def _reduce_window(op: Op) -> Sequence[Row]:
    dims = _dims(len(op.ins[0].shape), _slides(op))
    monoid = op.name.rsplit("_", 1)[-1]
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(dims,)))
    return [*rows, *(monoid_rows(op, monoid) if monoid in admissible(op.ins[0].dtype) else [])]


@rule("reduce_window", local=_local)
def _reduce_window_by(op: Op) -> Sequence[Row]:
    count = len(op.ins) // 2
    dims = _dims(len(op.ins[0].shape), _slides(op))
    return split_rows(op, FactorMap(ins=(dims,) * count + ((),) * count, outs=(dims,) * count))


@rule("select_and_scatter_add", "select_and_gather_add", local=_local)
def _select_window(op: Op) -> Sequence[Row]:
    """The two derivatives of a maximum over windows: which element counts is decided by the second operand, linear in the first."""
    dims = _dims(len(op.ins[0].shape), _slides(op))
    return [*split_rows(op, FactorMap(ins=(dims, dims), outs=(dims,))), *linear_rows(op, (0,))]
