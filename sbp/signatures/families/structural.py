"""Primitives that move elements or rearrange whole dims."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import (
    FactorMap,
    monoid_rows,
    moved_rows,
    owned_monoid,
    rows_beside,
    rows_without,
    split_rows,
)
from sbp.signatures.kernels.halo import (
    Exchange,
    Need,
    Windows,
    fetch,
    padded_shard,
    ranges,
)
from sbp.signatures.kernels.shards import (
    ReshapeGroup,
    along,
    changed_along,
    owned_along,
    picked_along,
    split_groups,
)
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, Traits, bind_with, rule
from sbp.trace.slices import Piece, join_slices
from sbp.types import Atom, B, Split, Unreduced

# ---- moves along a dim --------------------------------------------------------------------------
# Primitives that move elements along a dim: `slice`, `split`, `pad`, `rev`, `reshape`. Along a
# split dim, devices exchange elements with their neighbours.


def split_dim(row: Row) -> int:
    """The dim that a row splits in all of its results."""
    (atom,) = set(row.outs)
    assert isinstance(atom, Split)
    return atom.dim


def halo_rows(op: Op, dims: Sequence[int], aligned: Collection[int] = ()) -> list[Row]:
    """Rows that split a dim of operands and results; an operand shorter than the mesh axis stays B.

    Arguments:
      op: the equation.
      dims: the dims to split, one for each row.
      aligned: the dims of `dims` along which the kernel sends nothing.
    """

    def atom(aval: Any, d: int) -> Atom:
        return Split(d) if len(aval.shape) > d and aval.shape[d] >= op.axis_size else B

    rows = [
        Row(
            tuple(atom(a, d) for a in op.ins),
            (Split(d),) * len(op.outs),
            kernel="aligned" if d in aligned else "halo",
        )
        for d in dims
        if all(a.shape[d] > 0 for a in (*op.ins, *op.outs) if a.shape)
    ]
    return [row for row in rows if any(isinstance(a, Split) for a in row.ins)]


def exchanging(
    needs_of: Callable[[Op, int], Iterable[tuple[int, Need]]],
) -> Callable[[Op, Row], list[Exchange]]:
    """The `exchanges` of a rule: one for each need of an operand that is split.

    Arguments:
      needs_of: gives positions of operands, each with what devices need of it, from the equation
          and the dim that a row splits.
    """

    def exchanges(op: Op, row: Row) -> list[Exchange]:
        d = split_dim(row)
        return [
            Exchange(k, (d,), need, need.width)
            for k, need in needs_of(op, d)
            if row.ins[k] == Split(d)
        ]

    return exchanges


def windows_along(params: dict[str, Any], source: Any, out: Any) -> list[Windows]:
    """For each dim, how the result's elements read the source's.

    Arguments:
      params: parameters of the equation.
      source: aval of what is read.
      out: aval with one element for each window.
    """
    sizes = zip(source.shape, out.shape, strict=True)
    return [Windows.of(params, d, *pair) for d, pair in enumerate(sizes)]


def window_exchanges(op: Op, row: Row) -> list[Exchange]:
    """One exchange for each operand that windows read along the split dim."""
    d, arrays = split_dim(row), [(k, a) for k, a in enumerate(op.ins) if a.shape]
    windows = ((k, windows_along(op.params, a, op.outs[0])[d]) for k, a in arrays)
    return [along.exchange(k, d, op.axis_size) for k, along in windows]


def split_windows(
    ctx: LocalContext, operand: int = 0, out: Any = None
) -> Iterator[tuple[int, Windows, tuple[tuple[str, int], ...]]]:
    """The dims that are split and along which results read other elements than their own, each with
    its windows and with the mesh axes that split it.

    Arguments:
      ctx: the kernel's place.
      operand: the position of what is read.
      out: aval with one element for each window; None for the result.
    """
    out = ctx.global_outs[0] if out is None else out
    for d, windows in enumerate(windows_along(ctx.params, ctx.global_ins[operand], out)):
        if ctx.in_axes(operand, d) and not windows.is_identity:
            yield d, windows, ctx.in_axes(operand, d)


def fetch_windows(
    ctx: LocalContext, xs: Sequence[Any], fills: Sequence[Any]
) -> tuple[Sequence[Any], list[int]]:
    """Operands with the elements that their windows read along split dims; and the dims along which
    devices exchange elements. There, the results have read padding and holes between elements.

    Arguments:
      ctx: the kernel's place.
      xs: shards of the operands.
      fills: for each operand, the scalar for padding; None where its values do not matter.
    """
    dims = []
    for d, windows, axes in split_windows(ctx):
        if ctx.out_axes(0, d) and not windows.is_aligned(math.prod(n for _, n in axes)):
            (over,) = axes
            pairs = zip(xs, fills, strict=True)
            xs = [padded_shard(ctx, x, d, over, windows, fill) for x, fill in pairs]
            dims.append(d)
    return xs, dims


def _window_rows(op: Op, windows: Sequence[Windows]) -> list[Row]:
    """The rows of a slice or a pad: dims that it does not cut or pad split, and the others with an
    exchange where elements change shards."""
    moved = [d for d, along in enumerate(windows) if not along.is_identity]
    aligned = [d for d in moved if windows[d].is_aligned(op.axis_size)]
    return [*rows_beside(op, moved), *moved_rows(op), *halo_rows(op, moved, aligned)]


# ---- slice --------------------------------------------------------------------------------------


def _slice_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Slices the shard. Where a split dim is cut, the device has the elements of its own results or
    fetches them if the result is split there; otherwise it puts the elements that it owns at their
    places."""
    (x,), fetched = fetch_windows(ctx, args, (None,))
    owned = {d: windows for d, windows, _ in split_windows(ctx) if not ctx.out_axes(0, d)}
    ends = enumerate(ctx.params["limit_indices"])
    (out,) = bind_with(
        ctx,
        (x,),
        limit_indices=tuple(x.shape[d] if ctx.in_axes(0, d) else end for d, end in ends),
        **changed_along(ctx.params, (*fetched, *owned), start_indices=0),
        **changed_along(ctx.params, owned, strides=1),
    )
    # The elements that this device owns, at their places in the whole result.
    for d, windows in owned.items():
        places = lax.iota(jnp.int32, windows.out) * windows.stride - windows.low
        out = owned_along(ctx, out, places - ctx.in_offset(0, d), d)
    return [out]


