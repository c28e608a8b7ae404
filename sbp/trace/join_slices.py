"""The primitive `join_slices`: slices of arrays, one after the other."""

from __future__ import annotations

from typing import Any

from jax import lax

from sbp import _jax

Piece = tuple[int, Any, Any]
"""(operand, start, size): a slice of an operand of `join_slices` along its dim; of a scalar
operand, `size` copies."""

join_slices_p = _jax.Primitive("join_slices")


def joined(*args: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    """Slices of arrays, one after the other.

    Arguments:
      args: arrays of one shape but for one dim, and scalars.
      dimension: the dim.
      pieces: the slices, in the order of the result.
    """
    array = next(x for x in args if x.ndim)
    found = []
    for operand, start, size in pieces:
        x = args[operand]
        if x.ndim:
            found.append(lax.slice_in_dim(x, start, start + size, axis=dimension))
        else:
            shape = (*array.shape[:dimension], size, *array.shape[dimension + 1 :])
            found.append(lax.broadcast(x, shape))
    return lax.concatenate(found, dimension)


def _abstract(*avals: Any, dimension: int, pieces: tuple[Piece, ...]) -> Any:
    array = next(a for a in avals if a.ndim)
    size = sum(size for _, _, size in pieces)
    return array.update(shape=(*array.shape[:dimension], size, *array.shape[dimension + 1 :]))


join_slices_p.def_impl(joined)
join_slices_p.def_abstract_eval(_abstract)
_jax.mlir.register_lowering(join_slices_p, _jax.mlir.lower_fun(joined, multiple_results=False))
