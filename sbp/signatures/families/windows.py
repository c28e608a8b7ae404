"""Convolutions, reductions over sliding windows, and the derivatives of their maxima. Along a split
dim, neighbours send the elements that windows reach."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.signatures.factors import (
    FactorMap,
    admissible,
    monoid_rows,
    moved_rows,
    rows_beside,
    split_rows,
)
from sbp.signatures.families.linalg import bilinear_rows
from sbp.signatures.families.structural import (
    exchanging,
    fetch_windows,
    halo_rows,
    split_windows,
    window_exchanges,
    windows_along,
)
from sbp.signatures.kernels.halo import (
    Exchange,
    Need,
    Windows,
    fetch_filled,
    of_device,
    padded_shard,
    ranges,
)
from sbp.signatures.kernels.shards import changed_along, neutral, sum_dtype, without_padding
from sbp.signatures.rule import LocalContext, Op, Row, Shape, Traits, bind_with, rule
from sbp.types import B, P, Split

# ---- uneven shards of a window ------------------------------------------------------------------
# Convolutions whose window is split over devices in uneven shards, as in the gradient of a
# convolution by its kernel.
#
# The last devices have fewer window elements than the others; the rest of their shard is padding.
# Zeros in its place are not enough: zero times an infinity of the image is NaN, in results that do
# not read that element. So each product of an image element and padding must be left out, or have
# zeros on both sides. The kernel adds two convolutions. The first reads the image as far as no
# window element but padding would be next, and the shard with zeros. The second reads the few
# elements after that, which only the last results read: it has a copy of them for each result, each
# with zeros where the result does not read.
#
# A zero in the image may meet a non-finite element of the window: every result reads every element
# of the window, so that all results are non-finite.


def rereads(windows: Windows, chunk: int) -> int:
    """The number of the last elements of a shard of the window whose reads lie partly behind the
    first read of the element after the shard.

    Arguments:
      windows: the windows of the convolution.
      chunk: elements of the window in a shard.
    """
    return min(windows.stride * (windows.out - 1) // windows.dilation, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenWindow:
    """A spatial dim whose window is split in uneven shards.

    Arguments:
      number: the number of the spatial dim.
      lhs: its position in the image, which holds what this device's shard of the window reads.
      rhs: its position in the kernel.
      out: its position in the result.
      windows: the windows of the whole convolution.
      real: how many elements of this device's shard of the kernel are not padding; a traced int32.
    """

    number: int
    lhs: int
    rhs: int
    out: int
    windows: Windows
    real: Any

    def first(self, term: "Term") -> "Term":
        """The products of the shard with the image elements before the first that padding reads."""
        place = lax.broadcasted_iota(jnp.int32, term.lhs.shape, self.lhs)
        kept = place < self.windows.dilation * self.real
        return Term(jnp.where(kept, term.lhs, np.zeros((), term.lhs.dtype)), term.rhs, term.folded)

    def second(self, term: "Term", batch: int) -> "Term":
        """The other products. Each result has a copy of the image elements that it reads; the
        copies lie along the batch dim.

        Arguments:
          term: the image and the shard.
          batch: position of the batch dim in the image.
        """
        w, d, chunk = self.windows, self.lhs, term.rhs.shape[self.rhs]
        count = rereads(w, chunk)
        after = lax.dynamic_slice_in_dim(
            term.lhs, w.dilation * self.real, w.stride * (w.out - 1) - w.dilation + 1, d
        )
        element = np.arange(count) - count  # counted from the end of the real elements
        read = w.stride * np.arange(w.out)[:, None] + w.dilation * element
        copies = jnp.take(after, np.maximum(read, 0).ravel(), axis=d)
        copies = copies.reshape(*copies.shape[:d], w.out, count, *copies.shape[d + 1 :])
        kept = (read >= 0) & (element + self.real >= 0)
        kept = lax.broadcast_in_dim(kept, copies.shape, (d, d + 1))
        copies = jnp.where(kept, copies, np.zeros((), copies.dtype))
        at = batch + (batch > d)
        copies = jnp.moveaxis(copies, d, at + 1 if at < d else at)
        before = [(count, 0, 0) if e == self.rhs else (0, 0, 0) for e in range(term.rhs.ndim)]
        return Term(
            copies.reshape(*copies.shape[:batch], -1, *copies.shape[batch + 2 :]),
            lax.dynamic_slice_in_dim(
                lax.pad(term.rhs, np.zeros((), term.rhs.dtype), before), self.real, count, self.rhs
            ),
            (*term.folded, self),
        )

    def unfold(self, result: Any, batch: int) -> Any:
        """A result of copies, with the dim in its place again.

        Arguments:
          result: the convolution of the copies.
          batch: position of the batch dim in the result.
        """
        shape, count = result.shape, self.windows.out
        apart = result.reshape(*shape[:batch], -1, count, *shape[batch + 1 :])
        swapped = jnp.swapaxes(apart, batch + 1, self.out + (self.out > batch))
        return jnp.squeeze(swapped, batch + 1)


@dataclass(frozen=True, slots=True)
class Term:
    """One convolution of a sum.

    Arguments:
      lhs: its image.
      rhs: its kernel.
      folded: the dims whose results lie along the batch dim.
    """

    lhs: Any
    rhs: Any
    folded: tuple[UnevenWindow, ...] = ()


_ALONE = {"window_strides": 1, "rhs_dilation": 1, "padding": (0, 0), "lhs_dilation": 1}
"""The parameters of a convolution along a dim with one result."""


def convolve_uneven(
    lhs: Any,
    rhs: Any,
    uneven: Sequence[UnevenWindow],
    params: Mapping[str, Any],
    convolve: Callable[..., Any],
) -> Any:
    """The convolution of an image with a shard of a kernel, whose padding is zero.

    Arguments:
      lhs: what the shard reads of the image.
      rhs: the shard.
      uneven: the dims whose window is split in uneven shards.
      params: parameters of the convolution of `lhs` and `rhs`.
      convolve: convolves two arrays; takes changed parameters as keywords.
    """
    numbers = params["dimension_numbers"]
    terms = [Term(lhs, rhs)]
    for dim in uneven:
        several = rereads(dim.windows, rhs.shape[dim.rhs]) > 0
        seconds = [dim.second(t, numbers.lhs_spec[0]) for t in terms] if several else []
        terms = [*(dim.first(t) for t in terms), *seconds]
    if len(terms) == 1:
        return convolve(terms[0].lhs, terms[0].rhs)
    out = params["preferred_element_type"] or jnp.result_type(lhs, rhs)
    results = []
    for term in terms:
        found = convolve(
            term.lhs,
            term.rhs,
            preferred_element_type=sum_dtype(np.dtype(out)),
            **changed_along(params, [dim.number for dim in term.folded], **_ALONE),
        )
        for dim in reversed(term.folded):
            found = dim.unfold(found, numbers.out_spec[0])
        results.append(found)
    return lax.convert_element_type(sum(results[1:], results[0]), out)


# ---- convolutions -------------------------------------------------------------------------------
# `conv_general_dilated`. Batch, feature and group dims split by their factors; spatial dims split
# with halo exchange, in the image only or in image and kernel.


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
    dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    how = zip(
        params["window_strides"],
        params["padding"],
        params["rhs_dilation"],
        params["lhs_dilation"],
        strict=True,
    )
    return [
        (
            i,
            j,
            o,
            Windows(
                size=lhs.shape[i],
                out=out.shape[o],
                stride=stride,
                low=padding[0],
                window=rhs.shape[j],
                dilation=dilation,
                base=base,
            ),
        )
        for (i, j, o), (stride, padding, dilation, base) in zip(dims, how, strict=True)
    ]


def _conv_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Convolves shards: masks padding along contracted features and split windows, then fetches
    halos.

    Both operands are masked: zero times a NaN in the other operand's padding would be NaN.
    """
    params, numbers = ctx.params, ctx.params["dimension_numbers"]
    spatial = _spatial(params, ctx.global_ins[0], ctx.global_ins[1], ctx.global_outs[0])
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
        ((axis, n),) = ctx.in_axes(0, i)
        reads = _of_window_elements(windows) if j in split else windows
        real = ctx.in_extent(1, j)
        is_uneven = j in split and not isinstance(real, int)
        padding = None if is_uneven or several else reads.padding(n)
        if reads.base == 1 or padding is None:
            lhs = padded_shard(ctx, lhs, i, (axis, n), reads, zero)
            changed["padding"][k], changed["lhs_dilation"][k] = (0, 0), 1
        else:  # the padded array has no room in memory
            lhs = fetch_filled(ctx, lhs, i, axis, reads.need(n), zero)
            changed["padding"][k] = padding
        if is_uneven:
            uneven.append(UnevenWindow(number=k, lhs=i, rhs=j, out=o, windows=windows, real=real))
    local = {
        **params,
        **{name: tuple(value) for name, value in changed.items()},
        **_groups(params, lhs.shape, rhs.shape, ctx.local_outs[0]),
    }

    def convolve(x: Any, y: Any, **changes: Any) -> Any:
        """Convolves two arrays."""
        return bind_with(ctx, (x, y), **{**local, **changes})[0]

    return [convolve_uneven(lhs, rhs, uneven, local, convolve)]


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
    padded shards take (`tests/tpu/test_compiled_plans.py`)."""
    return sum(base > 1 for base in bases) > 1


def _conv_exchanges(op: Op, row: Row) -> list[Exchange]:
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
    exchanges=_conv_exchanges,
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
    for i, _, o, windows in _spatial(op.params, op.ins[0], op.ins[1], op.outs[0]):
        if windows.is_identity:
            lhs[i] = out[o] = f"space{i}"
    m = FactorMap(
        ins=(tuple(lhs), tuple(rhs)), outs=(tuple(out),), contract="sum", masks_padding=True
    )
    return [*split_rows(op, m), *_halo_rows(op), *bilinear_rows(op)]


def _splits_window(op: Op, windows: Windows) -> bool:
    """Whether the window may be split: in even shards, or in uneven ones if the copies of
    `convolve_uneven` are not larger than the whole image."""
    reread = rereads(windows, -(-windows.window // op.axis_size))
    return op.divides(windows.window) or windows.out * reread <= windows.size


def _halo_rows(op: Op) -> Iterator[Row]:
    """For each spatial dim, two rows: split in image and result; split in image and kernel, with a
    partial result."""
    for i, j, o, windows in _spatial(op.params, op.ins[0], op.ins[1], op.outs[0]):
        if min(windows.size, windows.out) >= op.axis_size and not windows.is_identity:
            yield Row((Split(i), B), (Split(o),), kernel="halo")
        if (
            min(windows.size, windows.window) >= op.axis_size
            and _splits_window(op, windows)
            and "sum" in admissible(op.outs[0].dtype)
        ):
            yield Row((Split(i), Split(j)), (P,), kernel="halo")


# ---- windows ------------------------------------------------------------------------------------


def _sliding_rows(
    op: Op,
    operand: Any,
    out: Any,
    partial: Sequence[Row] = (),
    exchanges: Collection[int] | None = None,
) -> list[Row]:
    """The rows of an operator with windows: dims that windows do not slide along split; the others
    split with halo exchange if operands and results have an element there for every device.

    Arguments:
      op: the equation.
      operand: aval of what windows read.
      out: aval with one element for each window.
      partial: the rows with partial operands.
      exchanges: the dims that may split where windows slide along them; None for all.
    """
    along = windows_along(op.params, operand, out)
    slides = [d for d, windows in enumerate(along) if not windows.is_identity]
    shapes = [a.shape for a in (*op.ins, *op.outs) if a.shape]
    halo = [
        d
        for d in slides
        if (exchanges is None or d in exchanges) and all(s[d] >= op.axis_size for s in shapes)
    ]
    return [*rows_beside(op, slides), *partial, *halo_rows(op, halo)]


def _reduce_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Reduces windows with the padding that the function ignores.

    That is the monoid's neutral element. Of another function, windows read no padding along a split
    dim. The padding of tangents is 0; that of the operand that chooses among them is never chosen.
    """
    name, xs, others = ctx.primitive.name, args, args[:0]
    if name == "select_and_gather_add":
        tangents, operand = args
        fills = [np.zeros((), tangents.dtype), _never_chosen(ctx.params, operand.dtype)]
    elif name == "reduce_window":
        xs, others = args[: len(args) // 2], args[len(args) // 2 :]
        fills = others
    else:
        fills = [neutral(name.rsplit("_", 1)[-1], args[0].dtype)]
    xs, dims = fetch_windows(ctx, xs, fills)
    changes = changed_along(ctx.params, dims, padding=(0, 0), base_dilation=1)
    return bind_with(ctx, [*xs, *others], **changes)


@rule(
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    traits=lambda name: Traits(pointwise=True, reduces=name.rsplit("_", 1)[-1]),
    local=_reduce_local,
    exchanges=window_exchanges,
)
def _reduce_window(op: Op) -> Sequence[Row]:
    return _sliding_rows(op, op.ins[0], op.outs[0], monoid_rows(op, op.name.rsplit("_", 1)[-1]))


@rule("reduce_window", traits=Traits(), local=_reduce_local, exchanges=window_exchanges)
def _reduce_window_by(op: Op) -> Sequence[Row]:
    """A window reduction by any function.

    Along a dim with padding or a base dilation windows do not split: XLA for CPU leaves these
    positions out, and no element that an exchange could fill in is neutral for every function.
    """
    how = zip(op.params["padding"], op.params["base_dilation"], strict=True)
    full = [d for d, (edges, base) in enumerate(how) if tuple(edges) == (0, 0) and base == 1]
    return _sliding_rows(op, op.ins[0], op.outs[0], exchanges=full)


# ---- derivatives of a maximum over windows ------------------------------------------------------


def _never_chosen(params: dict[str, Any], dtype: Any) -> np.ndarray:
    """The scalar that a selection never prefers to an element; it serves as padding."""
    return neutral("max" if params["select_prim"].name in ("ge", "gt") else "min", dtype)


# The tangent of the element that each window of the second operand chooses; linear in the tangents,
# the first operand.
rule(
    "select_and_gather_add",
    traits=Traits(moves=True),
    local=_reduce_local,
    exchanges=window_exchanges,
)(lambda op: _sliding_rows(op, op.ins[0], op.outs[0], moved_rows(op, (0,))))


def _touching(windows: Windows, n: int) -> tuple[Need, Need]:
    """Two ranges for each device of a mesh axis: the windows that touch its elements, and the
    elements that these windows read."""
    touching = Windows(
        size=windows.out,
        out=windows.size,
        low=windows.window - 1 - windows.low,
        window=windows.window,
        base=windows.stride,
    )
    cotangents = touching.need(n, is_whole=True)
    reads = [*map(windows.first, cotangents.starts)]
    width = windows.positions_read(cotangents.width)
    return cotangents, ranges(windows.size, -(-windows.size // n), reads, width)


def _scatter_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Runs all windows that touch the shard, on the elements that they read, and keeps the shard's
    own elements of the result."""
    source, operand = args
    cuts = []
    for d, windows, ((axis, n),) in split_windows(ctx, 1, ctx.global_ins[0]):
        cotangents, read = _touching(windows, n)
        source = fetch_filled(ctx, source, d, axis, cotangents, np.zeros((), source.dtype))
        operand = fetch_filled(
            ctx, operand, d, axis, read, _never_chosen(ctx.params, operand.dtype)
        )
        # The shard may have elements before or after those that windows read: pad both sides.
        chunk = ctx.local_ins[1][d]
        room = max(0, *(abs(chunk * i - s) for i, s in enumerate(read.starts)), chunk)
        config = [(room, room, 0) if e == d else (0, 0, 0) for e in range(operand.ndim)]
        cuts.append((d, config, ctx.in_offset(1, d) - of_device(read.starts, axis) + room, chunk))
    dims = [d for d, *_ in cuts]
    (out,) = bind_with(ctx, (source, operand), **changed_along(ctx.params, dims, padding=(0, 0)))
    for d, config, start, chunk in cuts:
        out = lax.dynamic_slice_in_dim(
            lax.pad(out, np.zeros((), out.dtype), config), start, chunk, d
        )
    return [out]


def _scatter_needs(op: Op, dim: int) -> Iterator[tuple[int, Need]]:
    """What devices need of the cotangents and of the operand."""
    source, operand = op.ins
    windows = Windows.of(op.params, dim, operand.shape[dim], source.shape[dim])
    return enumerate(_touching(windows, op.axis_size))


# Adds each window's cotangent to the element that the window of the second operand chooses; linear
# in the cotangents, the first operand.
rule(
    "select_and_scatter_add",
    traits=Traits(linear_map=True),
    local=_scatter_local,
    exchanges=exchanging(_scatter_needs),
)(lambda op: _sliding_rows(op, op.ins[1], op.ins[0], monoid_rows(op, "sum", positions=(0,))))


# With any pair of functions and an initial value: only dims along which windows do not slide
# split.
rule("select_and_scatter", traits=Traits(), local=bind_with)(
    lambda op: _sliding_rows(op, op.ins[0], op.ins[1], exchanges=())
)
