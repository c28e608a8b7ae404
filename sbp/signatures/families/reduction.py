"""Reductions, cumulative operators, searches and sorts."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.signatures.factors import admissible, monoid_rows, rows_beside, rows_without
from sbp.signatures.kernels.halo import bytes_beside
from sbp.signatures.kernels.shards import along, neutral, without_padding
from sbp.signatures.rule import (
    Kernel,
    LocalContext,
    Op,
    Row,
    Sent,
    Traits,
    bind_with,
    rule,
)
from sbp.types import B, Split, Unreduced

# ---- gathered results ---------------------------------------------------------------------------


def _gathers(parts: Callable[[Op], Sequence[float]]) -> Callable[[Op, Row], tuple[Sent, ...]]:
    """What a kernel sends in which each device sends parts of its own to all others, each part in a
    collective of its own.

    Arguments:
      parts: gives the bytes of the parts that one device has.
    """
    return lambda op, _: (Sent("all_gather", (op.axis_size - 1) * sum(parts(op)), len(parts(op))),)


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


@along(lambda params, _: params["axis"])
def _cumulative_local(
    ctx: LocalContext, args: Sequence[Any], dim: int, axes: Sequence[tuple[str, int]]
) -> list[Any]:
    """Runs the operator on the shard, gathers the totals of all shards, and joins the earlier ones
    in."""
    (x,) = args
    name, reverse = ctx.primitive.name, ctx.params["reverse"]
    monoid = _PREFIX_MONOIDS.get(
        name, "max"
    )  # cumlogsumexp starts from the logarithm of 0, as a maximum
    x = without_padding(ctx, 0, x, (dim,), monoid)
    (own,) = bind_with(ctx, (x,))
    total = lax.index_in_dim(own, 0 if reverse else own.shape[dim] - 1, dim)
    for axis, _ in reversed(axes):
        totals = lax.all_gather(total, axis)
        place, mine = lax.broadcasted_iota(jnp.int32, totals.shape, 0), lax.axis_index(axis)
        before = jnp.where(
            place > mine if reverse else place < mine, totals, neutral(monoid, x.dtype)
        )
        own = _JOIN[name](own, _join_totals(ctx, before))
        total = _join_totals(ctx, totals)
    return [own]


def _join_totals(ctx: LocalContext, totals: Any) -> Any:
    """The join of all shards' totals: the last result of the operator itself along the leading
    dim."""
    (running,) = bind_with(ctx, (totals,), axis=0, reverse=False)
    return lax.index_in_dim(running, running.shape[0] - 1, 0, keepdims=False)


@rule(
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "cumlogsumexp",
    traits=lambda name: Traits(
        pointwise=name in _PREFIX_MONOIDS,
        reduces=_PREFIX_MONOIDS.get(name, ""),
        scales="together" if _PREFIX_MONOIDS.get(name) in ("sum", "max", "min") else "",
    ),
    local=_cumulative_local,
    kernels=(
        Kernel(
            name="prefix",
            summary="totals of all shards are gathered; those before are joined in",
            # The total of the shard.
            sends=_gathers(lambda op: [bytes_beside(op.ins[0], op.params["axis"])]),
        ),
    ),
)
def _cumulative(op: Op) -> Sequence[Row]:
    """Other dims split; the operator's own dim splits with the kernel `prefix`."""
    axis = int(op.params["axis"])
    prefix = Row((Split(axis),), (Split(axis),), kernel="prefix")
    is_complex = jnp.issubdtype(op.ins[0].dtype, np.complexfloating)
    is_joined = not is_complex or op.name in ("cumsum", "cumprod")
    return [
        *rows_beside(op, [axis]),
        *monoid_rows(op, *filter(None, [_PREFIX_MONOIDS.get(op.name)])),
        *([prefix] if op.ins[0].shape[axis] > 0 and is_joined else []),
    ]


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