@rule(
    "slice",
    traits=Traits(moves=True, scales="together"),
    local=_slice_local,
    exchanges=window_exchanges,
    kernels=(
        Kernel(
            name="masked_slice",
            summary="each device puts down the elements it owns; the parts add up",
            # On the sizes that one mesh axis leaves of a dim, a rule for another axis cannot
            # distinguish a slice from the whole dim.
            nests=False,
        ),
    ),
)
def _slice(op: Op) -> Sequence[Row]:
    """Whole dims split; a cut dim splits with halo exchange, or with a partial result."""
    windows = windows_along(op.params, op.ins[0], op.outs[0])
    rows = _window_rows(op, windows)
    monoid = owned_monoid(op.outs[0].dtype)
    if monoid and all(op.outs[0].shape):
        # A partial result that is larger costs more to reduce than the operand to gather. Where
        # nothing is exchanged, the row that splits the result is the better one, too.
        rows += [
            Row((Split(d),), (Unreduced(monoid),), kernel="masked_slice")
            for d in range(len(windows))
            if 2 * op.outs[0].shape[d] < op.ins[0].shape[d]
            and not windows[d].is_aligned(op.axis_size)
        ]
    return rows


# ---- split into several results -----------------------------------------------------------------


def _split_needs(sizes: Sequence[int], n: int) -> list[Need]:
    """For each result, the range of the operand that each device needs."""
    starts = itertools.accumulate(sizes, initial=0)
    reads = (
        Windows(size=sum(sizes), out=size, low=-start)
        for size, start in zip(sizes, starts, strict=False)
    )
    return [windows.need(n, is_whole=True) for windows in reads]


