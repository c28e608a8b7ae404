"""Helpers of local kernels: neutral padding, positions in a shard, blocks of equal size, and groups
of dims that a reshape keeps."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from sbp.signatures.kernels.halo import Need, ranges
from sbp.signatures.rule import LocalContext, bind_with


def neutral(monoid: str, dtype: Any) -> Any:
    """The neutral element of a monoid, as a NumPy scalar of the dtype."""
    match monoid:
        case "sum" | "or":
            return np.zeros((), dtype)
        case "prod":
            return np.ones((), dtype)
        case "and":
            return np.array(True) if dtype == np.bool_ else np.array(-1).astype(dtype)
        case _ if dtype == np.bool_:
            return np.array(monoid == "min")
        case _:
            is_float = jnp.issubdtype(dtype, np.floating)
            found = jnp.finfo(dtype) if is_float else jnp.iinfo(dtype)
            least, most = found.min, found.max
            if is_float and np.isinf(np.array(np.inf, dtype)):  # some 8-bit floats have no infinity
                least, most = -np.inf, np.inf
            return np.array(least if monoid == "max" else most, dtype)


def in_rows(x: Any) -> Any:
    """An array laid out row by row, whatever layout the compiler would choose."""
    return (
        x if x.ndim < 2 else with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    )


def reduce_dims(x: Any, monoid: str, dims: int | tuple[int, ...]) -> Any:
    """The reduction of some dims by a monoid, in the dtype of `x`.

    Arguments:
      x: the array.
      monoid: what reduces it.
      dims: the dims, which the result does not have.
    """
    match monoid:
        case "sum" | "prod":  # without a dtype, these widen small integers
            return getattr(jnp, monoid)(x, dims, dtype=x.dtype)
        case "max" | "min":
            return getattr(jnp, monoid)(x, dims)
        case _:
            return getattr(lax, f"reduce_{monoid}")(x, (dims,) if isinstance(dims, int) else dims)


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which the products of several shards are summed: float32 for floats of fewer
    bits."""
    narrow = jnp.issubdtype(dtype, np.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if narrow else dtype


def changed_along(
    params: Mapping[str, Any], dims: Collection[int], **values: Any
) -> dict[str, tuple[Any, ...]]:
    """Parameters with an entry for each dim, with other entries along some dims. Parameters that
    are None are left out.

    Arguments:
      params: parameters of a primitive.
      dims: the dims.
      values: for the name of each parameter, its value along these dims.
    """
    return {
        name: tuple(value if d in dims else own for d, own in enumerate(params[name]))
        for name, value in values.items()
        if params.get(name) is not None
    }


Along = Callable[[LocalContext, Sequence[Any], int, Sequence[tuple[str, int]]], list[Any]]
"""A kernel that takes, after the shards, the dim along which its operator works, and the mesh axes
that split the dim, of which there are some."""


def along(dim_of: Callable[[dict[str, Any], int], int]) -> Callable[[Along], Any]:
    """Decorator: the kernel runs where the dim along which its operator works is split; elsewhere
    the primitive itself runs.

    Arguments:
      dim_of: gives the dim, from the parameters and the rank of the first operand.
    """

    def decorate(kernel: Along) -> Callable[[LocalContext, Sequence[Any]], list[Any]]:
        @functools.wraps(kernel)
        def local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
            dim = dim_of(ctx.params, args[0].ndim)
            axes = ctx.in_axes(0, dim)
            return kernel(ctx, args, dim, axes) if axes else bind_with(ctx, args)

        return local

    return decorate


def without_padding(
    ctx: LocalContext, operand: int, x: Any, dims: tuple[int, ...], monoid: str
) -> Any:
    """A shard with its padding along some dims replaced by the monoid's neutral element.

    It selects and does not multiply by 0: padding may be NaN.

    Arguments:
      ctx: the kernel's place.
      operand: position of the operand.
      x: its shard.
      dims: the dims.
      monoid: the monoid.
    """
    for dim in dims:
        extent = ctx.in_extent(operand, dim)
        if not (isinstance(extent, int) and extent == ctx.local_ins[operand][dim]):
            x = jnp.where(
                lax.broadcasted_iota(jnp.int32, x.shape, dim) < extent, x, neutral(monoid, x.dtype)
            )
    return x


def padded_blocks(x: Any, dim: int, counts: Sequence[int]) -> Any:
    """`x` padded with zeros so that each block of a nested split has the same size.

    Arguments:
      x: a NumPy or JAX array.
      dim: the dim that is split.
      counts: the sizes of the mesh axes that split it, outer axis first.
    """
    numpy = np if isinstance(x, np.ndarray) else jnp
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    blocks, size = 1, x.shape[dim]
    for n in counts:
        x = x.reshape(*before, blocks, size, *after)
        length = -(-size // n)
        x = numpy.pad(x, [(0, n * length - size if d == dim + 1 else 0) for d in range(x.ndim)])
        blocks, size = blocks * n, length
    return x.reshape(*before, blocks * size, *after)


def picked_along(x: Any, index: Any, dim: int) -> Any:
    """The elements at a vector of positions along a dim, clipped to the shard.

    The clipping is done here, not by XLA: the CPU compiler of JAX 0.10 merges the slice that made a
    shard with a read of one element and loses the bound.

    Arguments:
      x: the shard.
      index: the positions.
      dim: the dim.
    """
    return jnp.take(x, jnp.clip(index, 0, x.shape[dim] - 1), axis=dim, mode="clip")


def owned_along(ctx: LocalContext, x: Any, index: Any, dim: int) -> Any:
    """The elements at a vector of positions along a dim; zeros where this device does not own one.

    Arguments:
      ctx: the kernel's place.
      x: a value that has the shard of operand 0 along the dim.
      index: the positions in the shard; those outside of it are of other devices.
      dim: the dim.
    """
    mine = (index >= 0) & (index < ctx.in_extent(0, dim))
    picked = picked_along(x, index, dim)
    return jnp.where(
        lax.broadcast_in_dim(mine, picked.shape, (dim,)), picked, jnp.zeros((), x.dtype)
    )


def clip_indices(index: Any, size: int) -> tuple[Any, Any]:
    """Indices clipped to [0, size) as int32, and whether each was outside.

    The comparison is in the dtype of the indices, which may be too narrow for `size`.
    """
    last = min(size - 1, int(jnp.iinfo(index.dtype).max))
    inside = jnp.clip(index, jnp.asarray(0, index.dtype), jnp.asarray(last, index.dtype))
    return inside.astype(jnp.int32), inside != index


# ---- reshapes -----------------------------------------------------------------------------------
# Reshapes of a split dim: groups of dims that have the same elements on both sides, and the
# exchange between devices where shards differ.


@dataclass(frozen=True, slots=True)
class ReshapeGroup:
    """Dims of a reshape whose elements are the same before and after; their leading dims split.

    Arguments:
      dims: the group's dims of the operand, those with more than one element; the first one leads.
      lead_out: the first such dim of the result.
      rows: the size of the operand's leading dim.
      rows_out: the size of the result's leading dim.
      size: the number of elements of the group.
    """

    dims: tuple[int, ...]
    lead_out: int
    rows: int
    rows_out: int
    size: int

    def keeps_shards(self, n: int) -> bool:
        """Whether each of n devices gets its shard of the result by a reshape of its own shard."""
        return (
            self.rows % n == 0 and self.rows_out % n == 0
        ) or self.rows == self.rows_out == self.size

    def need(self, n: int) -> Need:
        """The range of the group's elements that each of n devices needs. A shard has a number of
        whole rows of the leading dim, before and after."""
        wanted = -(-self.rows_out // n) * (self.size // self.rows_out)
        return ranges(
            self.size,
            -(-self.rows // n) * (self.size // self.rows),
            tuple(wanted * i for i in range(n)),
            wanted,
        )


def split_groups(source: Sequence[int], target: Sequence[int]) -> list[ReshapeGroup]:
    """The finest groups of dims that have the same elements before and after a reshape. Dims of one
    element, which do not split, are in none.

    >>> [(g.dims, g.lead_out) for g in split_groups((6, 1, 4), (2, 3, 4))]
    [((0,), 0), ((2,), 2)]
    """
    kept, kept_out = ([d for d, n in enumerate(sizes) if n > 1] for sizes in (source, target))
    ends = list(itertools.accumulate((source[d] for d in kept), operator.mul))
    ends_out = list(itertools.accumulate((target[d] for d in kept_out), operator.mul))
    common = [end for end in ends if end in ends_out]
    found = []
    for low, high in itertools.pairwise((1, *common)):
        dims = tuple(d for d, end in zip(kept, ends, strict=True) if low < end <= high)
        lead_out = next(d for d, end in zip(kept_out, ends_out, strict=True) if low < end)
        size = math.prod(source[d] for d in dims)
        found.append(ReshapeGroup(dims, lead_out, source[dims[0]], target[lead_out], size))
    return found
