"""Primitives that rearrange whole dims. They keep every partial operand, and each dim splits that
has the same size on both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import FactorMap, dim_factors, monoid_rows, moved_rows, split_rows
from sbp.signatures.families.shifting import halo_rows, split_dim
from sbp.signatures.kernels.halo import Exchange, Exchanges, exchanges
from sbp.signatures.kernels.pieces import Pieces, fetch_pieces
from sbp.signatures.kernels.shards import picked_along
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Traits
from sbp.trace.join_slices import Piece, joined
from sbp.types import Split

# ---- joins --------------------------------------------------------------------------------------
# `concatenate`, and `join_slices`: slices of arrays, one after the other, such as `jnp.roll`.
# Along a split dim each element goes to the device that needs it, once.


def _pieces(params: dict[str, Any], ins: Sequence[Any]) -> tuple[Piece, ...]:
    """The slices of the operands in the order of the result; a concatenation has all of each.

    Arguments:
      params: parameters of the equation.
      ins: avals of the operands.
    """
    whole = ((k, 0, a.shape[params["dimension"]]) for k, a in enumerate(ins) if a.shape)
    return params["pieces"] if "pieces" in params else tuple(whole)


def _needs(params: dict[str, Any], ins: Sequence[Any], n: int) -> list[Pieces]:
    """For each operand, the pieces of it that the result has.

    Arguments:
      params: parameters of the equation.
      ins: avals of the operands.
      n: number of devices along the mesh axis.
    """
    parts: list[list[tuple[int, int, int]]] = [[] for _ in ins]
    at = 0
    for operand, start, size in _pieces(params, ins):
        parts[operand].append((at, start, size))
        at += size
    sizes = [a.shape[params["dimension"]] if a.shape else 0 for a in ins]
    return [Pieces(size, at, n, tuple(p)) for size, p in zip(sizes, parts, strict=True)]


def _is_in_place(params: dict[str, Any], ins: Sequence[Any], out: Any) -> bool:
    """Whether all arrays are as long as the result, and each slice of an array is in the result
    where the array has it.

    Arguments:
      params: parameters of the equation.
      ins: avals of the operands.
      out: aval of the result.
    """
    d = params["dimension"]
    if any(a.shape and a.shape[d] != out.shape[d] for a in ins):
        return False
    parts = zip(ins, _needs(params, ins, 1), strict=True)
    return all(at == start for a, need in parts if a.shape for at, start, _ in need.parts)


def _join_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Joins slices of shards. Along a split dim, takes elements of split operands from their places
    if the result has them there, and fetches them otherwise, and picks those of other operands."""
    d = ctx.params["dimension"]
    axes = next((a for k, x in enumerate(args) if x.ndim and (a := ctx.in_axes(k, d))), ())
    if not axes:
        return [joined(*args, dimension=d, pieces=_pieces(ctx.params, ctx.global_ins))]
    stays = _is_in_place(ctx.params, ctx.global_ins, ctx.global_outs[0])
    needs = _needs(ctx.params, ctx.global_ins, axes[0][1])
    out: Any = next(x for x in args if x.ndim) if stays else None
    rest = []
    for k, (x, need) in enumerate(zip(args, needs, strict=True)):
        if x.ndim and ctx.in_axes(k, d) and not stays:
            ((axis, _),) = axes
            out = fetch_pieces(ctx, x, d, axis, need, out)
        elif x is not out:
            rest.append((x, need))
    shape = ctx.local_outs[0]
    place = lax.iota(jnp.int32, shape[d]) + ctx.out_offset(0, d)
    for x, need in rest:
        for at, start, size in need.parts:
            picked = x if stays or not x.ndim else picked_along(x, place - at + start, d)
            inside = lax.broadcast_in_dim((place >= at) & (place < at + size), shape, (d,))
            out = jnp.where(inside, picked, out)
    return [out]


@exchanges("concatenate", "join_slices")
def _exchanges(op: Op, row: Row) -> Exchanges:
    """One exchange for each operand that is split."""
    d = split_dim(row)
    return [
        Exchange(k, (d,), need, need.width)
        for k, (need, atom) in enumerate(
            zip(_needs(op.params, op.ins, op.axis_size), row.ins, strict=True)
        )
        if atom == Split(d)
    ]


_MOVES = Traits(moves=True, scales="together")


@rule("concatenate", "join_slices", traits=_MOVES, local=_join_local)
def _joining(op: Op) -> Sequence[Row]:
    """Other dims split; the dim of the result along which the operands lie splits with an
    exchange, or without one where each element stays in its place."""
    axis = int(op.params["dimension"])
    dims = dim_factors(len(op.outs[0].shape), [axis])
    ins = tuple(dims if a.shape else () for a in op.ins)
    along = halo_rows(op, [axis])
    if _is_in_place(op.params, op.ins, op.outs[0]):
        along = [replace(row, kernel="aligned") for row in along]
    return [*split_rows(op, FactorMap(ins=ins, outs=(dims,))), *moved_rows(op), *along]


# ---- structure ----------------------------------------------------------------------------------


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