@along(lambda params, _: params["axis"])
def _split_local(
    ctx: LocalContext, args: Sequence[Any], dim: int, axes: Sequence[tuple[str, int]]
) -> list[Any]:
    """Fetches, for each result, the elements of this device's shard of it."""
    ((axis, n),) = axes
    return [fetch(ctx, args[0], dim, axis, need) for need in _split_needs(ctx.params["sizes"], n)]


@rule(
    "split",
    traits=Traits(moves=True, scales="together"),
    local=_split_local,
    # One exchange for each result.
    exchanges=exchanging(
        lambda op, d: (
            (0, need) for need in _split_needs([a.shape[d] for a in op.outs], op.axis_size)
        )
    ),
)
def _split(op: Op) -> Sequence[Row]:
    """Other dims split; the dim that is cut into results splits with halo exchange."""
    axis = op.params["axis"]
    has_shards = all(a.shape[axis] >= op.axis_size for a in op.outs)
    along = halo_rows(op, [axis]) if has_shards else []
    return [*rows_beside(op, [axis]), *moved_rows(op), *along]


# ---- pad ----------------------------------------------------------------------------------------


def _pad_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Fetches the elements of the device's own results along split dims if it does not have them,
    and pads the other dims."""
    (x,), fetched = fetch_windows(ctx, args[:1], args[1:])
    config = list(ctx.params["padding_config"])
    for d, windows, _ in split_windows(ctx):
        edges = windows.low, windows.base - 1 - windows.low, windows.base - 1
        config[d] = (0, 0, 0) if d in fetched else edges
    return bind_with(ctx, (x, args[1]), padding_config=tuple(config))


@rule(
    "pad",
    traits=Traits(moves=True, scales="together"),
    local=_pad_local,
    exchanges=window_exchanges,
)
def _pad(op: Op) -> Sequence[Row]:
    """The operand and the padding value are partial together: parts of the value 1.0 join to 1.0,
    so the padding is right."""
    return _window_rows(op, windows_along(op.params, op.ins[0], op.outs[0]))


# ---- rev ----------------------------------------------------------------------------------------


def _mirrored_range(size: int, n: int) -> Need:
    """The range that each device needs to reverse a dim."""
    chunk = -(-size // n)
    return ranges(size, chunk, [size - chunk * (i + 1) for i in range(n)], chunk)


def _rev_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Fetches mirrored shards, then reverses each."""
    (x,) = args
    for d in ctx.params["dimensions"]:
        if ctx.in_axes(0, d):
            ((axis, n),) = ctx.in_axes(0, d)
            x = fetch(ctx, x, d, axis, _mirrored_range(ctx.global_ins[0].shape[d], n))
    return bind_with(ctx, (x,))


@rule(
    "rev",
    traits=Traits(moves=True, scales="together"),
    local=_rev_local,
    exchanges=exchanging(
        lambda op, d: [(0, _mirrored_range(op.ins[0].shape[d], op.axis_size))],
    ),
)
def _rev(op: Op) -> Sequence[Row]:
    """Other dims split; reversed dims split with halo exchange."""
    turned = op.params["dimensions"]
    return [*rows_beside(op, turned), *moved_rows(op), *halo_rows(op, turned)]


# ---- reshape ------------------------------------------------------------------------------------


def _groups(params: dict[str, Any], x: Any, out: Any) -> tuple[tuple[int, ...], list[ReshapeGroup]]:
    """The order in which a reshape reads the operand's dims, which its parameter `dimensions` may
    transpose; and the groups of dims in this order, none for an operand without elements."""
    given = params.get("dimensions")
    order = tuple(range(len(x.shape))) if given is None else tuple(map(int, given))
    source = [x.shape[d] for d in order]
    # The local shapes of shards that exchanged elements may have other numbers of elements.
    is_whole = math.prod(source) == math.prod(out.shape) > 0
    return order, split_groups(source, out.shape) if is_whole else []


