"""Products of two operands, decompositions, solves and Fourier transforms."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp.signatures.factors import (
    Dims,
    FactorMap,
    admissible,
    factor_atom,
    keeps_sums,
    monoid_rows,
    rows_beside,
    split_rows,
)
from sbp.signatures.kernels.rotation import rotate_product, rotation_rows
from sbp.signatures.kernels.shards import in_rows, without_padding
from sbp.signatures.rule import (
    Kernel,
    LocalContext,
    Op,
    Row,
    Shape,
    Traits,
    bind_with,
    rule,
)
from sbp.types import B, P, Split

# ---- products -----------------------------------------------------------------------------------
# `dot_general` and `scaled_dot`. A split batch or free dim splits the result; split contracted dims
# give a partial result; the product is linear in each operand.


def dot_factors(dimension_numbers: Any, lhs_rank: int, rhs_rank: int) -> FactorMap:
    """The factors of a `dot_general`: batch dims `b`, contracted dims `k`, free dims `l` (lhs) and
    `r` (rhs).

    Arguments:
      dimension_numbers: contracted and batch dims of both operands, as `dot_general` has them.
      lhs_rank: number of dims of the left operand.
      rhs_rank: number of dims of the right operand.

    >>> dot_factors((((1,), (0,)), ((), ())), 2, 2).outs
    (('l0', 'r1'),)
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs = [f"l{i}" for i in range(lhs_rank)]
    rhs = [f"r{i}" for i in range(rhs_rank)]
    for n, (i, j) in enumerate(zip(lhs_contract, rhs_contract, strict=True)):
        lhs[i] = rhs[j] = f"k{n}"
    for n, (i, j) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        lhs[i] = rhs[j] = f"b{n}"
    out = [f"b{n}" for n in range(len(lhs_batch))]
    out += [f for f in lhs if f[0] == "l"] + [f for f in rhs if f[0] == "r"]
    return FactorMap(
        ins=(tuple(lhs), tuple(rhs)), outs=(tuple(out),), contract="sum", masks_padding=True
    )


def bilinear_rows(op: Op) -> list[Row]:
    """Rows in which one operand of a product is partial and the others are B: f(a + b, y) = f(a, y)
    + f(b, y).

    The parts must have the dtype of the product or a narrower float dtype. Integer parts wrap:
    their sum modulo 2**8 does not determine a product modulo 2**32. A cast to a narrower float
    would round each part before the sum.
    """
    return [
        row
        for k in (0, 1)
        if keeps_sums(op.ins[k].dtype, op.outs[0].dtype)
        for row in monoid_rows(op, _sum_of(op), positions=(k,))
    ]


def _sum_of(op: Op) -> str:
    """The monoid that joins the products: a product of booleans has `and` in place of products and
    `or` in place of sums."""
    return "or" if all(a.dtype == np.bool_ for a in (*op.ins[:2], *op.outs)) else "sum"


