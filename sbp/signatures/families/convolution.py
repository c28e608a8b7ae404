"""conv_general_dilated: batch, features and groups as factors; spatial dims by halo exchange, of
the image alone or of both operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sbp.signatures.factors import FactorMap, admissible, split_rows
from sbp.signatures.families.contraction import bilinear_rows
from sbp.signatures.kernels.halo import Exchanges, Windows, exchanges, padded_shard
from sbp.signatures.kernels.shards import without_padding
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Shape, Traits
from sbp.types import B, P, Split


def spatial_windows(params: dict[str, Any], k: int, size: int, window: int, out: int) -> Windows:
    """How the windows lie along spatial dim number k."""
    return Windows(
        size=size,
        out=out,
        stride=params["window_strides"][k],
        low=params["padding"][k][0],
        window=window,
        dilation=params["rhs_dilation"][k],
        base=params["lhs_dilation"][k],
    )


def _of_window_elements(w: Windows) -> Windows:
    """The same reads, seen from the elements of the window: where results and elements of the
    window change parts."""
    return Windows(
        size=w.size,
        out=w.window,
        stride=w.dilation,
        low=w.low,
        window=w.out,
        dilation=w.stride,
        base=w.base,
    )


def _spatial(
    params: dict[str, Any], lhs: Any, rhs: Any, out: Any
) -> list[tuple[int, int, int, Windows]]:
    """For each spatial dim, its position in the image, in the kernel and in the result, and how
    windows lie along it."""
    numbers = params["dimension_numbers"]
    found = []
    for k, (i, j, o) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        found.append(
            (i, j, o, spatial_windows(params, k, lhs.shape[i], rhs.shape[j], out.shape[o]))
        )
    return found


def _conv_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Contracted features of both operands are masked (zero times a NaN of the other one's padding
    is NaN), then halos are fetched."""
    params, numbers = ctx.params, ctx.params["dimension_numbers"]
    lhs = without_padding(ctx, 0, args[0], (numbers.lhs_spec[1],), "sum")
    rhs = without_padding(ctx, 1, args[1], (numbers.rhs_spec[1],), "sum")
    zero = np.zeros((), lhs.dtype)
    changed = {name: list(params[name]) for name in ("padding", "lhs_dilation")}
    spatial = enumerate(_spatial(params, ctx.global_ins[0], ctx.global_ins[1], ctx.global_outs[0]))
    for k, (i, j, _, windows) in sorted(
        spatial, key=lambda entry: entry[1][0]
    ):  # in the order of dims, as what is sent is counted
        if not ctx.in_axes(0, i) or (windows.is_identity and not ctx.in_axes(1, j)):
            continue
        (over,) = ctx.in_axes(0, i)
        reads = _of_window_elements(windows) if ctx.in_axes(1, j) else windows
        lhs = padded_shard(ctx, lhs, i, over, reads, zero)
        changed["padding"][k], changed["lhs_dilation"][k] = (0, 0), 1
    groups = _groups(params, lhs.shape, rhs.shape, ctx.local_outs[0])
    return bind_with(
        ctx, (lhs, rhs), **{name: tuple(value) for name, value in changed.items()}, **groups
    )


def _groups(
    params: dict[str, Any], lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]
) -> dict[str, int]:
    """The group counts of (local) shapes: where groups are split, each device has its share of
    them."""
    numbers = params["dimension_numbers"]
    features, batches = params["feature_group_count"], params["batch_group_count"]
    return {
        "feature_group_count": (
            lhs[numbers.lhs_spec[1]] // rhs[numbers.rhs_spec[1]] if features > 1 else 1
        ),
        "batch_group_count": (
            lhs[numbers.lhs_spec[0]] // out[numbers.out_spec[0]] if batches > 1 else 1
        ),
    }


def conv_flops(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """Floating-point operations: 2 x result x window x input features."""
    features = params["dimension_numbers"].rhs_spec[0]
    window = math.prod(size for d, size in enumerate(ins[1]) if d != features)
    return 2.0 * math.prod(outs[0]) * window


@exchanges("conv_general_dilated")
def _conv_exchanges(op: Op, row: Row) -> Exchanges:
    for i, j, _, windows in _spatial(op.params, op.ins[0], op.ins[1], op.outs[0]):
        if row.ins[0] == Split(i):
            reads = _of_window_elements(windows) if row.ins[1] == Split(j) else windows
            return [reads.exchange(0, i, op.axis_size)]
    return []


@rule(
    "conv_general_dilated",
    traits=Traits(pointwise=True, contracts=True, scales="each", flops=conv_flops),
    local=_conv_local,
)
def _conv_general_dilated(op: Op) -> Sequence[Row]:
    """Image and kernel by their factors; feature or batch groups split whole groups."""
    numbers = op.params["dimension_numbers"]
    lhs: list[str | None] = [None] * len(op.ins[0].shape)
    rhs: list[str | None] = [None] * len(op.ins[1].shape)
    out: list[str | None] = [None] * len(op.outs[0].shape)
    groups = _groups(op.params, op.ins[0].shape, op.ins[1].shape, op.outs[0].shape)
    features, batches = groups["feature_group_count"], groups["batch_group_count"]
    if batches == 1:
        lhs[numbers.lhs_spec[0]] = out[numbers.out_spec[0]] = "batch"
    if batches == features == 1:
        rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "features"
    if features == 1:
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = "contracted"
    if features > 1 and op.divides(features):
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "groups"
    if batches > 1 and op.divides(batches):
        lhs[numbers.lhs_spec[0]] = rhs[numbers.rhs_spec[0]] = out[numbers.out_spec[1]] = "groups"
    identity = [
        (i, o)
        for i, _, o, w in _spatial(op.params, op.ins[0], op.ins[1], op.outs[0])
        if w.is_identity
    ]
    for i, o in identity:
        lhs[i] = out[o] = f"space{i}"
    m = FactorMap(
        ins=(tuple(lhs), tuple(rhs)), outs=(tuple(out),), contract="sum", masks_padding=True
    )
    return [*split_rows(op, m), *_halo_rows(op), *bilinear_rows(op)]


def _halo_rows(op: Op) -> list[Row]:
    """Each spatial dim: split in image and result, or in image and kernel, whose windows' parts
    then add up."""
    rows = []
    for i, j, o, windows in _spatial(op.params, op.ins[0], op.ins[1], op.outs[0]):
        if min(windows.size, windows.out) >= op.axis_size and not windows.is_identity:
            rows.append(Row((Split(i), B), (Split(o),), kernel="halo"))
        # Not an uneven kernel: an infinity under its padding would become NaN.
        if (
            min(windows.size, windows.window) >= op.axis_size
            and op.divides(windows.window)
            and "sum" in admissible(op.outs[0].dtype)
        ):
            rows.append(Row((Split(i), Split(j)), (P,), kernel="halo"))
    return rows
