"""`conv_general_dilated`. Batch, feature and group dims split by their factors; spatial dims split
with halo exchange, in the image only or in image and kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sbp.signatures.factors import FactorMap, admissible, split_rows
from sbp.signatures.families.contraction import bilinear_rows
from sbp.signatures.kernels.halo import Exchanges, Windows, dilated_shard, exchanges, padded_shard
from sbp.signatures.kernels.shards import without_padding
from sbp.signatures.kernels.window_sums import UnevenWindow, rereads, summed
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Shape, Traits
from sbp.types import B, P, Split


def spatial_windows(params: dict[str, Any], k: int, size: int, window: int, out: int) -> Windows:
    """How the windows of a convolution lie along a spatial dim.

    Arguments:
      params: parameters of the convolution.
      k: number of the spatial dim.
      size: its size in the image.
      window: its size in the kernel.
      out: its size in the result.
    """
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
    """The same reads, listed by the elements of the kernel: elements of the result and of the
    kernel change roles."""
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
    windows lie along it.

    Arguments:
      params: parameters of the convolution.
      lhs: aval of the image.
      rhs: aval of the kernel.
      out: aval of the result.
    """
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
    """Convolves shards: masks padding along contracted features and split windows, then fetches
    halos.

    Both operands are masked: zero times a NaN in the other operand's padding would be NaN.
    """
    params, numbers = ctx.params, ctx.params["dimension_numbers"]
    spatial = list(_spatial(params, ctx.global_ins[0], ctx.global_ins[1], ctx.global_outs[0]))
    split = tuple(j for _, j, _, _ in spatial if ctx.in_axes(1, j))
    lhs = without_padding(ctx, 0, args[0], (numbers.lhs_spec[1],), "sum")
    rhs = without_padding(ctx, 1, args[1], (numbers.rhs_spec[1], *split), "sum")
    zero = np.zeros((), lhs.dtype)
    changed = {name: list(params[name]) for name in ("padding", "lhs_dilation")}
    uneven = []
    several = _are_several(w.base for i, _, _, w in spatial if ctx.in_axes(0, i))
    # Halos are fetched in the order of dims, as `Kernel.widens` counts them.
    for k, (i, j, o, windows) in sorted(enumerate(spatial), key=lambda entry: entry[1][0]):
        if not ctx.in_axes(0, i) or (windows.is_identity and j not in split):
            continue
        (over,) = ctx.in_axes(0, i)
        reads = _of_window_elements(windows) if j in split else windows
        real = ctx.in_extent(1, j)
        is_uneven = j in split and not isinstance(real, int)
        if is_uneven or several:
            lhs, padding, base = padded_shard(ctx, lhs, i, over, reads, zero), (0, 0), 1
        else:
            lhs, padding, base = dilated_shard(ctx, lhs, i, over, reads, zero)
        changed["padding"][k], changed["lhs_dilation"][k] = padding, base
        if is_uneven:
            uneven.append(UnevenWindow(number=k, lhs=i, rhs=j, out=o, windows=windows, real=real))
    local = {
        **params,
        **{name: tuple(value) for name, value in changed.items()},
        **_groups(params, lhs.shape, rhs.shape, ctx.local_outs[0]),
    }

    def convolve(x: Any, y: Any, **changes: Any) -> Any:
        """Convolves two arrays."""
        (found,) = bind_with(ctx, (x, y), **{**local, **changes})
        return found

    return [summed(lhs, rhs, uneven, local, convolve)]


def _groups(
    params: dict[str, Any], lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]
) -> dict[str, int]:
    """The group counts for (local) shapes: where groups are split, each device has a share of them.

    Arguments:
      params: parameters of the convolution.
      lhs: shape of the image.
      rhs: shape of the kernel.
      out: shape of the result.
    """
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
    """Floating-point operations of a convolution: 2 x result x window x input features.

    Arguments:
      params: parameters of the convolution.
      ins: local shapes of the operands.
      outs: local shapes of the results.
    """
    features = params["dimension_numbers"].rhs_spec[0]
    window = math.prod(size for d, size in enumerate(ins[1]) if d != features)
    return 2.0 * math.prod(outs[0]) * window


def _are_several(bases: Iterable[int]) -> bool:
    """Whether several dims have base dilation. One is left to the convolution of shards, which
    makes no room for it; for several that are split, the TPU compiler makes more room than their
    padded shards take (`tests/tpu/test_tpu_rows.py`, `tests/tpu/test_halos.py`)."""
    return sum(base > 1 for base in bases) > 1


@exchanges("conv_general_dilated")
def _conv_exchanges(op: Op, row: Row) -> Exchanges:
    """The halo of the image along the spatial dim that the row splits."""
    for i, j, _, windows in _spatial(op.params, op.ins[0], op.ins[1], op.outs[0]):
        if row.ins[0] == Split(i):
            n, is_split = op.axis_size, row.ins[1] == Split(j)
            reads = _of_window_elements(windows) if is_split else windows
            is_even = not is_split or op.divides(windows.window)
            # Other mesh axes may split the other dims.
            dense = is_even and not _are_several(op.params["lhs_dilation"])
            keeps = dense and reads.padding(n) is not None
            return [reads.exchange(0, i, n, keeps)]
    return []


@rule(
    "conv_general_dilated",
    traits=Traits(pointwise=True, contracts=True, scales="each", flops=conv_flops),
    local=_conv_local,
)
def _conv_general_dilated(op: Op) -> Sequence[Row]:
    """Batch, features and contracted features split by their factors; feature and batch groups
    split where each device gets whole groups."""
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


def _splits_window(op: Op, windows: Windows) -> bool:
    """Whether the window may be split: in even shards, or in uneven ones if the copies of
    `window_sums` are not larger than the whole image."""
    if op.divides(windows.window):
        return True
    return windows.out * rereads(windows, -(-windows.window // op.axis_size)) <= windows.size


def _halo_rows(op: Op) -> list[Row]:
    """For each spatial dim, two rows: split in image and result; split in image and kernel, with a
    partial result."""
    rows = []
    for i, j, o, windows in _spatial(op.params, op.ins[0], op.ins[1], op.outs[0]):
        if min(windows.size, windows.out) >= op.axis_size and not windows.is_identity:
            rows.append(Row((Split(i), B), (Split(o),), kernel="halo"))
        if (
            min(windows.size, windows.window) >= op.axis_size
            and _splits_window(op, windows)
            and "sum" in admissible(op.outs[0].dtype)
        ):
            rows.append(Row((Split(i), Split(j)), (P,), kernel="halo"))
    return rows