def _dot_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Multiplies shards.

    The padding of both operands along contracted dims becomes zero: zero times a NaN in the other
    operand's padding would be NaN.
    """
    (lhs_contract, rhs_contract), _ = ctx.params["dimension_numbers"]
    lhs = without_padding(ctx, 0, args[0], tuple(lhs_contract), "sum")
    rhs = without_padding(ctx, 1, args[1], tuple(rhs_contract), "sum")

    def product(x: Any, y: Any, dtype: np.dtype) -> Any:
        """Multiplies, with a result of this dtype."""
        changed = {} if dtype == ctx.global_outs[0].dtype else {"preferred_element_type": dtype}
        return bind_with(ctx, (x, y), **changed)[0]

    m = dot_factors(ctx.params["dimension_numbers"], lhs.ndim, rhs.ndim)
    return [rotate_product(ctx, m, (lhs, rhs), product)]


def dot_flops(params: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """Floating-point operations of a product: 2 x batch x free x contracted elements.

    Arguments:
      params: parameters of the `dot_general`.
      ins: local shapes of the operands.
      outs: local shapes of the results.
    """
    return 2.0 * math.prod(ins[0]) * dot_sides(params, ins)[1]


def dot_sides(params: dict[str, Any], ins: Sequence[Shape]) -> tuple[int, int]:
    """Elements of the free dims of each operand of a product: rows and columns of the result.

    Arguments:
      params: parameters of the `dot_general`.
      ins: local shapes of the operands.

    >>> numbers = ((2,), (1,)), ((0,), (0,))
    >>> dot_sides({"dimension_numbers": numbers}, [(64, 1, 128), (64, 128, 2048)])
    (1, 2048)
    """
    contracted, batch = params["dimension_numbers"]
    rows, columns = (
        math.prod(n for d, n in enumerate(ins[k]) if d not in contracted[k] and d not in batch[k])
        for k in range(2)
    )
    return rows, columns


@rule(
    "dot_general",
    traits=Traits(
        pointwise=True,
        contracts=True,
        scales="each",
        multiplies=True,
        flops=dot_flops,
        sides=dot_sides,
    ),
    local=_dot_local,
)
def _dot_general(op: Op) -> Sequence[Row]:
    m = dot_factors(op.params["dimension_numbers"], len(op.ins[0].shape), len(op.ins[1].shape))
    return [
        *split_rows(op, dataclasses.replace(m, contract=_sum_of(op))),
        *bilinear_rows(op),
        *rotation_rows(op, m),
    ]


@rule(
    "scaled_dot",
    traits=Traits(pointwise=True, contracts=True),
    local=bind_with,
)
def _scaled_dot(op: Op) -> Sequence[Row]:
    """A product in which each block of the contracted dims has a scale; these dims split between
    blocks."""
    numbers = op.params["dimension_numbers"]
    m = dot_factors(numbers, len(op.ins[0].shape), len(op.ins[1].shape))
    lhs, rhs = (tuple(f if f and f[0] != "k" else None for f in dims) for dims in m.ins)
    rows = split_rows(op, FactorMap(ins=(lhs, rhs, lhs, rhs), outs=m.outs))
    for dims in zip(*numbers[0], strict=True):
        sizes = [op.ins[k].shape[dims[k % 2]] for k in range(4)]
        if all(op.divides(size) for size in sizes[:2]) and all(
            size == 1 or op.divides(size) for size in sizes[2:]
        ):
            rows.append(
                Row(
                    tuple(Split(dims[k % 2]) if size > 1 else B for k, size in enumerate(sizes)),
                    (P,),
                )
            )
    return rows


# ---- ragged products ----------------------------------------------------------------------------
# `ragged_dot_general`: each group of rows is multiplied with a matrix of its own. Rows (tokens)
# split, and so do groups (experts).
#
# Where rows are split, each device counts how much of each group its shard has. Where groups are
# split, each device counts from the first row of its first group.


def _roles(params: dict[str, Any], ins: Sequence[Any]) -> tuple[FactorMap, str]:
    """The factors of a ragged product, named as in `dot_factors` with `g` for the groups, and the
    factor that the groups divide.

    Arguments:
      params: parameters of the `ragged_dot_general`.
      ins: avals of its operands: left, right, group sizes.
    """
    ranks = [len(a.shape) for a in ins]
    numbers = params["ragged_dot_dimension_numbers"]
    m = dot_factors(numbers.dot_dimension_numbers, ranks[0], ranks[1])
    (lhs_contract, _), (lhs_batch, _) = numbers.dot_dimension_numbers
    lhs, rhs, out = m.ins[0], list(m.ins[1]), list(m.outs[0])
    (position,) = numbers.lhs_ragged_dimensions
    ragged = lhs[position]
    assert ragged is not None
    for d in numbers.rhs_group_dimensions:
        out.remove(rhs[d])
        rhs[d] = "g"
    free = [d for d in range(ranks[0]) if d not in (*lhs_contract, *lhs_batch)]
    outer = {"l": [*lhs_batch, *free], "k": [*lhs_batch, *lhs_contract], "b": list(lhs_batch)}[
        ragged[0]
    ]
    prefix = [lhs[d] for d in outer[: outer.index(position)]]
    sizes: Dims = ("g",) if ranks[2] == 1 else (*prefix, "g")
    results = ("g", *out) if ragged[0] == "k" else tuple(out)
    return FactorMap(ins=(lhs, tuple(rhs), sizes), outs=(results,)), ragged


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Multiplies shards.

    The padding of both operands along contracted dims becomes zero (zero times a NaN in the other
    operand's padding would be NaN), and so do padded matrices, which no row multiplies.
    """
    roles, ragged = _roles(ctx.params, ctx.global_ins)
    (lhs_dims, rhs_dims, size_dims), (out_dims,) = roles.ins, roles.outs
    lhs, rhs = (
        without_padding(
            ctx,
            k,
            args[k],
            tuple(d for d, f in enumerate(dims) if f is not None and (f[0] == "k" or f == "g")),
            "sum",
        )
        for k, dims in enumerate((lhs_dims, rhs_dims))
    )
    sizes = args[2].astype(jnp.int32)
    at = lhs_dims.index(ragged)
    if ctx.in_axes(0, at):
        start, extent = ctx.in_offset(0, at), ctx.in_extent(0, at)
        first = jnp.cumsum(sizes, -1) - sizes  # the number of rows before each group
        sizes = jnp.maximum(
            jnp.minimum(first + sizes, start + extent) - jnp.maximum(first, start), 0
        )
    total = ctx.global_ins[2].shape[-1]
    if out_dims[0] == "g":
        groups, first_group = ctx.local_outs[0][0], ctx.out_offset(0, 0)
    elif "g" in rhs_dims:
        along = rhs_dims.index("g")
        groups, first_group = rhs.shape[along], ctx.in_offset(1, along)
    else:
        groups, first_group = total, 0
    if groups == total:
        return bind_with(ctx, (lhs, rhs, sizes))
    mine = lax.iota(jnp.int32, groups) + first_group
    counted = jnp.where(mine < total, jnp.take(sizes, mine, axis=-1, mode="clip"), 0)
    # Rows before the first group of this shard are counted as part of it, so that the other groups
    # keep their places; `kept` makes them zero.
    skipped = jnp.sum(jnp.where(lax.iota(jnp.int32, total) < mine[0], sizes, 0), -1)
    counted = counted.at[..., 0].add(skipped)
    others = tuple(f for f in size_dims if f != "g")

    def kept(x: Any, factors: Dims) -> Any:
        """The value with zeros in the rows before the first group of this shard."""
        rows = lax.broadcasted_iota(
            jnp.int32, (*skipped.shape, x.shape[factors.index(ragged)]), skipped.ndim
        )
        dims = [factors.index(f) for f in (*others, ragged)]
        is_kept = lax.broadcast_in_dim(rows >= skipped[..., None], x.shape, dims)
        return jnp.where(is_kept, x, jnp.zeros((), x.dtype))

    if out_dims[0] == "g":
        return bind_with(ctx, (kept(lhs, lhs_dims), kept(rhs, rhs_dims), counted))
    (out,) = bind_with(ctx, (lhs, rhs, counted))
    return [kept(out, out_dims)]


