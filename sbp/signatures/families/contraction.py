"""`dot_general` and `scaled_dot`. A split batch or free dim splits the result; split contracted
dims give a partial result; the product is linear in each operand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.signatures.factors import FactorMap, admissible, multilinear_rows, split_rows
from sbp.signatures.kernels.rotation import rotated, rotation_rows
from sbp.signatures.kernels.shards import without_padding
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Shape, Traits
from sbp.types import Atom, B, P, Split, Unreduced

OR = Unreduced("or")
"""The parts of a product of booleans join by `or`."""


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
    """Rows in which one operand of a product is partial and the others are B.

    The parts must have the dtype of the product or a narrower float dtype. Integer parts wrap:
    their sum modulo 2**8 does not determine a product modulo 2**32. A cast to a narrower float
    would round each part before the sum.
    """
    out = op.outs[0].dtype
    if "sum" not in admissible(out):
        return (
            [Row(tuple(OR if i == k else B for i in range(len(op.ins))), (OR,)) for k in (0, 1)]
            if _is_boolean(op)
            else []
        )
    rows = []
    for position in (0, 1):
        dtype = op.ins[position].dtype
        wider = (
            out.itemsize > dtype.itemsize
            and jnp.issubdtype(dtype, np.inexact)
            and jnp.issubdtype(out, np.inexact)
        )
        if dtype == out or wider:
            rows += multilinear_rows(op, (position,))
    return rows


def _rows(op: Op, m: FactorMap) -> list[Row]:
    contract = "sum" if "sum" in admissible(op.outs[0].dtype) else "or" if _is_boolean(op) else None
    return [*split_rows(op, dataclasses.replace(m, contract=contract)), *bilinear_rows(op)]


def _is_boolean(op: Op) -> bool:
    """Whether this is a product of booleans: `and` in place of products, `or` in place of sums."""
    return all(a.dtype == np.bool_ for a in (*op.ins[:2], *op.outs))


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
        (found,) = bind_with(ctx, (x, y), **changed)
        return found

    m = dot_factors(ctx.params["dimension_numbers"], lhs.ndim, rhs.ndim)
    return [rotated(ctx, m, (lhs, rhs), product)]


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
    return [*_rows(op, m), *rotation_rows(op, m)]


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
            ins: list[Atom] = [
                Split(dims[k % 2]) if size > 1 else B for k, size in enumerate(sizes)
            ]
            rows.append(Row(tuple(ins), (P,)))
    return rows
