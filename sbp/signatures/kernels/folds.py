"""Folds along a dim by a function of pairs of elements, without an initial value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp import _jax

Combine = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""Combines the elements of two lists of arrays of one shape, one by one."""


def by_jaxpr(jaxpr: Any) -> Combine:
    """The function of a `reduce` on arrays.

    Arguments:
      jaxpr: takes the scalars of the left elements, then those of the right ones.
    """

    def combine(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        shape = left[0].shape
        flat = [x.reshape(-1) for x in (*left, *right)]
        found = jax.vmap(lambda *scalars: _jax.eval_jaxpr(jaxpr, scalars))(*flat)
        return [x.reshape(shape) for x in found]

    return combine


def fold(combine: Combine, xs: Sequence[Any], dim: int, real: Any = None) -> list[Any]:
    """The elements along a dim, combined in their order, in pairs of neighbours.

    Arguments:
      combine: is associative; no neutral element is needed.
      xs: arrays of one shape, with at least one element along the dim.
      dim: it is not in the results.
      real: how many of the elements along the dim are combined: those at the front. Where it is 0,
        the results are arbitrary. None for all.
    """
    xs = list(xs)
    step = 1  # an element stands for so many of the first ones
    while (size := xs[0].shape[dim]) > 1:
        paired = size - size % 2
        left = [lax.slice_in_dim(x, 0, paired, 2, dim) for x in xs]
        right = [lax.slice_in_dim(x, 1, paired, 2, dim) for x in xs]
        both = combine(left, right)
        if real is not None:
            starts = step * (2 * lax.broadcasted_iota(jnp.int32, left[0].shape, dim) + 1)
            both = [jnp.where(starts < real, b, x) for b, x in zip(both, left, strict=True)]
        if paired < size:
            alone = [lax.slice_in_dim(x, paired, size, 1, dim) for x in xs]
            both = [lax.concatenate(p, dim) for p in zip(both, alone, strict=True)]
        xs, step = both, 2 * step
    return [lax.index_in_dim(x, 0, dim, keepdims=False) for x in xs]
