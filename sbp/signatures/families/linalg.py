"""Decompositions, solves and Fourier transforms. Leading batch dims split; so do columns (or rows)
of a matrix that are solved independently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.signatures.factors import FactorMap, linear_rows, split_rows
from sbp.signatures.kernels.shards import without_padding
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule
from sbp.signatures.traits import Traits

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
        *linear_rows(op, (solved,)),
    ]


@rule(
    "symmetric_product",
    traits=Traits(),
    local=lambda ctx, args: bind_with(ctx, (_summed(ctx, args[0]), args[1])),
)
def _symmetric_product(op: Op) -> Sequence[Row]:
    """alpha a a' + beta c. Splitting the columns of a gives a partial result; c is partial then."""
    letters = tuple(f"b{i}" for i in range(len(op.ins[0].shape) - 2))
    a, c = (*letters, None, "k"), (*letters, None, None)
    return split_rows(
        op, FactorMap(ins=(a, c), outs=(c,), contract="sum", accumulate=(1,), masks_padding=True)
    )


def _summed(ctx: LocalContext, a: Any) -> Any:
    return without_padding(ctx, 0, a, (a.ndim - 1,), "sum")


@rule("fft", traits=Traits(linear_map=True, whole=True), local=bind_with)
def _fft(op: Op) -> Sequence[Row]:
    """Linear. The transformed dims are the last ones and do not split."""
    batch = len(op.ins[0].shape) - len(op.params["fft_lengths"])
    dims = tuple(f"b{i}" if i < batch else None for i in range(len(op.ins[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *linear_rows(op)]
