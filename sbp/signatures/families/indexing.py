"""gather and the scatters: index batches and whole slices split; linear in what is moved; a split
indexed dim masks or shifts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.signatures.factors import (
    FactorMap,
    admissible,
    linear_rows,
    moved_rows,
    owned_monoid,
    split_rows,
)
from sbp.signatures.families.index_dims import (
    gather_factors,
    hit_dims,
    in_windows,
    looked_up,
    scatter_factors,
    scatter_window,
    scatter_windows,
)
from sbp.signatures.kernels.shards import clipped, without_padding
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, add_kernel, bind_with, rule
from sbp.signatures.traits import Traits
from sbp.types import B, Split, Unreduced

add_kernel(
    Kernel(
        name="masked_gather",
        summary="each device looks up what it owns, zeros elsewhere; the parts add up",
    )
)
add_kernel(Kernel(name="shifted_scatter", summary="each device writes what falls on its shard"))
# Another axis that splits a dim further cannot tell, by the sizes that the first one leaves, a
# window from the whole dim.
add_kernel(
    Kernel(
        name="masked_windows",
        summary="each device reads the part of each window that it owns; the parts add up",
        nests=False,
    )
)
add_kernel(
    Kernel(
        name="shifted_windows",
        summary="each device writes the part of each window that falls on its shard",
        nests=False,
    )
)

_MODE = lax.GatherScatterMode
_SCATTER_MONOID = {
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}


def _local_sizes(ctx: LocalContext) -> tuple[int, ...]:
    """Slice sizes on the shard: a whole slice is the shard's, one element stays one element."""
    wholes = zip(ctx.params["slice_sizes"], ctx.global_ins[0].shape, ctx.local_ins[0], strict=True)
    return tuple(min(local, size) if size == whole else size for size, whole, local in wholes)


