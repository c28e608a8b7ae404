"""dot_general: batch and free factors split the result, contracting ones leave it partial; bilinear in its operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.signatures.factors import FactorMap, multilinear_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule


def dot_factors(params: dict[str, Any], lhs_rank: int, rhs_rank: int) -> FactorMap:
    """The factor map of a dot_general: results have batch, then lhs free, then rhs free dims.

    >>> dot_factors({"dimension_numbers": (((1,), (0,)), ((), ()))}, 2, 2).outs
    (('l0', 'r1'),)
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    lhs = [f"l{i}" for i in range(lhs_rank)]
    rhs = [f"r{i}" for i in range(rhs_rank)]
    for n, (i, j) in enumerate(zip(lhs_contract, rhs_contract, strict=True)):
        lhs[i] = rhs[j] = f"k{n}"
    for n, (i, j) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        lhs[i] = rhs[j] = f"b{n}"
    out = [f"b{n}" for n in range(len(lhs_batch))]
    out += [f for f in lhs if f[0] == "l"] + [f for f in rhs if f[0] == "r"]
    return FactorMap(ins=(tuple(lhs), tuple(rhs)), outs=(tuple(out),), contract="sum")


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, args)


@rule("dot_general", local=_local)
def _dot_general(op: Op) -> Sequence[Row]:
    m = dot_factors(op.params, len(op.ins[0].shape), len(op.ins[1].shape))
    return [*split_rows(op, m), *multilinear_rows(op, (0, 1))]