def _reduce_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Replaces padding along reduced dims by the neutral element, then reduces."""
    return bind_with(
        ctx,
        [without_padding(ctx, 0, args[0], tuple(ctx.params["axes"]), _MONOID[ctx.primitive.name])],
    )


@rule(
    *_MONOID,
    traits=lambda name: Traits(
        pointwise=True,
        reduces=_MONOID[name],
        orderless=name != "reduce_prod",
        scales="together" if _MONOID[name] in ("sum", "max", "min") else "",
    ),
    local=_reduce_local,
)
def _reduce(op: Op) -> Sequence[Row]:
    """Other dims split; a reduced dim splits with a partial result."""
    monoid = _MONOID[op.name]
    # A reduction commutes with its own monoid: a sum of partial sums is a partial sum.
    return [*rows_without(op, op.params["axes"], monoid), *monoid_rows(op, monoid)]


rule("reduce_xor", traits=Traits(), local=bind_with)(lambda op: rows_without(op, op.params["axes"]))


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
    for d in sorted(dims, reverse=True):
        xs = fold(combine, xs, d)
    for d in sorted(dims, reverse=True):
        for axis, _ in reversed(split[d]):
            xs = fold(combine, [lax.all_gather(x, axis) for x in xs], 0)
    return combine([jnp.broadcast_to(s, x.shape) for s, x in zip(starts, xs, strict=True)], xs)


@rule(
    "reduce",
    traits=Traits(),
    local=_reduce_by_local,
    kernels=(
        Kernel(
            name="reduced_shards",
            summary="the results of all shards are gathered and reduced together",
            sends=_gathers(lambda op: [*map(bytes_beside, op.outs)]),
        ),
    ),
)
def _reduce_by(op: Op) -> Sequence[Row]:
    """A reduction by any associative function: other dims split; a reduced dim that the axis size
    divides splits with the kernel `reduced_shards`. Padding has no neutral element here."""
    count, reduced = len(op.ins) // 2, op.params["dimensions"]
    has_elements = all(op.ins[0].shape[d] for d in reduced)
    along = [
        Row((Split(d),) * count + (B,) * count, (B,) * count, kernel="reduced_shards")
        for d in reduced
        if has_elements and op.divides(op.ins[0].shape[d])
    ]
    return [*rows_without(op, reduced), *along]


rule("approx_top_k", traits=Traits(), local=bind_with)(
    lambda op: rows_beside(op, [op.params["reduction_dimension"] % len(op.ins[0].shape)])
)


# ---- folds --------------------------------------------------------------------------------------
# Folds along a dim by a function of pairs of elements, without an initial value.


Combine = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Combines the elements of two lists of arrays of one shape, one by one."""


def by_jaxpr(jaxpr: Any) -> Combine:
    """The function of a `reduce` on arrays.

    Arguments:
      jaxpr: takes the scalars of the left elements, then those of the right ones.
    """
    of_scalars = jnp.vectorize(lambda *scalars: tuple(_jax.eval_jaxpr(jaxpr, scalars)))
    return lambda left, right: list(of_scalars(*left, *right))


def fold(combine: Combine, xs: Sequence[Any], dim: int) -> list[Any]:
    """The elements along a dim, combined in their order, in pairs of neighbours.

    Arguments:
      combine: is associative; no neutral element is needed.
      xs: arrays of one shape, with at least one element along the dim.
      dim: it is not in the results.
    """
    xs = list(xs)
    while (size := xs[0].shape[dim]) > 1:
        paired = size - size % 2
        left = [lax.slice_in_dim(x, 0, paired, 2, dim) for x in xs]
        right = [lax.slice_in_dim(x, 1, paired, 2, dim) for x in xs]
        both = combine(left, right)
        if paired < size:
            alone = [lax.slice_in_dim(x, paired, size, 1, dim) for x in xs]
            both = [lax.concatenate(p, dim) for p in zip(both, alone, strict=True)]
        xs = both
    return [lax.index_in_dim(x, 0, dim, keepdims=False) for x in xs]


# ---- searches and sorts -------------------------------------------------------------------------
# `argmax`, `argmin`, `top_k` and `sort`. Along a split dim, each device searches its own shard, and
# the devices compare their results; a sorted dim does not split.


_NOWHERE = np.int32(np.iinfo(np.int32).max)
"""The index of padding: larger than every index of an element."""


# ---- argmax and argmin: pairs of a value and its index ------------------------------------------


@along(lambda params, _: params["axes"][0])
def _extreme_local(
    ctx: LocalContext, args: Sequence[Any], dim: int, axes: Sequence[tuple[str, int]]
) -> list[Any]:
    """Compares the winners of all shards, each with its index. Among equal elements the first wins;
    NaNs count as equal. The winner's value is reduced, since TPU gathers elements slowly."""
    name = "max" if ctx.primitive.name == "argmax" else "min"
    extreme = jnp.max if name == "max" else jnp.min
    x = without_padding(ctx, 0, args[0], (dim,), name)
    (at,) = bind_with(ctx, (x,), index_dtype=np.dtype(np.int32))
    value = extreme(x, dim)
    index = jnp.where(at < ctx.in_extent(0, dim), at + ctx.in_offset(0, dim), _NOWHERE)
    for axis, _ in reversed(axes):
        values, indices = lax.all_gather(value, axis), lax.all_gather(index, axis)
        value = extreme(values, 0)
        ties = (values == value) | ((values != values) & (value != value))
        index = jnp.min(jnp.where(ties, indices, _NOWHERE), 0)
    return [index.astype(ctx.global_outs[0].dtype)]


