"""Decompositions, solves and Fourier transforms: leading batch dims split, each matrix stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.signatures.factors import FactorMap, linear_rows, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, rule

_CORE: dict[str, tuple[int, ...]] = {
    "cholesky": (2,),
    "eig": (2,),
    "eigh": (2,),
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
"""For each operand, how many trailing dims one matrix or vector has."""

_LINEAR_IN = {"triangular_solve": 1, "tridiagonal_solve": 3, "ormqr": 2}
"""The operand that a solve or a product is linear in."""


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return bind_with(ctx, args)


@rule(*_CORE, local=_local)
def _batched(op: Op) -> Sequence[Row]:
    batch = len(op.ins[0].shape) - _CORE[op.name][0]
    letters = tuple(f"b{i}" for i in range(batch))
    ins, outs = (tuple(letters + (None,) * (len(a.shape) - batch) for a in avals) for avals in (op.ins, op.outs))
    rows = split_rows(op, FactorMap(ins=ins, outs=outs))
    return [*rows, *(linear_rows(op, (_LINEAR_IN[op.name],)) if op.name in _LINEAR_IN else [])]


@rule("fft", local=_local)
def _fft(op: Op) -> Sequence[Row]:
    """Linear; the transformed dims are the last ones."""
    batch = len(op.ins[0].shape) - len(op.params["fft_lengths"])
    dims = tuple(f"b{i}" if i < batch else None for i in range(len(op.ins[0].shape)))
    return [*split_rows(op, FactorMap(ins=(dims,), outs=(dims,))), *linear_rows(op)]
