"""`gather` and the scatters.

Index batches and whole slices split. The moved operand may be partial. Where a dim that indices
point into is split, each device handles the indices that fall on its shard.
"""

import functools
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.signatures.factors import (
    Dims,
    FactorMap,
    admissible,
    monoid_rows,
    moved_rows,
    owned_monoid,
    split_rows,
)
from sbp.signatures.kernels.shards import clip_indices, owned_along, picked_along, without_padding
from sbp.signatures.rule import (
    Kernel,
    LocalContext,
    Op,
    Row,
    Traits,
    bind_with,
    names,
    rule,
)
from sbp.types import B, Split, Unreduced

# ---- dynamic slices -----------------------------------------------------------------------------
# `dynamic_slice` and `dynamic_update_slice`. Along a split dim, each device reads or writes the
# part of the window that falls on its shard.


def _whole_factors(op: Op, small: Any) -> tuple[Dims, list[int]]:
    """The factors of the dims whose window is the whole dim, and the other dims."""
    sizes = list(zip(op.ins[0].shape, small.shape, strict=True))
    dims = tuple(f"d{d}" if a == b else None for d, (a, b) in enumerate(sizes))
    return dims, [d for d, (a, b) in enumerate(sizes) if 0 < b < a]


def _cut(ctx: LocalContext, small: Sequence[int]) -> list[int]:
    """The dims that are split and whose window is not the whole dim."""
    shape = ctx.global_ins[0].shape
    return [d for d in range(len(shape)) if ctx.in_axes(0, d) and small[d] != shape[d]]


def _dynamic_slice_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The elements of the window that this device owns, zeros elsewhere.

    Each element of the window has exactly one owner: shards tile the dim, and the window lies
    inside it.
    """
    x, *starts = args
    whole, window = ctx.global_ins[0].shape, ctx.global_outs[0].shape
    sizes = list(ctx.local_outs[0])
    cut = _cut(ctx, window)
    first = {  # as JAX clamps it: the window lies inside of the dim
        d: clip_indices(starts[d], whole[d] - window[d] + 1)[0] - ctx.in_offset(0, d) for d in cut
    }
    for d in cut:
        starts[d], sizes[d] = jnp.zeros((), starts[d].dtype), x.shape[d]
    (out,) = bind_with(ctx, (x, *starts), slice_sizes=tuple(sizes))
    for d in cut:
        out = owned_along(ctx, out, lax.iota(jnp.int32, window[d]) + first[d], d)
    return [out]


@rule(
    "dynamic_slice",
    traits=Traits(moves=True, scales="together", indices=range(1, sys.maxsize)),
    local=_dynamic_slice_local,
    kernels=(
        Kernel(
            name="masked_dynamic_slice",
            summary="each device puts down the elements it owns, zeros elsewhere; the parts add up",
            # On the sizes that one mesh axis leaves of a dim, a rule for another axis cannot
            # distinguish a window from the whole dim.
            nests=False,
        ),
    ),
)
def _dynamic_slice(op: Op) -> Sequence[Row]:
    """Dims sliced whole split; a cut dim splits with a partial result."""
    dims, cut = _whole_factors(op, op.outs[0])
    starts = (B,) * (len(op.ins) - 1)
    monoid = owned_monoid(op.outs[0].dtype)
    return [
        *split_rows(op, FactorMap(ins=(dims, *((),) * len(starts)), outs=(dims,))),
        *moved_rows(op, (0,)),
        *(
            Row((Split(d), *starts), (Unreduced(monoid),), kernel="masked_dynamic_slice")
            for d in cut
            if monoid
        ),
    ]


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
        start = clip_indices(starts[d], whole[d] - window[d] + 1)[0] - ctx.in_offset(0, d)
        size = min(window[d], x.shape[d])
        here = jnp.clip(start, 0, x.shape[d] - size)
        index = lax.iota(jnp.int32, size) + here - start
        update = picked_along(update, index, d)
        mine = mine & jnp.expand_dims(
            (index >= 0) & (index < window[d]), [k for k in range(x.ndim) if k != d]
        )
        starts[d] = here.astype(starts[d].dtype)
    # `lax.dynamic_slice` counts negative starts from the end; they have been counted already.
    current = lax.dynamic_slice_p.bind(x, *starts, slice_sizes=update.shape)
    return bind_with(
        ctx, (x, jnp.where(jnp.broadcast_to(mine, update.shape), update, current), *starts)
    )


@rule(
    "dynamic_update_slice",
    traits=Traits(moves=True, scales="together", indices=range(2, sys.maxsize)),
    local=_dynamic_update_slice_local,
    kernels=(
        Kernel(
            name="owned_update",
            summary="each device writes the part of the update that falls on its shard",
            nests=False,  # as `masked_dynamic_slice`
        ),
    ),
)
def _dynamic_update_slice(op: Op) -> Sequence[Row]:
    """Dims that the update covers split in all three; a cut dim splits in operand and result."""
    dims, cut = _whole_factors(op, op.ins[1])
    starts = (B,) * (len(op.ins) - 2)
    return [
        *split_rows(op, FactorMap(ins=(dims, dims, *((),) * len(starts)), outs=(dims,))),
        *moved_rows(op, (0, 1)),
        *(Row((Split(d), B, *starts), (Split(d),), kernel="owned_update") for d in cut),
    ]


# ---- dims of indexing ---------------------------------------------------------------------------
# The roles of the dims of a gather or scatter, read from JAX's dimension numbers. A dim is a batch
# dim, or it is read or written whole, or an index picks one element of it, or an index picks a
# window of it.


_OF_GATHER = names("""
    offset_dims collapsed_slice_dims operand_batching_dims start_indices_batching_dims
    start_index_map
