"""Reductions over sliding windows, and the derivatives of their maxima. Along a split dim,
neighbours send the elements that windows reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from sbp.signatures.factors import (
    Dims,
    FactorMap,
    admissible,
    dim_factors,
    linear_rows,
    monoid_rows,
    moved_rows,
    split_rows,
)
from sbp.signatures.families.shifting import halo_rows, split_dim
from sbp.signatures.kernels.exchange import Need, fetch, of_device
from sbp.signatures.kernels.halo import Exchange, Exchanges, Windows, exchanges, padded_shard
from sbp.signatures.kernels.shards import neutral
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Traits


def windows_of(params: dict[str, Any], dim: int, size: int, out: int) -> Windows:
    """How the windows of a reduction lie along a dim.

    Arguments:
      params: parameters of the primitive.
      dim: the dim.
      size: its size in the operand that windows read.
      out: its size in the result.
    """

    def of(name: str) -> int:
        found = params.get(name)
        return found[dim] if found is not None else 1

    return Windows(
        size=size,
        out=out,
        stride=of("window_strides"),
        low=params["padding"][dim][0],
        window=of("window_dimensions"),
        dilation=of("window_dilation"),
        base=of("base_dilation"),
    )


def _dims(op: Op, operand: Any, out: Any) -> tuple[Dims, list[int]]:
    """The factors of the dims along which windows do not slide, and a list of the other dims.

    Arguments:
      op: the equation.
      operand: aval of what windows read.
      out: aval with one element for each window.
    """
    sizes = zip(operand.shape, out.shape, strict=True)
    slides = [
        d
        for d, (size, result) in enumerate(sizes)
        if not windows_of(op.params, d, size, result).is_identity
    ]
    return dim_factors(len(operand.shape), slides), slides


def _without_padding(params: dict[str, Any], dims: Sequence[int]) -> dict[str, Any]:
    """The window parameters with no padding and no base dilation along some dims, where the
    exchange has done both."""
    changed: dict[str, Any] = {
        "padding": tuple((0, 0) if d in dims else tuple(p) for d, p in enumerate(params["padding"]))
    }
    if params.get("base_dilation") is not None:
        changed["base_dilation"] = tuple(
            1 if d in dims else b for d, b in enumerate(params["base_dilation"])
        )
    return changed


def _fetched(
    ctx: LocalContext, xs: Sequence[Any], fills: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The operands of a window reduction, with the elements that their windows read along split
    dims; and the parameters that change with them.

    Arguments:
      ctx: the kernel's place.
      xs: shards of the operands.
      fills: for each operand, the scalar for padding.
    """
    out, dims = list(xs), []
    for d, (size, result) in enumerate(
        zip(ctx.global_ins[0].shape, ctx.global_outs[0].shape, strict=True)
    ):
        windows = windows_of(ctx.params, d, size, result)
        if ctx.in_axes(0, d) and not windows.is_identity:
            (over,) = ctx.in_axes(0, d)
            out = [
                padded_shard(ctx, x, d, over, windows, fill)
                for x, fill in zip(out, fills, strict=True)
            ]
            dims.append(d)
    return out, _without_padding(ctx.params, dims) if dims else {}


def _reduce_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The padding is the monoid's neutral element."""
    monoid = ctx.primitive.name.rsplit("_", 1)[-1]
    xs, changes = _fetched(ctx, args, [neutral(monoid, args[0].dtype)])
    return bind_with(ctx, xs, **changes)


def _reduce_by_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The windows read no padding along a split dim; what the exchange fills in is not used."""
    count = len(args) // 2
    xs, changes = _fetched(ctx, args[:count], args[count:])
    return bind_with(ctx, [*xs, *args[count:]], **changes)


@exchanges(
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window",
    "select_and_gather_add",
)
def _reduce_exchanges(op: Op, row: Row) -> Exchanges:
    """One exchange for each operand that windows read."""
    d = split_dim(row)
    moved = [(k, a) for k, a in enumerate(op.ins) if a.shape]
    return [
        windows_of(op.params, d, a.shape[d], op.outs[0].shape[d]).exchange(k, d, op.axis_size)
        for k, a in moved
    ]


@rule(
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    traits=lambda name: Traits(pointwise=True, reduces=name.rsplit("_", 1)[-1]),
    local=_reduce_local,
)
def _reduce_window(op: Op) -> Sequence[Row]:
    """Dims that windows do not slide along split; the others split with halo exchange."""
    dims, slides = _dims(op, op.ins[0], op.outs[0])
    monoid = op.name.rsplit("_", 1)[-1]
    rows = split_rows(op, FactorMap(ins=(dims,), outs=(dims,)))
    return [
        *rows,
        *(monoid_rows(op, monoid) if monoid in admissible(op.ins[0].dtype) else []),
        *_halo(op, slides),
    ]


@rule("reduce_window", traits=Traits(), local=_reduce_by_local)
def _reduce_window_by(op: Op) -> Sequence[Row]:
    """A window reduction by any function.

    Along a dim with padding or a base dilation windows do not split: XLA for CPU leaves these
    positions out, and no element that an exchange could fill in is neutral for every function.
    """
    count = len(op.ins) // 2
    dims, slides = _dims(op, op.ins[0], op.outs[0])
    base = op.params["base_dilation"]
    full = [d for d in slides if tuple(op.params["padding"][d]) == (0, 0) and base[d] == 1]
    return [
        *split_rows(op, FactorMap(ins=(dims,) * count + ((),) * count, outs=(dims,) * count)),
        *_halo(op, full),
    ]


def _halo(op: Op, dims: Sequence[int]) -> list[Row]:
    """Halo rows of dims that have an element for every device, in operands and results."""
    return halo_rows(
        op,
        [
            d
            for d in dims
            if all(a.shape[d] >= op.axis_size for a in (*op.ins, *op.outs) if a.shape)
        ],
    )


# ---- derivatives of a maximum over windows ------------------------------------------------------


def _never_chosen(params: dict[str, Any], dtype: Any) -> np.ndarray:
    """The scalar that a selection never prefers to an element; it serves as padding."""
    return neutral("max" if params["select_prim"].name in ("ge", "gt") else "min", dtype)


def _gather_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The padding of the tangents is 0; that of the operand is never chosen."""
    tangents, operand = args
    fills = [np.zeros((), tangents.dtype), _never_chosen(ctx.params, operand.dtype)]
    xs, changes = _fetched(ctx, args, fills)
    return bind_with(ctx, xs, **changes)