def _reshape_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Exchanges elements where the shards of the two sides differ, then reshapes the shard."""
    order, groups = _groups(ctx.params, ctx.global_ins[0], ctx.global_outs[0])
    x = lax.transpose(args[0], order)
    # The loop starts at the last group, so that dims of earlier groups keep their numbers.
    for group in reversed(groups):
        axes = ctx.in_axes(0, order[group.dims[0]])
        if len(axes) == 1 and not group.keeps_shards(axes[0][1]):
            ((axis, n),) = axes
            first, last = group.dims[0], group.dims[-1]
            flat = x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])
            x = fetch(ctx, flat, first, axis, group.need(n))
    return bind_with(ctx, (x,), new_sizes=ctx.local_outs[0], dimensions=None)


def _reshape_exchanges(op: Op, row: Row) -> list[Exchange]:
    """The exchange of the group of dims whose leading dim the row splits."""
    order, groups = _groups(op.params, op.ins[0], op.outs[0])
    group = next(
        g
        for g in groups
        if (Split(order[g.dims[0]]), Split(g.lead_out)) == (row.ins[0], row.outs[0])
    )
    need = group.need(op.axis_size)
    return [Exchange(0, tuple(order[d] for d in group.dims), need, need.width)]


@rule(
    "reshape",
    traits=Traits(
        moves=True,
        carries="arranged",
        regroups=True,
        scales="together",
        fusion="inlined",
        unnamed=True,
        adapts=True,
    ),
    local=_reshape_local,
    exchanges=_reshape_exchanges,
)
def _reshape(op: Op) -> Sequence[Row]:
    """The leading dim of each group of dims splits.

    The reshape is local if the mesh axis divides the leading dims of both sides, or if the dim is a
    whole group and keeps its size. Otherwise devices exchange elements.
    """
    order, groups = _groups(op.params, op.ins[0], op.outs[0])
    dims: list[str | None] = [None] * len(op.ins[0].shape)
    out: list[str | None] = [None] * len(op.outs[0].shape)
    moved: list[Row] = []
    for group in groups:
        lead, lead_out = order[group.dims[0]], group.lead_out
        if group.keeps_shards(op.axis_size):
            dims[lead] = out[lead_out] = f"g{lead}"
        elif min(op.ins[0].shape[lead], op.outs[0].shape[lead_out]) >= op.axis_size:
            moved.append(Row((Split(lead),), (Split(lead_out),), kernel="halo"))
    return [
        *split_rows(op, FactorMap(ins=(tuple(dims),), outs=(tuple(out),))),
        *moved_rows(op),
        *moved,
    ]


# ---- joins --------------------------------------------------------------------------------------
# `concatenate`, and `join_slices`: slices of arrays, one after the other, such as `jnp.roll`.
# Along a split dim each element goes to the device that needs it, once.


def _pieces(params: dict[str, Any], ins: Sequence[Any]) -> tuple[Piece, ...]:
    """The slices of the operands in the order of the result; a concatenation has all of each.

    Arguments:
      params: parameters of the equation.
      ins: avals of the operands.
    """
    whole = ((k, 0, a.shape[params["dimension"]]) for k, a in enumerate(ins) if a.shape)
    return params["pieces"] if "pieces" in params else tuple(whole)


def _needs(params: dict[str, Any], ins: Sequence[Any], n: int) -> list[Need]:
    """For each operand, the pieces of it that the result has.

    Arguments:
      params: parameters of the equation.
      ins: avals of the operands.
      n: number of devices along the mesh axis.
    """
    pieces = _pieces(params, ins)
    *places, out = itertools.accumulate((size for _, _, size in pieces), initial=0)
    sizes = [a.shape[params["dimension"]] if a.shape else 0 for a in ins]
    placed = [(k, (at, *part)) for at, (k, *part) in zip(places, pieces, strict=True)]
    return [
        Need(-(-size // n), -(-out // n), n, tuple(part for k, part in placed if k == operand))
        for operand, size in enumerate(sizes)
    ]


def _is_in_place(params: dict[str, Any], ins: Sequence[Any], out: Any) -> bool:
    """Whether all arrays are as long as the result, and each slice of an array is in the result
    where the array has it.

    Arguments:
      params: parameters of the equation.
      ins: avals of the operands.
      out: aval of the result.
    """
    d = params["dimension"]
    arrays = [(a, need) for a, need in zip(ins, _needs(params, ins, 1), strict=True) if a.shape]
    return all(a.shape[d] == out.shape[d] for a, _ in arrays) and all(
        at == start for _, need in arrays for at, start, _ in need.parts
    )


def _join_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Joins slices of shards. Along a split dim, takes elements of split operands from their places
    if the result has them there, and fetches them otherwise, and picks those of other operands."""
    d = ctx.params["dimension"]
    axes = next((a for k, x in enumerate(args) if x.ndim and (a := ctx.in_axes(k, d))), ())
    if not axes:
        return [join_slices(*args, dimension=d, pieces=_pieces(ctx.params, ctx.global_ins))]
    stays = _is_in_place(ctx.params, ctx.global_ins, ctx.global_outs[0])
    needs = _needs(ctx.params, ctx.global_ins, axes[0][1])
    out: Any = next(x for x in args if x.ndim) if stays else None
    rest = []
    for k, (x, need) in enumerate(zip(args, needs, strict=True)):
        if x.ndim and ctx.in_axes(k, d) and not stays:
            ((axis, _),) = axes
            out = fetch(ctx, x, d, axis, need, out)
        elif x is not out:
            rest.append((x, need))
    shape = ctx.local_outs[0]
    place = lax.iota(jnp.int32, shape[d]) + ctx.out_offset(0, d)
    for x, need in rest:
        for at, start, size in need.parts:
            picked = x if stays or not x.ndim else picked_along(x, place - at + start, d)
            inside = lax.broadcast_in_dim((place >= at) & (place < at + size), shape, (d,))
            out = jnp.where(inside, picked, out)
    return [out]


