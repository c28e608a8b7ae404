"""`ragged_dot_general`: each group of rows is multiplied with a matrix of its own. Rows (tokens)
split, and so do groups (experts).

Where rows are split, each device counts how much of each group its shard has. Where groups are
split, each device counts from the first row of its first group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import Dims, FactorMap, admissible, factor_atom, split_rows
from sbp.signatures.families.contraction import bilinear_rows, dot_factors
from sbp.signatures.kernels.shards import without_padding
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, add_kernel, bind_with, rule
from sbp.signatures.traits import Traits
from sbp.types import B, P, Split

add_kernel(
    Kernel(
        name="ragged_shards", summary="each device counts how much of each group lies in its shard"
    )
)
add_kernel(
    Kernel(
        name="ragged_groups",
        summary=(
            "each device multiplies the rows of its own groups, zeros elsewhere; the parts add up"
        ),
    )
)


@dataclass(frozen=True, slots=True)
class _Roles:
    """The factors of a ragged product, named as in `dot_factors`; the groups are `g`.

    Arguments:
      lhs: factors of the left operand.
      rhs: factors of the right operand.
      sizes: factors of the group sizes.
      out: factors of the result.
      ragged: the factor that the groups divide.
    """

    lhs: Dims
    rhs: Dims
    sizes: Dims
    out: Dims
    ragged: str


def _roles(params: dict[str, Any], ranks: Sequence[int]) -> _Roles:
    """The factors of a ragged product.

    Arguments:
      params: parameters of the `ragged_dot_general`.
      ranks: numbers of dims of its operands: left, right, group sizes.
    """
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
    return _Roles(lhs, tuple(rhs), sizes, ("g", *out) if ragged[0] == "k" else tuple(out), ragged)


def _of_context(ctx: LocalContext) -> _Roles:
    return _roles(ctx.params, [len(a.shape) for a in ctx.global_ins])


def _before(sizes: Any) -> Any:
    """The number of rows before each group."""
    return jnp.cumsum(sizes, -1) - sizes


def _spread(x: Any, factors: Dims, over: Dims, shape: Sequence[int]) -> Any:
    """A mask broadcast to a value that has all factors of the mask.

    Arguments:
      x: the mask.
      factors: its factors.
      over: the factors of the value.
      shape: the shape of the value.
    """
    return lax.broadcast_in_dim(x, tuple(shape), [over.index(f) for f in factors])


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Multiplies shards.

    The padding of both operands along contracted dims becomes zero (zero times a NaN in the other
    operand's padding would be NaN), and so do padded matrices, which no row multiplies.
    """
    roles = _of_context(ctx)
    operands = list(args[:2])
    for k, factors in enumerate((roles.lhs, roles.rhs)):
        dims = [d for d, f in enumerate(factors) if f is not None and (f[0] == "k" or f == "g")]
        operands[k] = without_padding(ctx, k, operands[k], tuple(dims), "sum")
    lhs, rhs = operands
    sizes = args[2].astype(jnp.int32)
    at = roles.lhs.index(roles.ragged)
    if ctx.in_axes(0, at):
        start, extent = ctx.in_offset(0, at), ctx.in_extent(0, at)
        first = _before(sizes)
        sizes = jnp.maximum(
            jnp.minimum(first + sizes, start + extent) - jnp.maximum(first, start), 0
        )
    total = ctx.global_ins[2].shape[-1]
    if roles.out[0] == "g":
        groups, first_group = ctx.local_outs[0][0], ctx.out_offset(0, 0)
    elif "g" in roles.rhs:
        groups, first_group = (
            rhs.shape[roles.rhs.index("g")],
            ctx.in_offset(1, roles.rhs.index("g")),
        )
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
    others = tuple(f for f in roles.sizes if f != "g")

    def kept(x: Any, factors: Dims) -> Any:
        """The value with zeros in the rows before the first group of this shard."""
        rows = lax.broadcasted_iota(
            jnp.int32, (*skipped.shape, x.shape[factors.index(roles.ragged)]), skipped.ndim
        )
        return jnp.where(
            _spread(rows >= skipped[..., None], (*others, roles.ragged), factors, x.shape),
            x,
            jnp.zeros((), x.dtype),
        )

    if roles.out[0] == "g":
        return bind_with(ctx, (kept(lhs, roles.lhs), kept(rhs, roles.rhs), counted))
    (out,) = bind_with(ctx, (lhs, rhs, counted))
    return [kept(out, roles.out)]


@rule(
    "ragged_dot_general", traits=Traits(pointwise=True, contracts=True, scales="each"), local=_local
)
def _ragged_dot_general(op: Op) -> Sequence[Row]:
    """Other dims split as in `dot_general`; the ragged dim splits with the kernel `ragged_shards`,
    groups with `ragged_groups`."""
    if len(op.ins) != 3 or op.params.get("group_offset") is not None:
        return []
    roles = _roles(op.params, [len(a.shape) for a in op.ins])

    def without(dims: Dims) -> Dims:
        return tuple(None if f in ("g", roles.ragged) else f for f in dims)

    ins = tuple(map(without, (roles.lhs, roles.rhs, roles.sizes)))
    sums = "sum" in admissible(op.outs[0].dtype)
    m = FactorMap(
        ins=ins, outs=(without(roles.out),), contract="sum" if sums else None, masks_padding=True
    )
    rows = [*split_rows(op, m), *bilinear_rows(op)]

    ragged = tuple(factor_atom(dims, roles.ragged) for dims in (roles.lhs, roles.rhs))
    if roles.ragged in roles.out:
        rows.append(
            Row((*ragged, B), (factor_atom(roles.out, roles.ragged),), kernel="ragged_shards")
        )
    elif sums:
        rows.append(Row((*ragged, B), (P,), kernel="ragged_shards"))
    if roles.out[0] == "g":
        rows.append(Row((B, B, B), (Split(0),), kernel="ragged_groups"))
    elif "g" in roles.rhs and sums:
        rows.append(Row((B, factor_atom(roles.rhs, "g"), B), (P,), kernel="ragged_groups"))
    return rows