@rule(
    "argmax",
    "argmin",
    traits=Traits(orderless=True),
    local=_extreme_local,
    kernels=(
        Kernel(
            name="pair",
            summary="(value, index) of each shard is gathered and compared",
            # Values, and their indices as int32.
            sends=_gathers(
                lambda op: [
                    op.outs[0].size * itemsize
                    for itemsize in (_jax.itemsize(op.ins[0].dtype), _NOWHERE.itemsize)
                ]
            ),
        ),
    ),
)
def _extreme(op: Op) -> Sequence[Row]:
    """Other dims split; the searched dim splits with the kernel `pair`."""
    (axis,) = op.params["axes"]
    pair = Row((Split(axis),), (B,), kernel="pair")
    return [*rows_without(op, (axis,)), *([pair] if op.ins[0].shape[axis] > 0 else [])]


# ---- top_k --------------------------------------------------------------------------------------


def _top_k_axis(params: dict[str, Any], rank: int) -> int:
    return params["axis"]


@along(_top_k_axis)
def _top_k_local(
    ctx: LocalContext, args: Sequence[Any], dim: int, axes: Sequence[tuple[str, int]]
) -> list[Any]:
    """Gathers the k largest elements of each shard, in order, and takes the k largest of those.
    Among equal elements the first wins, as on one device."""
    ((axis, _),) = axes
    x = without_padding(ctx, 0, args[0], (dim,), "max")
    values, at = bind_with(ctx, (x,), k=min(ctx.params["k"], x.shape[dim]))
    values = lax.all_gather(values, axis, axis=dim, tiled=True)
    indices = lax.all_gather(
        at + jnp.asarray(ctx.in_offset(0, dim), at.dtype), axis, axis=dim, tiled=True
    )
    best, chosen = bind_with(ctx, (values,), k=ctx.params["k"])
    return [best, jnp.take_along_axis(indices, chosen, dim)]


def _candidates(op: Op) -> Sequence[int]:
    """Bytes of the k best elements of a shard, or of the whole shard if that is shorter: of the
    values, and of the indices."""
    dim = _top_k_axis(op.params, len(op.ins[0].shape))
    size = op.ins[0].shape[dim]
    kept = min(op.params["k"], -(-size // op.axis_size)) * op.ins[0].size // size
    return [kept * _jax.itemsize(a.dtype) for a in op.outs]


@rule(
    "top_k",
    traits=Traits(scales="together", orderless=True),
    local=_top_k_local,
    kernels=(
        Kernel(
            name="candidates",
            summary="the k best of each shard are gathered, the best of those kept",
            sends=_gathers(_candidates),
            nests=False,
        ),
    ),
)
def _top_k(op: Op) -> Sequence[Row]:
    """Other dims split; the searched dim splits with the kernel `candidates`."""
    axis = _top_k_axis(op.params, len(op.ins[0].shape))
    best = Row((Split(axis),), (B, B), kernel="candidates")
    return [*rows_beside(op, [axis]), *([] if 0 in op.ins[0].shape else [best])]


# ---- sort ---------------------------------------------------------------------------------------


@rule("sort", traits=Traits(moves=True, scales="together", orderless=True), local=bind_with)
def _sort(op: Op) -> Sequence[Row]:
    """Other dims split."""
    return [*rows_beside(op, [int(op.params["dimension"])]), *_moved_along(op)]


def _moved_along(op: Op) -> list[Row]:
    """Rows in which operands that are not keys are partial: the keys, which are B, determine the
    order of a stable sort."""
    keys = op.params["num_keys"]
    moved = op.ins[keys:]
    if not moved or not op.params["is_stable"]:
        return []
    common = set.intersection(*(set(admissible(a.dtype)) for a in moved))
    atoms = [(B,) * keys + (Unreduced(m),) * len(moved) for m in sorted(common)]
    return [Row(a, a) for a in atoms]
