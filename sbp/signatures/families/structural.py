"""Primitives that rearrange whole dims. They keep every partial operand, and each dim splits that
has the same size on both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import FactorMap, dim_factors, monoid_rows, moved_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Traits

_ARRANGES = Traits(
    moves=True,
    carries="arranged",
    pointwise=True,
    scales="together",
    fusion="inlined",
    unnamed=True,
    adapts=True,
)
"""Traits of operators that JAX inserts to give an operand the shape of its reader."""


@rule(
    "transpose",
    traits=dataclasses.replace(_ARRANGES, fusion="free", adapts=False),
    local=bind_with,
)
def _transpose(op: Op) -> Sequence[Row]:
    dims = dim_factors(len(op.ins[0].shape))
    out = tuple(dims[i] for i in op.params["permutation"])
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *moved_rows(op)]


@rule(
    "broadcast_in_dim",
    traits=_ARRANGES,
    local=lambda ctx, args: bind_with(ctx, args[:1], shape=ctx.local_outs[0]),
)
def _broadcast_in_dim(op: Op) -> Sequence[Row]:
    """Dims that the operand lacks, or has with size 1, split with the operand B: all parts are
    equal there."""
    out: list[str | None] = [f"new{i}" for i in range(len(op.outs[0].shape))]
    dims: list[str | None] = [None] * len(op.ins[0].shape)
    for i, j in enumerate(op.params["broadcast_dimensions"]):
        if op.ins[0].shape[i] == op.outs[0].shape[j]:
            dims[i] = out[j] = f"d{i}"
    return [*split_rows(op, FactorMap(ins=(tuple(dims),), outs=(tuple(out),))), *moved_rows(op)]


@rule(
    "squeeze",
    traits=_ARRANGES,
    local=bind_with,
)
def _squeeze(op: Op) -> Sequence[Row]:
    gone = {d % len(op.ins[0].shape) for d in op.params["dimensions"]}
    dims = dim_factors(len(op.ins[0].shape), gone)
    out = tuple(d for i, d in enumerate(dims) if i not in gone)
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *moved_rows(op)]


@rule("stack", traits=Traits(moves=True, scales="together"), local=bind_with)
def _stack(op: Op) -> Sequence[Row]:
    dims = list(dim_factors(len(op.ins[0].shape)))
    out = [*dims[: op.params["axis"]], None, *dims[op.params["axis"] :]]
    return [
        *split_rows(op, FactorMap(ins=(tuple(dims),) * len(op.ins), outs=(tuple(out),))),
        *moved_rows(op),
    ]


@rule("unstack", traits=Traits(moves=True, scales="together"), local=bind_with)
def _unstack(op: Op) -> Sequence[Row]:
    dims = dim_factors(len(op.ins[0].shape), [op.params["axis"]])
    out = tuple(d for d in dims if d is not None)
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,) * len(op.outs))), *moved_rows(op)]


@rule("tile", traits=Traits(moves=True, scales="together"), local=bind_with)
def _tile(op: Op) -> Sequence[Row]:
    dims = tuple(f"d{i}" if times == 1 else None for i, times in enumerate(op.params["reps"]))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *moved_rows(op)]


@rule("bitcast_convert_type", traits=Traits(fusion="free"), local=bind_with)
def _bitcast_convert_type(op: Op) -> Sequence[Row]:
    """Every dim splits except the one that holds the pieces of one element: the last dim of the
    side with the narrower dtype."""
    rank = min(len(op.ins[0].shape), len(op.outs[0].shape))
    ins, out = (
        tuple(f"d{i}" if i < rank else None for i in range(len(a.shape)))
        for a in (op.ins[0], op.outs[0])
    )
    rows = split_rows(op, FactorMap(ins=(ins,), outs=(out,)))
    dtypes = op.ins[0].dtype, op.outs[0].dtype
    if all(jnp.issubdtype(d, jnp.integer) for d in dtypes):
        # `and` and `or` treat each bit independently. Sums and products modulo 2**k are the same
        # for signed and unsigned integers.
        rows += monoid_rows(
            op,
            "and",
            "or",
            *(("sum", "prod") if jnp.iinfo(dtypes[0]).bits == jnp.iinfo(dtypes[1]).bits else ()),
        )
    return rows


def _iota_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Counts from the shard's offset, in int32, and casts at the end.

    In bfloat16, a rounded offset plus a rounded index is not the rounded sum.
    """
    dim, shape = ctx.params["dimension"], ctx.local_outs[0]
    if shape[dim] == ctx.global_outs[0].shape[dim]:
        return bind_with(ctx, (), shape=shape)
    return [
        lax.convert_element_type(
            lax.broadcasted_iota(jnp.int32, shape, dim) + ctx.out_offset(0, dim),
            ctx.params["dtype"],
        )
    ]


@rule("iota", traits=Traits(generates="counter", fusion="inlined"), local=_iota_local)
def _iota(op: Op) -> Sequence[Row]:
    return split_rows(
        op, FactorMap(ins=((),) * len(op.ins), outs=(dim_factors(len(op.outs[0].shape)),))
    )


@rule(
    "empty", traits=Traits(), local=lambda ctx, args: bind_with(ctx, args, shape=ctx.local_outs[0])
)
def _empty(op: Op) -> Sequence[Row]:
    """Rows for a buffer whose elements have no meaning: every dim splits."""
    return split_rows(
        op, FactorMap(ins=((),) * len(op.ins), outs=(dim_factors(len(op.outs[0].shape)),))
    )