@rule(
    *("concatenate", "join_slices"),
    traits=Traits(moves=True, scales="together"),
    local=_join_local,
    exchanges=exchanging(lambda op, _: enumerate(_needs(op.params, op.ins, op.axis_size))),
)
def _joining(op: Op) -> Sequence[Row]:
    """Other dims split; the dim of the result along which the operands lie splits with an
    exchange, or without one where each element stays in its place."""
    axis = int(op.params["dimension"])
    stays = _is_in_place(op.params, op.ins, op.outs[0])
    along = halo_rows(op, [axis], aligned=[axis] if stays else [])
    return [*rows_beside(op, [axis]), *moved_rows(op), *along]


# ---- structure ----------------------------------------------------------------------------------
# Primitives that rearrange whole dims. They keep every partial operand, and each dim splits that
# has the same size on both sides.


_ARRANGES = Traits(
    moves=True,
    carries="arranged",
    pointwise=True,
    scales="together",
    fusion="inlined",
    unnamed=True,
    adapts=True,
)
"""Traits of operators that JAX inserts to give an operand the shape of its reader."""


@rule(
    "transpose",
    traits=replace(_ARRANGES, fusion="free", adapts=False),
    local=bind_with,
)
def _transpose(op: Op) -> Sequence[Row]:
    dims = tuple(f"d{d}" for d in range(len(op.ins[0].shape)))
    out = tuple(dims[i] for i in op.params["permutation"])
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(out,))), *moved_rows(op)]


