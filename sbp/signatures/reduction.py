"""Reductions, cumulative operators, sorting: the reduced dim contracts, the others split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sbp.signatures.factors import FactorMap, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.types import Unreduced

_MONOID = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod", "reduce_and": "and", "reduce_or": "or"}


def _local(ctx: LocalContext, args: Sequence[object]) -> list[object]:
    return bind_with(ctx, args)


def _letters(rank: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(rank))


@rule(*_MONOID, local=_local)
def _reduce(op: Op) -> Sequence[Row]:
    dims = _letters(len(op.ins[0].shape))
    kept = tuple(d for i, d in enumerate(dims) if i not in op.params["axes"])
    monoid: str | None = _MONOID[op.name]
    if np.issubdtype(op.ins[0].dtype, np.complexfloating) and monoid in ("max", "min"):
        monoid = None
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(kept,), contract=monoid))
    # A reduction commutes with its own monoid: the sum of partial sums, the maximum of partial maxima.
    return [*rows, *([Row((Unreduced(monoid),), (Unreduced(monoid),))] if monoid else [])]


@rule("reduce_xor", "argmax", "argmin", local=_local)
def _reduce_whole(op: Op) -> Sequence[Row]:
    dims = _letters(len(op.ins[0].shape))
    kept = tuple(d for i, d in enumerate(dims) if i not in op.params["axes"])
    masked = tuple(d if d in kept else None for d in dims)
    return split_rows(op, FactorMap(ins=(masked,), outs=(kept,)))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", local=_local)
def _cumulative(op: Op) -> Sequence[Row]:
    dims = tuple(None if i == op.params["axis"] else f"d{i}" for i in range(len(op.ins[0].shape)))
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(dims,)))
    monoid = {"cumsum": "sum", "cummax": "max", "cummin": "min", "cumprod": "prod"}.get(op.name)
    return [*rows, *([Row((Unreduced(monoid),), (Unreduced(monoid),))] if monoid else [])]


@rule("sort", local=_local)
def _sort(op: Op) -> Sequence[Row]:
    dims = tuple(None if i == op.params["dimension"] else f"d{i}" for i in range(len(op.ins[0].shape)))
    return split_rows(op, FactorMap(ins=(dims,) * len(op.ins), outs=(dims,) * len(op.outs)))


@rule("top_k", local=_local)
def _top_k(op: Op) -> Sequence[Row]:
    rank = len(op.ins[0].shape)
    axis = op.params.get("axis", rank - 1) % rank
    dims = tuple(None if i == axis else f"d{i}" for i in range(rank))
    return split_rows(op, FactorMap(ins=(dims,), outs=(dims,) * len(op.outs)))
