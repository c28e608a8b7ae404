"""The shards that rows work on."""

from __future__ import annotations

import functools
from typing import Any

from sbp import _jax
from sbp.infer.space import Code
from sbp.signatures import Op, Row
from sbp.types import Split


def localised(aval: Any, code: Code, n: int) -> Any:
    """The shape, dtype and memory of one of the `n` shards of a value under a code."""
    if code <= 0:
        return aval
    return _split_aval(tuple(aval.shape), aval.dtype, _jax.in_host(aval), code - 1, n)


@functools.lru_cache(maxsize=65536)
def _split_aval(shape: tuple[int, ...], dtype: Any, host: bool, dim: int, n: int) -> Any:
    split = (*shape[:dim], -(-shape[dim] // n), *shape[dim + 1 :])
    return _jax.empty_aval(split, dtype, host=host)


def runs_in_host(row: Row, op: Op) -> bool:
    """Whether a row computes in host memory. The primitive itself does, on shards without padding.
    Kernels of sbp mix their operands with indices and masks, which lie in device memory."""
    return row.kernel == "local" and all(
        op.divides(aval.shape[atom.dim])
        for aval, atom in zip((*op.ins, *op.outs), (*row.ins, *row.outs), strict=True)
        if isinstance(atom, Split)
    )