def _gather_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The gather on the shard; where a dim that an index picks of is split, each element by its
    owner alone.

    The owner of an index is the device that holds the element it is clipped to, so that each result
    has exactly one; an index outside stays outside on its owner, which then fills. A window lies
    across shards: each is put between zeros, as many as a window has, so that a window that misses
    it reads zeros alone.
    """
    operand, indices = args
    numbers = ctx.params["dimension_numbers"]
    sizes, shape = ctx.params["slice_sizes"], ctx.global_ins[0].shape
    windows = [d for d in in_windows(numbers, sizes, shape) if ctx.in_axes(0, d)]
    picked = [
        d for d in looked_up(numbers) if ctx.in_axes(0, d) and shape[d] != ctx.local_ins[0][d]
    ]
    changes: dict[str, Any] = {"slice_sizes": _local_sizes(ctx)}
    if not windows and not picked:
        if indices.shape != tuple(ctx.global_ins[1].shape):
            changes["indices_are_sorted"] = False  # padding is not
        return bind_with(ctx, args, **changes)
    mine: Any = True
    filled = _filled(ctx, indices)
    components = []
    for c, d in enumerate(numbers.start_index_map):
        inside, outside = clipped(indices[..., c], shape[d] - sizes[d] + 1)
        if d not in (*windows, *picked):
            components.append(_as_int32(indices[..., c]))
            continue
        here, local = inside - ctx.in_offset(0, d), ctx.local_ins[0][d]
        owned = (here >= 0) & (here < ctx.in_extent(0, d))
        if d in picked:
            mine = mine & owned
            components.append(jnp.where(filled & outside, local, jnp.clip(here, 0, local - 1)))
            continue
        mine = mine & (owned | ~filled)
        operand = without_padding(ctx, 0, operand, (d,), "sum")
        between = [(sizes[d], sizes[d], 0) if k == d else (0, 0, 0) for k in range(operand.ndim)]
        operand = lax.pad(operand, jnp.zeros((), operand.dtype), between)
        components.append(
            jnp.where(
                filled & outside, operand.shape[d], jnp.clip(here + sizes[d], 0, local + sizes[d])
            )
        )
    # All components are compared as int32, into which each is clipped first; foreign indices are
    # not in order.
    changes["indices_are_sorted"] = False
    (out,) = bind_with(ctx, (operand, jnp.stack(components, -1)), **changes)
    batch = [o for o in range(out.ndim) if o not in numbers.offset_dims]
    mine = jnp.broadcast_to(mine, indices.shape[:-1])
    return [jnp.where(lax.broadcast_in_dim(mine, out.shape, batch), out, jnp.zeros((), out.dtype))]


def _filled(ctx: LocalContext, indices: Any) -> Any:
    """Which slices reach outside of the operand, along any dim, and are filled."""
    sizes, shape = ctx.params["slice_sizes"], ctx.global_ins[0].shape
    filled = jnp.zeros(indices.shape[:-1], jnp.bool_)
    if _MODE.from_any(ctx.params["mode"]) == _MODE.FILL_OR_DROP:
        for c, d in enumerate(ctx.params["dimension_numbers"].start_index_map):
            filled = filled | clipped(indices[..., c], shape[d] - sizes[d] + 1)[1]
    return filled


def _as_int32(index: Any) -> Any:
    """An index as int32, one that does not fit as the nearest that does: it is outside every dim
    all the same."""
    info = jnp.iinfo(index.dtype)
    low, high = max(info.min, -(2**31)), min(info.max, 2**31 - 1)
    return jnp.clip(index, jnp.asarray(low, index.dtype), jnp.asarray(high, index.dtype)).astype(
        jnp.int32
    )


@rule(
    "gather", traits=Traits(moves=True, scales="together", indices=range(1, 2)), local=_gather_local
)
def _gather(op: Op) -> Sequence[Row]:
    numbers, mode = op.params["dimension_numbers"], _MODE.from_any(op.params["mode"])
    params = op.params | {"slice_sizes": _localised_sizes(op)}
    rows = split_rows(
        op, gather_factors(params, op.ins[0].shape, len(op.ins[1].shape), len(op.outs[0].shape))
    )
    monoid = owned_monoid(op.outs[0].dtype)
    if monoid and mode != _MODE.ONE_HOT:
        joined = Unreduced(monoid)
        rows += [
            Row((Split(d), B), (joined,), kernel="masked_gather")
            for d in looked_up(numbers)
            if op.ins[0].shape[d] > 1
        ]
        windows = in_windows(numbers, params["slice_sizes"], op.ins[0].shape)
        rows += [Row((Split(d), B), (joined,), kernel="masked_windows") for d in windows]
    for row in moved_rows(op, (0,)):
        if mode != _MODE.FILL_OR_DROP or _fill_is_joined(op, row.ins[0]):
            rows.append(row)
    return rows


def _fill_is_joined(op: Op, atom: Any) -> bool:
    """Whether joining the fill values of all parts gives the fill value: always for idempotent
    monoids, for a sum when it is 0 or NaN."""
    fill = op.params["fill_value"]
    if atom.monoid in ("max", "min", "and", "or"):
        return True
    if fill is None or fill != fill:
        return jnp.issubdtype(op.outs[0].dtype, jnp.inexact)
    return fill == 0 or (fill == 1 and atom.monoid == "prod")


def _localised_sizes(op: Op) -> tuple[int, ...]:
    """Slice sizes on shapes that outer mesh axes have localised: a result's window dims tell
    them."""
    numbers = op.params["dimension_numbers"]
    sizes = list(op.params["slice_sizes"])
    window = [
        d
        for d in range(len(sizes))
        if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    for d, o in zip(window, numbers.offset_dims, strict=True):
        sizes[d] = op.outs[0].shape[o]
    return tuple(sizes)


def _scatter_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The scatter on the shard; where a dim that indices hit is split, indices are shifted and
    foreign ones dropped.

    A window lies across shards: it is written to the shard with as much margin on both sides as it
    has elements, which is cut off.
    """
    operand, indices, updates = args
    numbers, mode = ctx.params["dimension_numbers"], _MODE.from_any(ctx.params["mode"])
    monoid = _SCATTER_MONOID.get(ctx.primitive.name)
    batch = [u for u in range(updates.ndim) if u not in numbers.update_window_dims]
    if monoid is not None:
        updates = without_padding(ctx, 2, updates, tuple(batch), monoid)
    windows = scatter_windows(numbers, ctx.global_ins[0].shape, ctx.global_ins[2].shape)
    split = [
        d
        for d in (*hit_dims(numbers), *windows)
        if ctx.in_axes(0, d) and ctx.global_ins[0].shape[d] != ctx.local_ins[0][d]
    ]
    changes: dict[str, Any] = {}
    if split or tuple(indices.shape) != tuple(ctx.global_ins[1].shape):
        changes = {
            "indices_are_sorted": False,
            "unique_indices": False,
        }  # padding and dropped indices are neither
    if not split:
        return bind_with(ctx, (operand, indices, updates), **changes)
    local = ctx.local_ins[0]
    margin = [windows[d] if d in split and d in windows else 0 for d in range(operand.ndim)]
    whole_window = dict(
        zip(
            scatter_window(numbers, operand.ndim),
            (updates.shape[u] for u in numbers.update_window_dims),
            strict=True,
        )
    )
    components = []
    for c, d in enumerate(numbers.scatter_dims_to_operand_dims):
        index, whole = _as_int32(indices[..., c]), ctx.global_ins[0].shape[d]
        size = windows.get(d, 1)
        if d not in split:
            last = operand.shape[d] - whole_window.get(d, 1)
            components.append(jnp.clip(index, 0, last) if mode == _MODE.CLIP else index)
            continue
        index = jnp.clip(index, 0, whole - size) if mode == _MODE.CLIP else index
        here = index - ctx.in_offset(0, d)
        hits = (index >= 0) & (index <= whole - size) & (here > -size) & (here < local[d])
        components.append(jnp.where(hits, here + margin[d], local[d] + 2 * margin[d]))
    zero = jnp.zeros((), operand.dtype)
    operand = lax.pad(operand, zero, [(m, m, 0) for m in margin])
    if math.prod(args[1].shape[:-1]) == 1:
        # XLA's CPU compiler in JAX 0.10 merges the slice that made the shard with the one element
        # that a lone index hits, without the bound: an index outside writes an element of another
        # shard into this one.
        (operand,) = _jax.optimization_barrier((operand,))
    (out,) = bind_with(
        ctx, (operand, jnp.stack(components, -1), updates), mode=_MODE.FILL_OR_DROP, **changes
    )
    return [lax.slice(out, margin, [m + size for m, size in zip(margin, local, strict=True)])]


