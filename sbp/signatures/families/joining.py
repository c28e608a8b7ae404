"""`concatenate`, and `join_slices`: slices of arrays, one after the other, such as `jnp.roll`.
Along a split dim each element goes to the device that needs it, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import FactorMap, dim_factors, moved_rows, split_rows
from sbp.signatures.families.shifting import halo_rows, split_dim
from sbp.signatures.kernels.exchange import Need, fetch
from sbp.signatures.kernels.halo import Exchange, Exchanges, exchanges
from sbp.signatures.kernels.pieces import Pieces, fetch_pieces
from sbp.signatures.kernels.shards import picked_along
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Traits
from sbp.trace.joins import joined
from sbp.types import Split

# ---- concatenate --------------------------------------------------------------------------------


def _joined(sizes: Sequence[int], n: int) -> list[Need]:
    """For each operand, the range of it that each device needs."""
    chunk = -(-sum(sizes) // n)
    needs, before = [], 0
    for size in sizes:
        needs.append(Need(size, -(-size // n), tuple(chunk * i - before for i in range(n)), chunk))
        before += size
    return needs


def _concatenate_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Fetches the range of each operand that may lie in the shard of the result, and selects
    between them."""
    d = ctx.params["dimension"]
    axes = next((ctx.in_axes(k, d) for k in range(len(args)) if ctx.in_axes(k, d)), ())
    if not axes:
        return bind_with(ctx, args)
    ((axis, n),) = axes
    needs = _joined([a.shape[d] for a in ctx.global_ins], n)
    shape = ctx.local_outs[0]
    index = lax.broadcasted_iota(jnp.int32, shape, d) + ctx.out_offset(0, d)
    out, before = None, 0
    for k, (x, need) in enumerate(zip(args, needs, strict=True)):
        if ctx.in_axes(k, d):
            piece = fetch(ctx, x, d, axis, need, None)
        else:
            piece = picked_along(
                x, lax.iota(jnp.int32, shape[d]) + ctx.out_offset(0, d) - before, d
            )
        out = piece if out is None else jnp.where(index >= before, piece, out)
        before += need.size
    return [out]


# ---- slices, one after the other ----------------------------------------------------------------


def _needs(params: dict[str, Any], sizes: Sequence[int], n: int) -> list[Pieces]:
    """For each operand, the pieces of it that the result has.

    Arguments:
      params: parameters of the join.
      sizes: sizes of the operands along the dim; 0 for scalars.
      n: number of devices along the mesh axis.
    """
    parts: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
    at = 0
    for operand, start, size in params["pieces"]:
        parts[operand].append((at, start, size))
        at += size
    return [Pieces(size, at, n, tuple(p)) for size, p in zip(sizes, parts, strict=True)]


def _sizes(avals: Sequence[Any], dim: int) -> list[int]:
    """Sizes of the operands along a dim; 0 for scalars."""
    return [a.shape[dim] if a.shape else 0 for a in avals]


def _is_in_place(params: dict[str, Any], ins: Sequence[Any], out: Any) -> bool:
    """Whether each slice of an array is in the result where the array has it.

    Arguments:
      params: parameters of the join.
      ins: avals of the operands.
      out: aval of the result.
    """
    d, at = params["dimension"], 0
    for operand, start, size in params["pieces"]:
        shape = ins[operand].shape
        if shape and (start != at or shape[d] != out.shape[d]):
            return False
        at += size
    return True


def _join_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Joins slices of shards; along a split dim, fetches the pieces of split operands and picks
    those of the others."""
    d = ctx.params["dimension"]
    axes = next((a for k, x in enumerate(args) if x.ndim and (a := ctx.in_axes(k, d))), ())
    if not axes:
        return [joined(*args, dimension=d, pieces=ctx.params["pieces"])]
    needs = _needs(ctx.params, _sizes(ctx.global_ins, d), axes[0][1])
    out: Any = None
    shape = ctx.local_outs[0]
    is_split = [bool(x.ndim and ctx.in_axes(k, d)) for k, x in enumerate(args)]
    in_place = _is_in_place(ctx.params, ctx.global_ins, ctx.global_outs[0])
    for x, need, here in zip(args, needs, is_split, strict=True):
        if here and in_place:
            out = x
        elif here:
            ((axis, _),) = axes
            out = fetch_pieces(ctx, x, d, axis, need, out)
    place = lax.iota(jnp.int32, shape[d]) + ctx.out_offset(0, d)
    for x, need, here in zip(args, needs, is_split, strict=True):
        for at, start, size in () if here and not in_place else need.parts:
            picked = x if here or not x.ndim else picked_along(x, place - at + start, d)
            inside = lax.broadcast_in_dim((place >= at) & (place < at + size), shape, (d,))
            out = jnp.where(inside, picked, out)
    return [out]


# ---- rows ---------------------------------------------------------------------------------------


@exchanges("concatenate", "join_slices")
def _exchanges(op: Op, row: Row) -> Exchanges:
    """One exchange for each operand that is split."""
    d = split_dim(row)
    sizes = _sizes(op.ins, d)
    joins = op.name == "join_slices"
    needs = _needs(op.params, sizes, op.axis_size) if joins else _joined(sizes, op.axis_size)
    return [
        Exchange(k, (d,), need, need.width)
        for k, (need, atom) in enumerate(zip(needs, row.ins, strict=True))
        if atom == Split(d)
    ]


_MOVES = Traits(moves=True, scales="together")


@rule("concatenate", traits=_MOVES, local=_concatenate_local)
@rule("join_slices", traits=_MOVES, local=_join_local)
def _joining(op: Op) -> Sequence[Row]:
    """Other dims split; the dim of the result along which the operands lie splits with an
    exchange, or without one where each element stays in its place."""
    axis = int(op.params["dimension"])
    dims = dim_factors(len(op.outs[0].shape), [axis])
    ins = tuple(dims if a.shape else () for a in op.ins)
    stays = op.name == "join_slices" and _is_in_place(op.params, op.ins, op.outs[0])
    along = halo_rows(op, [axis])
    return [
        *split_rows(op, FactorMap(ins=ins, outs=(dims,))),
        *moved_rows(op),
        *(replace(row, kernel="aligned") if stays else row for row in along),
    ]
