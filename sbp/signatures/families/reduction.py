"""Reductions. Splitting a reduced dim gives a partial result; splitting another dim splits the
result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import FactorMap, admissible, dim_factors, monoid_rows, split_rows
from sbp.signatures.kernels.folds import by_jaxpr, fold
from sbp.signatures.kernels.halo import bytes_beside
from sbp.signatures.kernels.shards import filled_shards, neutral, without_padding
from sbp.signatures.rule import (
    Kernel,
    LocalContext,
    Op,
    Row,
    Sent,
    add_kernel,
    bind_with,
    names,
    rule,
)
from sbp.signatures.traits import Traits
from sbp.types import B, Split

# ---- prefixes -----------------------------------------------------------------------------------
# Cumulative operators. Along a split dim, each shard joins in the total of the shards before it.


_PREFIX_MONOIDS = {"cumsum": "sum", "cummax": "max", "cummin": "min", "cumprod": "prod"}
"""The monoid of each cumulative operator; `cumlogsumexp` has none."""
_JOIN = {
    "cumsum": lax.add,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumprod": lax.mul,
    "cumlogsumexp": jnp.logaddexp,
}
"""For each cumulative operator, the function that joins two of its results."""


def _cumulative_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Runs the operator on the shard, gathers the totals of all shards, and joins the earlier ones
    in."""
    (x,) = args
    name, dim, reverse = ctx.primitive.name, ctx.params["axis"], ctx.params["reverse"]
    axes = ctx.in_axes(0, dim)
    if not axes:
        return bind_with(ctx, args)
    monoid = _PREFIX_MONOIDS.get(
        name, "max"
    )  # cumlogsumexp starts from the logarithm of 0, as a maximum
    start = neutral(monoid, x.dtype)
    x = without_padding(ctx, 0, x, (dim,), monoid)
    (own,) = bind_with(ctx, (x,))
    total = lax.index_in_dim(own, 0 if reverse else own.shape[dim] - 1, dim)
    for axis, _ in reversed(axes):
        totals = lax.all_gather(total, axis)
        place, mine = lax.broadcasted_iota(jnp.int32, totals.shape, 0), lax.axis_index(axis)
        before = jnp.where(place > mine if reverse else place < mine, totals, start)
        own = _JOIN[name](own, _joined(ctx, before))
        total = _joined(ctx, totals)
    return [own]


def _joined(ctx: LocalContext, totals: Any) -> Any:
    """The join of all shards' totals: the last result of the operator itself along the leading
    dim."""
    (running,) = bind_with(ctx, (totals,), axis=0, reverse=False)
    return lax.index_in_dim(running, running.shape[0] - 1, 0, keepdims=False)


def _prefix_sends(op: Op, row: Row) -> tuple[Sent, ...]:
    """Each device sends the total of its shard to all others."""
    return (Sent("all_gather", (op.axis_size - 1) * bytes_beside(op.ins[0], op.params["axis"])),)


add_kernel(
    Kernel(
        name="prefix",
        summary="totals of all shards are gathered; those before are joined in",
        sends=_prefix_sends,
    )
)


def _prefix_traits(name: str) -> Traits:
    monoid = _PREFIX_MONOIDS.get(name, "")
    return Traits(
        pointwise=bool(monoid),
        reduces=monoid,
        scales="together" if monoid in ("sum", "max", "min") else "",
    )


@rule(
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "cumlogsumexp",
    traits=_prefix_traits,
    local=_cumulative_local,
)
def _cumulative(op: Op) -> Sequence[Row]:
    """Other dims split; the operator's own dim splits with the kernel `prefix`."""
    axis = int(op.params["axis"])
    dims = dim_factors(len(op.ins[0].shape), [axis])
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(dims,)))
    monoid = _PREFIX_MONOIDS.get(op.name)
    rows += monoid_rows(op, monoid) if monoid in admissible(op.ins[0].dtype) else []
    if op.ins[0].shape[axis] > 0:
        rows.append(Row((Split(axis),), (Split(axis),), kernel="prefix"))
    return rows


# ---- reductions ---------------------------------------------------------------------------------


_MONOID = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}
"""The monoid of each reduction."""

_ORDERLESS = frozenset(names("reduce_sum reduce_max reduce_min reduce_and reduce_or"))
"""Reductions with the trait `orderless`."""
_SCALED = frozenset(names("reduce_sum reduce_max reduce_min"))
"""Reductions f with f(c x) = c f(x)."""