@rule(
    "broadcast_in_dim",
    traits=_ARRANGES,
    local=lambda ctx, args: bind_with(ctx, args[:1], shape=ctx.local_outs[0]),
)
def _broadcast_in_dim(op: Op) -> Sequence[Row]:
    """Dims that the operand lacks, or has with size 1, split with the operand B: all parts are
    equal there."""
    out: list[str | None] = [f"new{i}" for i in range(len(op.outs[0].shape))]
    dims: list[str | None] = [None] * len(op.ins[0].shape)
    for i, j in enumerate(op.params["broadcast_dimensions"]):
        if op.ins[0].shape[i] == op.outs[0].shape[j]:
            dims[i] = out[j] = f"d{i}"
    return [*split_rows(op, FactorMap(ins=(tuple(dims),), outs=(tuple(out),))), *moved_rows(op)]


rule("squeeze", traits=_ARRANGES, local=bind_with)(
    lambda op: [
        *rows_without(op, [d % len(op.ins[0].shape) for d in op.params["dimensions"]]),
        *moved_rows(op),
    ]
)


@rule("stack", traits=Traits(moves=True, scales="together"), local=bind_with)
def _stack(op: Op) -> Sequence[Row]:
    dims = [f"d{d}" for d in range(len(op.ins[0].shape))]
    out = [*dims[: op.params["axis"]], None, *dims[op.params["axis"] :]]
    return [
        *split_rows(op, FactorMap(ins=(tuple(dims),) * len(op.ins), outs=(tuple(out),))),
        *moved_rows(op),
    ]


rule("unstack", traits=Traits(moves=True, scales="together"), local=bind_with)(
    lambda op: [*rows_without(op, [op.params["axis"]]), *moved_rows(op)]
)


rule("tile", traits=Traits(moves=True, scales="together"), local=bind_with)(
    lambda op: [
        *rows_beside(op, [d for d, times in enumerate(op.params["reps"]) if times != 1]),
        *moved_rows(op),
    ]
)


@rule("bitcast_convert_type", traits=Traits(fusion="free"), local=bind_with)
def _bitcast_convert_type(op: Op) -> Sequence[Row]:
    """Every dim splits except the one that holds the pieces of one element: the last dim of the
    side with the narrower dtype."""
    rank = min(len(op.ins[0].shape), len(op.outs[0].shape))
    ins, out = (
        tuple(f"d{i}" if i < rank else None for i in range(len(a.shape)))
        for a in (op.ins[0], op.outs[0])
    )
    rows = split_rows(op, FactorMap(ins=(ins,), outs=(out,)))
    dtypes = op.ins[0].dtype, op.outs[0].dtype
    if all(jnp.issubdtype(d, jnp.integer) for d in dtypes):
        # `and` and `or` treat each bit independently. Sums and products modulo 2**k are the same
        # for signed and unsigned integers.
        rows += monoid_rows(
            op,
            "and",
            "or",
            *(("sum", "prod") if jnp.iinfo(dtypes[0]).bits == jnp.iinfo(dtypes[1]).bits else ()),
        )
    return rows


def _iota_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Counts from the shard's offset, in int32, and casts at the end.

    In bfloat16, a rounded offset plus a rounded index is not the rounded sum.
    """
    dim, shape = ctx.params["dimension"], ctx.local_outs[0]
    return (
        bind_with(ctx, (), shape=shape)
        if shape[dim] == ctx.global_outs[0].shape[dim]
        else [
            lax.convert_element_type(
                lax.broadcasted_iota(jnp.int32, shape, dim) + ctx.out_offset(0, dim),
                ctx.params["dtype"],
            )
        ]
    )


@rule("iota", traits=Traits(generates="counter", fusion="inlined"), local=_iota_local)
@rule(
    "empty", traits=Traits(), local=lambda ctx, args: bind_with(ctx, args, shape=ctx.local_outs[0])
)
def _created(op: Op) -> Sequence[Row]:
    """Every dim splits. The elements of `empty` have no meaning."""
    return rows_beside(op)


rule("empty2", traits=Traits(), reason="its result is a scalar")(lambda op: ())