def _scatter_traits(name: str) -> Traits:
    return Traits(
        moves=name == "scatter",
        scatters=_SCATTER_MONOID.get(name, ""),
        scales="together" if name in ("scatter", "scatter-add", "scatter-sub") else "",
        indices=range(1, 2),
    )


@rule(
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    traits=_scatter_traits,
    local=_scatter_local,
)
def _scatter(op: Op) -> Sequence[Row]:
    """Splitting the updates leaves partials of the scatter's monoid, to which a partial operand is
    added."""
    numbers = op.params["dimension_numbers"]
    operand, indices, updates = scatter_factors(
        op.params, op.ins[0].shape, len(op.ins[1].shape), op.ins[2].shape
    )
    monoid = _SCATTER_MONOID.get(op.name)
    if monoid not in admissible(op.outs[0].dtype):
        monoid = None
    m = FactorMap(
        ins=(operand, indices, updates),
        outs=(operand,),
        contract=monoid,
        accumulate=(0,),
        masks_padding=True,
    )
    rows = split_rows(op, m)
    rows += [
        Row((Split(d), B, B), (Split(d),), kernel="shifted_scatter")
        for d in hit_dims(numbers)
        if op.ins[0].shape[d] > 1
    ]
    windows = scatter_windows(numbers, op.ins[0].shape, op.ins[2].shape)
    rows += [Row((Split(d), B, B), (Split(d),), kernel="shifted_windows") for d in windows]
    rows += _folded_rows(op)
    match op.name:
        case "scatter-add" | "scatter-sub":
            rows += linear_rows(op, (0, 2)) if monoid else []
        case "scatter" if _once(op):
            rows += moved_rows(op, (0, 2))
        case _ if monoid is not None:
            rows.append(Row((Unreduced(monoid), B, Unreduced(monoid)), (Unreduced(monoid),)))
        case _:
            pass
    return rows


_FOLDED = {
    "scatter-add": ("max", "min"),
    "scatter-max": ("min",),
    "scatter-min": ("max",),
    "scatter-mul": ("sum",),
    "scatter-sub": ("max", "min"),
}
"""Over which other monoid each way to combine distributes: what is folded into every part of the
operand is folded into the whole."""


def _folded_rows(op: Op) -> list[Row]:
    dtype = op.outs[0].dtype
    wraps = op.name in ("scatter-add", "scatter-sub") and not jnp.issubdtype(dtype, jnp.floating)
    found = [m for m in _FOLDED.get(op.name, ()) if m in admissible(dtype) and not wraps]
    return [Row((Unreduced(m), B, B), (Unreduced(m),)) for m in found]


def _once(op: Op) -> bool:
    """Whether no element is written twice: which write wins is open, and parts in which different
    ones won do not belong together."""
    return bool(op.params["unique_indices"]) or all(size == 1 for size in op.ins[1].shape[:-1])