""")
_OF_SCATTER = names("""
    update_window_dims inserted_window_dims operand_batching_dims scatter_indices_batching_dims
    scatter_dims_to_operand_dims
""")
"""The attributes of JAX's dimension numbers, in the order of the fields of `Indexing` that they
give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexing:
    """Where indices point in the operand of a gather or scatter. Its slices are the result of a
    gather, or the updates of a scatter.

    Arguments:
      shape: shape of the operand.
      slices: shape of the slices.
      window: the dims of the slices that stand for dims of the operand.
      dropped: dims of the operand that the slices lack, batch dims excepted.
      batch: pairs of a batch dim of the operand and one of the indices.
      pointed: for each component of an index, the dim of the operand that it points into.
    """

    shape: tuple[int, ...]
    slices: tuple[int, ...]
    window: tuple[int, ...]
    dropped: tuple[int, ...]
    batch: tuple[tuple[int, int], ...]
    pointed: tuple[int, ...]

    @staticmethod
    def of(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> "Indexing":
        """The roles that JAX's dimension numbers give to dims.

        Arguments:
          params: parameters of a gather or scatter.
          ins: avals of its operands.
          outs: avals of its results.
        """
        numbers = params["dimension_numbers"]
        gathers = isinstance(numbers, lax.GatherDimensionNumbers)
        window, dropped, operand, indices, pointed = (
            getattr(numbers, name) for name in (_OF_GATHER if gathers else _OF_SCATTER)
        )
        return Indexing(
            shape=tuple(ins[0].shape),
            slices=tuple((outs[0] if gathers else ins[2]).shape),
            window=tuple(window),
            dropped=tuple(dropped),
            batch=tuple(zip(operand, indices, strict=True)),
            pointed=tuple(pointed),
        )

    @property
    def slice_dim(self) -> dict[int, int]:
        """The dim of the slices for each dim of the operand that they have."""
        without = {*self.dropped, *(d for d, _ in self.batch)}
        kept = [d for d in range(len(self.shape)) if d not in without]
        return dict(zip(kept, self.window, strict=True))

    @property
    def outside(self) -> list[int]:
        """The dims of the slices that have one index for each index of the batch."""
        return [d for d in range(len(self.slices)) if d not in self.window]

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each dim of the operand, how many elements a slice has."""
        found = self.slice_dim
        return tuple(self.slices[found[d]] if d in found else 1 for d in range(len(self.shape)))

    @property
    def picked(self) -> list[int]:
        """Dims of the operand where an index picks one element, such as the vocabulary of an
        embedding."""
        return [int(d) for d in self.dropped if d in self.pointed]

    @property
    def windows(self) -> list[int]:
        """Dims of the operand where an index picks a window."""
        sizes = self.sizes
        return [
            int(d) for d in self.pointed if d not in self.dropped and 0 < sizes[d] < self.shape[d]
        ]

    def factors(self, indices_rank: int) -> tuple[Dims, Dims, Dims]:
        """The factors of the operand, the indices and the slices: whole slices `w`, index batches
        `i` and batch dims of the operand `b`.

        Arguments:
          indices_rank: number of dims of the indices.
        """
        operand: list[str | None] = [None] * len(self.shape)
        indices: list[str | None] = [f"i{d}" for d in range(indices_rank - 1)] + [None]
        slices: list[str | None] = [None] * len(self.slices)
        for n, (d, i) in enumerate(self.batch):
            operand[d] = indices[i] = f"b{n}"
        for d, s in self.slice_dim.items():
            # A dim that is read or written whole splits: on a shard, as on the whole operand, its
            # index is clipped to 0, or fills or drops.
            if self.slices[s] == self.shape[d]:
                operand[d] = slices[s] = f"w{d}"
        for d, factor in zip(self.outside, indices[:-1], strict=True):
            slices[d] = factor
        return tuple(operand), tuple(indices), tuple(slices)


# ---- rules --------------------------------------------------------------------------------------


_MODE = lax.GatherScatterMode
_SCATTER_MONOID = {
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}
"""The monoid by which each scatter joins updates to its operand; `scatter` itself overwrites."""


def _gather_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Gathers on the shard. Along a split dim that indices point into, each device reads the
    elements that it owns and sets its other results to zero.

    The owner of an index is the device with the element that the index is clipped to, so each
    result has exactly one owner. An index outside of the dim stays outside on its owner, which
    fills. A window may reach across shards, so each shard gets margins of zeros, as long as a
    window; windows that miss the shard read zeros.
    """
    operand, indices = args
    dims = Indexing.of(ctx.params, ctx.global_ins, ctx.global_outs)
    sizes, shape = ctx.params["slice_sizes"], dims.shape
    windows = [d for d in dims.windows if ctx.in_axes(0, d)]
    picked = [d for d in dims.picked if shape[d] != ctx.local_ins[0][d]]
    # A slice of a whole dim is the shard.
    local_sizes = zip(sizes, shape, ctx.local_ins[0], strict=True)
    changes: dict[str, Any] = {
        "slice_sizes": tuple(min(n, s) if s == whole else s for s, whole, n in local_sizes)
    }
    if not windows and not picked:
        if indices.shape != tuple(ctx.global_ins[1].shape):
            changes["indices_are_sorted"] = False  # padded indices are not sorted
        return bind_with(ctx, args, **changes)
    mine: Any = True
    places = [
        clip_indices(indices[..., c], shape[d] - sizes[d] + 1) for c, d in enumerate(dims.pointed)
    ]
    # Whether the gather fills a slice because it reaches outside of the operand along some dim.
    fills = _MODE.from_any(ctx.params["mode"]) == _MODE.FILL_OR_DROP
    nowhere = jnp.zeros(indices.shape[:-1], jnp.bool_)
    filled = fills & functools.reduce(operator.or_, (outside for _, outside in places), nowhere)
    components = []
    for c, (d, (inside, outside)) in enumerate(zip(dims.pointed, places, strict=True)):
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
    # Indices that other devices own are clipped, so they are not sorted.
    changes["indices_are_sorted"] = False
    (out,) = bind_with(ctx, (operand, jnp.stack(components, -1)), **changes)
    owned = lax.broadcast_in_dim(
        jnp.broadcast_to(mine, indices.shape[:-1]), out.shape, dims.outside
    )
    return [jnp.where(owned, out, jnp.zeros((), out.dtype))]


def _as_int32(index: Any) -> Any:
    """An index clipped to int32. An index that int32 cannot hold is outside of every dim, and so is
    the clipped one."""
    info = jnp.iinfo(index.dtype)
    low, high = max(info.min, -(2**31)), min(info.max, 2**31 - 1)
    return jnp.clip(index, jnp.asarray(low, index.dtype), jnp.asarray(high, index.dtype)).astype(
        jnp.int32
    )


@rule(
    "gather",
    traits=Traits(moves=True, scales="together", indices=range(1, 2)),
    local=_gather_local,
    kernels=(
        Kernel(
            name="masked_gather",
            summary="each device looks up what it owns, zeros elsewhere; the parts add up",
        ),
        Kernel(
            name="masked_windows",
            summary="each device reads the part of each window that it owns; the parts add up",
            nests=False,  # as `masked_dynamic_slice`
        ),
    ),
)
def _gather(op: Op) -> Sequence[Row]:
    """Index batches and whole slices split; a dim that indices point into splits with a partial
    result; the operand may be partial."""
    dims, mode = Indexing.of(op.params, op.ins, op.outs), _MODE.from_any(op.params["mode"])
    operand, indices, out = dims.factors(len(op.ins[1].shape))
    monoid = None if mode == _MODE.ONE_HOT else owned_monoid(op.outs[0].dtype)
    places = [
        *(("masked_gather", d) for d in dims.picked if op.ins[0].shape[d] > 1),
        *(("masked_windows", d) for d in dims.windows),
    ]
    return [
        *split_rows(op, FactorMap(ins=(operand, indices), outs=(out,))),
        *(Row((Split(d), B), (Unreduced(monoid),), kernel=k) for k, d in places if monoid),
        *(
            row
            for row in moved_rows(op, (0,))
            if mode != _MODE.FILL_OR_DROP or _fill_is_joined(op, row.ins[0])
        ),
    ]


def _fill_is_joined(op: Op, atom: Any) -> bool:
    """Whether joining the fill values of all parts gives the fill value.

    It does for idempotent monoids; for sums and products if the fill value is 0 or NaN; for
    products also if it is 1.
    """
    fill = op.params["fill_value"]
    if atom.monoid in ("max", "min", "and", "or"):
        return True
    return (
        jnp.issubdtype(op.outs[0].dtype, jnp.inexact)
        if fill is None or fill != fill
        else fill == 0 or (fill == 1 and atom.monoid == "prod")
    )


def _scatter_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Scatters on the shard. Along a split dim that indices point into, each device writes the
    updates that fall on its shard and drops the others.

    A window may reach across shards, so the shard gets margins of `window` elements on both sides,
    which are cut off at the end.
    """
    operand, indices, updates = args
    dims = Indexing.of(ctx.params, ctx.global_ins, ctx.global_outs)
    mode, shape = _MODE.from_any(ctx.params["mode"]), dims.shape
    monoid = _SCATTER_MONOID.get(ctx.primitive.name)
    if monoid is not None:
        updates = without_padding(ctx, 2, updates, tuple(dims.outside), monoid)
    windows = {d: dims.sizes[d] for d in dims.windows}
    split = [d for d in (*dims.picked, *windows) if shape[d] != ctx.local_ins[0][d]]
    changes: dict[str, Any] = {}
    if split or tuple(indices.shape) != tuple(ctx.global_ins[1].shape):
        # Indices that are padded or dropped are neither sorted nor unique.
        changes = {"indices_are_sorted": False, "unique_indices": False}
    if not split:
        return bind_with(ctx, (operand, indices, updates), **changes)
    local = ctx.local_ins[0]
    margin = [windows[d] if d in split and d in windows else 0 for d in range(operand.ndim)]
    components = []
    for c, d in enumerate(dims.pointed):
        index, whole, size = _as_int32(indices[..., c]), shape[d], windows.get(d, 1)
        if d not in split:
            place = dims.slice_dim.get(d)
            last = operand.shape[d] - (1 if place is None else updates.shape[place])
            components.append(jnp.clip(index, 0, last) if mode == _MODE.CLIP else index)
            continue
        index = jnp.clip(index, 0, whole - size) if mode == _MODE.CLIP else index
        here = index - ctx.in_offset(0, d)
        hits = (index >= 0) & (index <= whole - size) & (here > -size) & (here < local[d])
        components.append(jnp.where(hits, here + margin[d], local[d] + 2 * margin[d]))
    if any(margin):
        operand = lax.pad(operand, jnp.zeros((), operand.dtype), [(m, m, 0) for m in margin])
    if math.prod(args[1].shape[:-1]) == 1:
        # For a single index, XLA's CPU compiler in JAX 0.10 merges the slice that made the shard
        # with the update of one element and loses the bound: an index outside of the shard writes
        # an element of another shard into this one. The barrier keeps the two apart.
        operand = lax.optimization_barrier(operand)
    (out,) = bind_with(
        ctx, (operand, jnp.stack(components, -1), updates), mode=_MODE.FILL_OR_DROP, **changes
    )
    return [lax.slice(out, margin, [m + size for m, size in zip(margin, local, strict=True)])]


@rule(
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    traits=lambda name: Traits(
        moves=name == "scatter",
        scatters=_SCATTER_MONOID.get(name, ""),
        scales="together" if name in ("scatter", "scatter-add", "scatter-sub") else "",
        indices=range(1, 2),
    ),
    local=_scatter_local,
    kernels=(
        Kernel(name="shifted_scatter", summary="each device writes what falls on its shard"),
        Kernel(
            name="shifted_windows",
            summary="each device writes the part of each window that falls on its shard",
            nests=False,  # as `masked_dynamic_slice`
        ),
    ),
)
def _scatter(op: Op) -> Sequence[Row]:
    """Rows that split the updates have a partial operand and a partial result, under the scatter's
    monoid. Whole slices split; so do dims that indices point into."""
    dims = Indexing.of(op.params, op.ins, op.outs)
    operand, indices, updates = dims.factors(len(op.ins[1].shape))
    monoid = _SCATTER_MONOID.get(op.name)
    places = [
        *(("shifted_scatter", d) for d in dims.picked if op.ins[0].shape[d] > 1),
        # JAX pads no keys.
        *(("shifted_windows", d) for d in dims.windows if not _jax.is_extended(op.ins[0].dtype)),
    ]
    # Whether each element is written at most once. If two updates hit one element, JAX does not say
    # which wins, and parts with different winners do not join to the result.
    once = op.params["unique_indices"] or all(size == 1 for size in op.ins[1].shape[:-1])
    moves = admissible(op.outs[0].dtype) if once else ()
    # `x.at[i].apply(f)` is a scatter too, and replaces elements by their own functions.
    applies = op.name == "scatter" and op.params["update_jaxpr"] is not None
    monoids = () if applies else (monoid,) if monoid else moves
    together = monoid_rows(op, *monoids, positions=(0, 2))
    m = FactorMap(
        ins=(operand, indices, updates),
        outs=(operand,),
        contract=monoid,
        accumulate=(0,),
        masks_padding=True,
    )
    return [
        *split_rows(op, m),
        *(Row((Split(d), B, B), (Split(d),), kernel=k) for k, d in places),
        *_folded_rows(op),
        *together,
    ]


_FOLDED = {
    "scatter-add": ("max", "min"),
    "scatter-max": ("min",),
    "scatter-min": ("max",),
    "scatter-mul": ("sum",),
    "scatter-sub": ("max", "min"),
}
"""For each scatter, the monoids that its operation distributes over. With one of them, each device
may apply all updates to its part of the operand."""


def _folded_rows(op: Op) -> list[Row]:
    """Rows in which only the operand is partial, under a monoid that the scatter's operation
    distributes over."""
    wraps = op.name in ("scatter-add", "scatter-sub") and not jnp.issubdtype(
        op.outs[0].dtype, jnp.floating
    )
    return [] if wraps else monoid_rows(op, *_FOLDED.get(op.name, ()), positions=(0,))
