"""`dynamic_slice` and `dynamic_update_slice`. Along a split dim, each device reads or writes the
part of the window that falls on its shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import Dims, FactorMap, moved_rows, owned_monoid, split_rows
from sbp.signatures.kernels.shards import clipped, owned_along, picked_along
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, add_kernel, bind_with, rule
from sbp.signatures.traits import Traits
from sbp.types import B, Split, Unreduced

# These two do not nest: on the sizes that one mesh axis leaves of a dim, a rule for another axis
# cannot distinguish a window from the whole dim.
add_kernel(
    Kernel(
        name="masked_dynamic_slice",
        summary="each device puts down the elements it owns, zeros elsewhere; the parts add up",
        nests=False,
    )
)
add_kernel(
    Kernel(
        name="owned_update",
        summary="each device writes the part of the update that falls on its shard",
        nests=False,
    )
)


def _kept(op: Op, small: Any) -> tuple[Dims, list[int]]:
    """The factors of the dims whose window is the whole dim, and the other dims."""
    sizes = list(zip(op.ins[0].shape, small.shape, strict=True))
    dims = tuple(f"d{d}" if a == b else None for d, (a, b) in enumerate(sizes))
    return dims, [d for d, (a, b) in enumerate(sizes) if 0 < b < a]


def _cut(ctx: LocalContext, small: Sequence[int]) -> list[int]:
    """The dims that are split and whose window is not the whole dim."""
    shape = ctx.global_ins[0].shape
    return [d for d in range(len(shape)) if ctx.in_axes(0, d) and small[d] != shape[d]]


def _clamped(start: Any, size: int, window: int) -> Any:
    """A start as JAX clamps it, as int32: the window lies inside of the dim."""
    return clipped(start, size - window + 1)[0]


def _dynamic_slice_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The elements of the window that this device owns, zeros elsewhere.

    Each element of the window has exactly one owner: shards tile the dim, and the window lies
    inside it.
    """
    x, *starts = args
    window = ctx.global_outs[0].shape
    sizes = list(ctx.local_outs[0])
    cut = _cut(ctx, window)
    first = {
        d: _clamped(starts[d], ctx.global_ins[0].shape[d], window[d]) - ctx.in_offset(0, d)
        for d in cut
    }
    for d in cut:
        starts[d], sizes[d] = jnp.zeros((), starts[d].dtype), x.shape[d]
    (out,) = bind_with(ctx, (x, *starts), slice_sizes=tuple(sizes))
    for d in cut:
        index = lax.iota(jnp.int32, window[d]) + first[d]
        out = owned_along(ctx, out, index, d)
    return [out]


@rule(
    "dynamic_slice",
    traits=Traits(moves=True, scales="together", indices=range(1, sys.maxsize)),
    local=_dynamic_slice_local,
)
def _dynamic_slice(op: Op) -> Sequence[Row]:
    """Dims sliced whole split; a cut dim splits with a partial result."""
    dims, cut = _kept(op, op.outs[0])
    starts = (B,) * (len(op.ins) - 1)
    rows = [
        *split_rows(op, FactorMap(ins=(dims, *((),) * len(starts)), outs=(dims,))),
        *moved_rows(op, (0,)),
    ]
    monoid = owned_monoid(op.outs[0].dtype)
    if monoid:
        rows += [
            Row((Split(d), *starts), (Unreduced(monoid),), kernel="masked_dynamic_slice")
            for d in cut
        ]
    return rows


def _dynamic_update_slice_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Writes the part of the update that falls on the shard.

    Along each cut dim, the device rewrites as many elements as the update has, or its whole shard
    if that is smaller. Elements that the update does not cover keep their value.
    """
    x, update, *starts = args
    whole, window = ctx.global_ins[0].shape, ctx.global_ins[1].shape
    cut = _cut(ctx, window)
    if not cut:
        return bind_with(ctx, args)
    mine = jnp.ones((), jnp.bool_)
    for d in cut:
        start = _clamped(starts[d], whole[d], window[d]) - ctx.in_offset(0, d)
        size = min(window[d], x.shape[d])
        here = jnp.clip(start, 0, x.shape[d] - size)
        index = lax.iota(jnp.int32, size) + here - start
        update = picked_along(update, index, d)
        mine = mine & jnp.expand_dims(
            (index >= 0) & (index < window[d]), [k for k in range(x.ndim) if k != d]
        )
        starts[d] = here.astype(starts[d].dtype)
    current = lax.dynamic_slice(x, starts, update.shape)
    return bind_with(
        ctx, (x, jnp.where(jnp.broadcast_to(mine, update.shape), update, current), *starts)
    )


@rule(
    "dynamic_update_slice",
    traits=Traits(moves=True, scales="together", indices=range(2, sys.maxsize)),
    local=_dynamic_update_slice_local,
)
def _dynamic_update_slice(op: Op) -> Sequence[Row]:
    """Dims that the update covers split in all three; a cut dim splits in operand and result."""
    dims, cut = _kept(op, op.ins[1])
    starts = (B,) * (len(op.ins) - 2)
    rows = [
        *split_rows(op, FactorMap(ins=(dims, dims, *((),) * len(starts)), outs=(dims,))),
        *moved_rows(op, (0, 1)),
    ]
    return [*rows, *(Row((Split(d), B, *starts), (Split(d),), kernel="owned_update") for d in cut)]