@rule(
    "ragged_dot_general",
    traits=Traits(pointwise=True, contracts=True, scales="each"),
    local=_local,
    kernels=(
        Kernel(
            name="ragged_shards",
            summary="each device counts how much of each group lies in its shard",
        ),
        Kernel(
            name="ragged_groups",
            summary=(
                "each device multiplies the rows of its own groups, zeros elsewhere; the parts add"
                " up"
            ),
        ),
    ),
)
def _ragged_dot_general(op: Op) -> Sequence[Row]:
    """Other dims split as in `dot_general`; the ragged dim splits with the kernel `ragged_shards`,
    groups with `ragged_groups`."""
    if len(op.ins) != 3 or op.params.get("group_offset") is not None:
        return []
    roles, ragged = _roles(op.params, op.ins)
    (lhs, rhs, _), (out,) = roles.ins, roles.outs

    def without(dims: Dims) -> Dims:
        return tuple(None if f in ("g", ragged) else f for f in dims)

    sums = "sum" in admissible(op.outs[0].dtype)
    m = FactorMap(
        ins=tuple(map(without, roles.ins)),
        outs=(without(out),),
        contract="sum",
        masks_padding=True,
    )
    rows = [*split_rows(op, m), *bilinear_rows(op)]

    rows_split = (factor_atom(lhs, ragged), factor_atom(rhs, ragged), B)
    if ragged in out or sums:
        result = factor_atom(out, ragged) if ragged in out else P
        rows.append(Row(rows_split, (result,), kernel="ragged_shards"))
    if out[0] == "g":
        rows.append(Row((B, B, B), (Split(0),), kernel="ragged_groups"))
    elif "g" in rhs and sums:
        rows.append(Row((B, factor_atom(rhs, "g"), B), (P,), kernel="ragged_groups"))
    return rows