def _traits(name: str) -> Traits:
    return Traits(
        pointwise=True,
        reduces=_MONOID[name],
        orderless=name in _ORDERLESS,
        scales="together" if name in _SCALED else "",
    )


def _reduce_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Replaces padding along reduced dims by the neutral element, then reduces."""
    return bind_with(
        ctx,
        [without_padding(ctx, 0, args[0], tuple(ctx.params["axes"]), _MONOID[ctx.primitive.name])],
    )


@rule(*_MONOID, traits=_traits, local=_reduce_local)
def _reduce(op: Op) -> Sequence[Row]:
    """Other dims split; a reduced dim splits with a partial result."""
    dims = dim_factors(len(op.ins[0].shape))
    kept = tuple(d for i, d in enumerate(dims) if i not in op.params["axes"])
    monoid: str | None = _MONOID[op.name]
    if monoid not in admissible(op.ins[0].dtype):
        monoid = None
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(kept,), contract=monoid, masks_padding=True))
    # A reduction commutes with its own monoid: a sum of partial sums is a partial sum.
    return [*rows, *(monoid_rows(op, monoid) if monoid else [])]


@rule("reduce_xor", traits=Traits(), local=bind_with)
def _reduce_whole(op: Op) -> Sequence[Row]:
    dims = dim_factors(len(op.ins[0].shape), op.params["axes"])
    return split_rows(op, FactorMap(ins=(dims,), outs=(tuple(d for d in dims if d is not None),)))


def _reduce_by_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Combines the elements of the shard, gathers the results of all shards, combines them, and
    then the initial values, once: they need not be neutral.

    Elements are combined in their order along a dim. With several dims the function commutes: XLA
    does not say in which order it takes them.
    """
    count, dims = len(args) // 2, tuple(ctx.params["dimensions"])
    split = {d: ctx.in_axes(0, d) for d in dims}
    if not any(split.values()):
        return bind_with(ctx, args)
    xs, starts = list(args[:count]), args[count:]
    combine = by_jaxpr(ctx.params["jaxpr"])
    uneven = {d for d in dims if not isinstance(ctx.in_extent(0, d), int)}
    for d in sorted(dims, reverse=True):
        xs = fold(combine, xs, d, ctx.in_extent(0, d) if d in uneven else None)
    for d in sorted(dims, reverse=True):
        filled = filled_shards(ctx, 0, d) if d in uneven else {}
        for axis, _ in reversed(split[d]):
            xs = fold(combine, [lax.all_gather(x, axis) for x in xs], 0, filled.get(axis))
    return combine([jnp.broadcast_to(s, x.shape) for s, x in zip(starts, xs, strict=True)], xs)


def _exchange_sends(op: Op, row: Row) -> tuple[Sent, ...]:
    """Each device sends the results of its shard to all others, each result in a collective of its
    own."""
    size = sum(bytes_beside(a) for a in op.outs)
    return (Sent("all_gather", (op.axis_size - 1) * size, len(op.outs)),)


add_kernel(
    Kernel(
        name="reduced_shards",
        summary="the results of all shards are gathered and reduced together",
        sends=_exchange_sends,
    )
)


@rule("reduce", traits=Traits(), local=_reduce_by_local)
def _reduce_by(op: Op) -> Sequence[Row]:
    """A reduction by any associative function: other dims split; a reduced dim splits with the
    kernel `reduced_shards`."""
    count = len(op.ins) // 2
    dims = dim_factors(len(op.ins[0].shape), op.params["dimensions"])
    kept = tuple(d for d in dims if d is not None)
    rows = split_rows(op, FactorMap(ins=(dims,) * count + ((),) * count, outs=(kept,) * count))
    reduced = op.params["dimensions"]
    if not all(op.ins[0].shape[d] for d in reduced):
        return rows
    for d in reduced:
        ins = (Split(d),) * count + (B,) * count
        rows.append(Row(ins, (B,) * count, kernel="reduced_shards"))
    return rows


@rule("approx_top_k", traits=Traits(), local=bind_with)
def _approx_top_k(op: Op) -> Sequence[Row]:
    axis = op.params["reduction_dimension"] % len(op.ins[0].shape)
    dims = dim_factors(len(op.ins[0].shape), [axis])
    return split_rows(op, FactorMap(ins=(dims,), outs=(dims,) * len(op.outs)))