@rule("select_and_gather_add", traits=Traits(moves=True), local=_gather_local)
def _select_and_gather_add(op: Op) -> Sequence[Row]:
    """The tangent of the element that each window of the second operand chooses; linear in the
    tangents, the first operand."""
    dims, slides = _dims(op, op.ins[0], op.outs[0])
    return [
        *split_rows(op, FactorMap(ins=(dims, dims), outs=(dims,))),
        *moved_rows(op, (0,)),
        *_halo(op, slides),
    ]


def _touching(windows: Windows, n: int) -> tuple[Need, Need]:
    """Two ranges for each device of a mesh axis: the windows that touch its elements, and the
    elements that these windows read."""
    chunk = -(-windows.size // n)
    first = [-((windows.window - 1 - windows.low - chunk * i) // windows.stride) for i in range(n)]
    last = [(chunk * (i + 1) - 1 + windows.low) // windows.stride for i in range(n)]
    count = max(1, *(b - a + 1 for a, b in zip(first, last, strict=True)))
    cotangents = Need(windows.out, -(-windows.out // n), tuple(first), count)
    read = Need(windows.size, chunk, tuple(windows.first(a) for a in first), windows.padded(count))
    return cotangents, read


def _scatter_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Runs all windows that touch the shard, on the elements that they read, and keeps the shard's
    own elements of the result."""
    source, operand = args
    padding, cuts = list(map(tuple, ctx.params["padding"])), []
    for d, (out, size) in enumerate(
        zip(ctx.global_ins[0].shape, ctx.global_ins[1].shape, strict=True)
    ):
        windows = windows_of(ctx.params, d, size, out)
        if not ctx.in_axes(1, d) or windows.is_identity:
            continue
        ((axis, n),) = ctx.in_axes(1, d)
        cotangents, read = _touching(windows, n)
        source = fetch(ctx, source, d, axis, cotangents, np.zeros((), source.dtype))
        operand = fetch(ctx, operand, d, axis, read, _never_chosen(ctx.params, operand.dtype))
        # The shard may have elements before or after those that windows read: pad both sides.
        chunk = ctx.local_ins[1][d]
        room = max(0, *(abs(chunk * i - s) for i, s in enumerate(read.starts)), chunk)
        config = [(room, room, 0) if e == d else (0, 0, 0) for e in range(operand.ndim)]
        cuts.append((d, config, ctx.in_offset(1, d) - of_device(read.starts, axis) + room, chunk))
        padding[d] = (0, 0)
    (out,) = bind_with(ctx, (source, operand), padding=tuple(padding))
    for d, config, start, chunk in cuts:
        out = lax.dynamic_slice_in_dim(
            lax.pad(out, np.zeros((), out.dtype), config), start, chunk, d
        )
    return [out]


@exchanges("select_and_scatter_add")
def _scatter_exchanges(op: Op, row: Row) -> Exchanges:
    """The exchanges of the cotangents and of the operand."""
    d = split_dim(row)
    source, operand = op.ins
    cotangents, read = _touching(
        windows_of(op.params, d, operand.shape[d], source.shape[d]), op.axis_size
    )
    return [Exchange(0, (d,), cotangents, cotangents.width), Exchange(1, (d,), read, read.width)]


@rule("select_and_scatter_add", traits=Traits(linear_map=True), local=_scatter_local)
def _select_and_scatter_add(op: Op) -> Sequence[Row]:
    """Adds each window's cotangent to the element that the window of the second operand chooses;
    linear in the cotangents, the first operand."""
    source, operand = op.ins
    dims, slides = _dims(op, operand, source)
    return [
        *split_rows(op, FactorMap(ins=(dims, dims), outs=(dims,))),
        *linear_rows(op, (0,)),
        *_halo(op, slides),
    ]


@rule("select_and_scatter", traits=Traits(), local=bind_with)
def _select_and_scatter(op: Op) -> Sequence[Row]:
    """With any pair of functions and an initial value: only dims along which windows do not slide
    split."""
    dims, _ = _dims(op, op.ins[0], op.ins[1])
    return split_rows(op, FactorMap(ins=(dims, dims, ()), outs=(dims,)))