# ---- decompositions, solves, Fourier transforms -------------------------------------------------
# Decompositions, solves and Fourier transforms. Leading batch dims split; so do columns (or rows)
# of a matrix that are solved independently.


_CORE: dict[str, tuple[int, ...]] = {
    "cholesky": (2,),
    "cholesky_update": (2, 1),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "triangular_solve": (2, 2),
    "tridiagonal": (2,),
    "tridiagonal_solve": (1, 1, 1, 2),
}
"""For each operand, the number of trailing dims that make one matrix or vector."""

_LINEAR_IN = {"triangular_solve": 1, "tridiagonal_solve": 3, "ormqr": 2}
"""The position of the operand in which a solve or a product is linear. Its columns (its rows, where
the matrix is on the right) are independent of each other."""


@rule(
    *_CORE, traits=lambda name: Traits(linear_map=name in _LINEAR_IN, whole=True), local=bind_with
)
def _batched(op: Op) -> Sequence[Row]:
    """Batch dims split; for a solve, also the independent columns or rows of its right-hand
    side."""
    batch = len(op.ins[0].shape) - _CORE[op.name][0]
    letters = tuple(f"b{i}" for i in range(batch))
    ins, outs = (
        [letters + (None,) * (len(a.shape) - batch) for a in avals] for avals in (op.ins, op.outs)
    )
    if op.name not in _LINEAR_IN:
        return split_rows(op, FactorMap(ins=tuple(ins), outs=tuple(outs)))
    solved = _LINEAR_IN[op.name]
    from_left = op.params.get("left_side", op.params.get("left", True))
    ins[solved] = outs[0] = (*letters, None, "columns") if from_left else (*letters, "rows", None)
    return [
        *split_rows(op, FactorMap(ins=tuple(ins), outs=tuple(outs))),
        *monoid_rows(op, "sum", positions=(solved,)),
    ]


@rule(
    "symmetric_product",
    traits=Traits(),
    local=lambda ctx, args: bind_with(
        ctx, (without_padding(ctx, 0, args[0], (args[0].ndim - 1,), "sum"), args[1])
    ),
)
def _symmetric_product(op: Op) -> Sequence[Row]:
    """alpha a a' + beta c. Splitting the columns of a gives a partial result; c is partial then."""
    letters = tuple(f"b{i}" for i in range(len(op.ins[0].shape) - 2))
    a, c = (*letters, None, "k"), (*letters, None, None)
    return split_rows(
        op, FactorMap(ins=(a, c), outs=(c,), contract="sum", accumulate=(1,), masks_padding=True)
    )


def _transform(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    # XLA for CPU ends with an internal error where what reads the result wants it by columns.
    (found,) = bind_with(ctx, args)
    return [lax.platform_dependent(found, cpu=in_rows, default=lambda x: x)]


@rule("fft", traits=Traits(linear_map=True, whole=True), local=_transform)
def _fft(op: Op) -> Sequence[Row]:
    """Linear. The transformed dims are the last ones and do not split."""
    rank = len(op.ins[0].shape)
    transformed = range(rank - len(op.params["fft_lengths"]), rank)
    return [*rows_beside(op, transformed), *monoid_rows(op, "sum")]
