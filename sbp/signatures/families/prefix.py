"""Cumulative operators. Along a split dim, each shard joins in the total of the shards before
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import FactorMap, admissible, dim_factors, monoid_rows, split_rows
from sbp.signatures.kernels.halo import bytes_beside
from sbp.signatures.kernels.shards import neutral, without_padding
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, Sent, add_kernel, bind_with, rule
from sbp.signatures.traits import Traits
from sbp.types import Split

_MONOID = {"cumsum": "sum", "cummax": "max", "cummin": "min", "cumprod": "prod"}
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
    monoid = _MONOID.get(name, "max")  # cumlogsumexp starts from the logarithm of 0, as a maximum
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


def _traits(name: str) -> Traits:
    monoid = _MONOID.get(name, "")
    return Traits(
        pointwise=bool(monoid),
        reduces=monoid,
        scales="together" if monoid in ("sum", "max", "min") else "",
    )


@rule(
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", traits=_traits, local=_cumulative_local
)
def _cumulative(op: Op) -> Sequence[Row]:
    """Other dims split; the operator's own dim splits with the kernel `prefix`."""
    axis = int(op.params["axis"])
    dims = dim_factors(len(op.ins[0].shape), [axis])
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(dims,)))
    monoid = _MONOID.get(op.name)
    rows += monoid_rows(op, monoid) if monoid in admissible(op.ins[0].dtype) else []
    if op.ins[0].shape[axis] > 0:
        rows.append(Row((Split(axis),), (Split(axis),), kernel="prefix"))
    return rows
