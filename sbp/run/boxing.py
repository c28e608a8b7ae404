"""Steps of conversions (boxing) on one device's shard, inside `shard_map`: the collective, with
padding and slicing where sizes do not divide."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sbp import _jax
from sbp.errors import SbpInternalError
from sbp.infer.space import Codes, Step, WideSum, decode, local_shape
from sbp.machine.hardware import TILE, Arrangement, joins_lanes
from sbp.machine.mesh import MeshSpec
from sbp.signatures.kernels.shards import in_rows, neutral, reduce_dims
from sbp.signatures.rule import shard_extent
from sbp.types import Split, Unreduced


def _apart(x: Any) -> Any:
    """`x`, which XLA does not merge with an operation beside it.

    Below JAX 0.12, XLA for CPU merges two dynamic slices, or a slice and a scatter, and drops the
    clamping of one start index: an index out of bounds would reach into other shards
    (tests/run/test_edges.py). The compiled text of XLA for TPU clamps both. GPU was not checked and
    is treated as CPU.
    """
    return (
        lax.platform_dependent(x, tpu=lambda x: x, default=lax.optimization_barrier)
        if _jax.MERGES_SLICES
        else x
    )


def _flip(bits: Any) -> Any:
    """Converts bits between sign-and-magnitude order and two's complement order; it is its own
    inverse."""
    width = bits.dtype.itemsize * 8
    return bits ^ (
        lax.shift_right_arithmetic(bits, jnp.array(width - 1, bits.dtype))
        & jnp.iinfo(bits.dtype).max
    )


def _extreme(x: Any, monoid: str, names: tuple[str, ...]) -> Any:
    """The maximum or minimum of all parts. A NaN in any part gives NaN: the collective of XLA for
    CPU ignores NaNs, so floats are compared as integers of the same width and in the same order,
    where every NaN is the last integer, for a minimum the first one."""
    reduce = lax.pmax if monoid == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, names)
    if x.dtype.itemsize == 1:  # some of these have no sign, or one NaN whose bits are -0.0
        wide = _extreme(lax.convert_element_type(x, np.float32), monoid, names)
        return lax.convert_element_type(wide, x.dtype)
    quiet = np.array(np.nan, x.dtype).view(f"int{x.dtype.itemsize * 8}")
    largest = int(jnp.iinfo(quiet.dtype).max)
    top = int(quiet) & largest
    nan = jnp.array(top if monoid == "max" else top - largest - 1, quiet.dtype)
    bits = jnp.where(jnp.isnan(x), nan, lax.bitcast_convert_type(x, quiet.dtype))
    return lax.bitcast_convert_type(_flip(reduce(_flip(bits), names)), x.dtype)


def pad_dim(x: Any, dim: int, size: int) -> Any:
    """Pads one dim with zeros at its end up to `size` elements.

    Arguments:
      x: the array.
      dim: the dim.
      size: its length afterwards; at least its length in `x`.
    """
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    config = [(0, missing if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _exchange(x: Any, names: tuple[str, ...], n: int, dim: int, size: int) -> Any:
    """The parts that all devices have of this device's block of `size` elements along `dim`. The
    result has a new dim of `n` parts at `dim`, before the block."""
    x = pad_dim(x, dim, n * size)
    parts = x.reshape(*x.shape[:dim], n, size, *x.shape[dim + 1 :])
    return lax.all_to_all(parts, names, split_axis=dim, concat_axis=dim, tiled=True)


def _groups(stages: tuple[int, ...]) -> tuple[list[list[int]], ...]:
    """The groups of devices of each stage of a collective, by their positions on the mesh axis: a
    device has a place in each stage, and a group has the same place in all other stages.

    >>> _groups((2, 3))
    ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]])
    """
    places = np.arange(math.prod(stages)).reshape(stages)
    return tuple(
        np.moveaxis(places, stage, -1).reshape(-1, size).tolist()
        for stage, size in enumerate(stages)
    )


def run_scatter(x: Any, name: str, dim: int, groups: list[list[int]], how: Arrangement) -> Any:
    """This device's block of the sum over its group, arranged as `sbp.machine.hardware` says.

    Arguments:
      x: this device's part, of which the size of a group divides `dim`.
      name: the mesh axis.
      dim: the dim that is split.
      groups: of positions on the mesh axis.
      how: the arrangement.
    """
    n, others = len(groups[0]), None if len(groups) == 1 else groups

    def scattered(x: Any, at: int) -> Any:
        return lax.psum_scatter(x, name, scatter_dimension=at, tiled=True, axis_index_groups=others)

    if how == "as it is":
        return scattered(x, dim)
    if how == "dim first":
        x = jnp.moveaxis(x, dim, 0)
        total = scattered(x.reshape(x.shape[0], -1, x.shape[-1]), 0)
        return jnp.moveaxis(total.reshape(-1, *x.shape[1:]), 0, dim)
    parts = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    parts = jnp.moveaxis(parts, dim, 0)
    columns = parts.shape[-1] if how == "blocks first" else TILE[1]
    return scattered(parts.reshape(n, -1, columns), 0).reshape(parts.shape[1:])


def _first(x: Any, dim: int, size: int) -> Any:
    return x if x.shape[dim] == size else lax.slice_in_dim(x, 0, size, axis=dim)


def run_steps(x: Any, global_shape: Sequence[int], steps: Sequence[Step], mesh: MeshSpec) -> Any:
    """Applies steps in order to a shard. PRNG keys are sent as their words.

    Arguments:
      x: the shard.
      global_shape: shape of the whole tensor.
      steps: the steps of a conversion.
      mesh: the mesh.
    """
    if steps and _jax.is_extended(x.dtype):
        impl = jax.random.key_impl(x)
        words = jax.random.key_data(x)
        return jax.random.wrap_key_data(
            run_steps(words, (*global_shape, *words.shape[x.ndim :]), steps, mesh), impl=impl
        )
    for step in steps:
        x = run_step(x, global_shape, step, mesh)
    return x


def run_step(x: Any, global_shape: Sequence[int], step: Step, mesh: MeshSpec) -> Any:
    """Applies one step.

    Arguments:
      x: the shard, in the type that the step starts from.
      global_shape: shape of the whole tensor.
      step: the step.
      mesh: the mesh.

    Returns:
      The shard in the type that the step ends in.
    """
    if not step.mesh_axes:
        return jax.device_put(x, _jax.space_of(step.kind == "to_host"))
    names = tuple(mesh.names[i] for i in step.mesh_axes)
    position = step.mesh_axes[0]
    n = math.prod(mesh.sizes[i] for i in step.mesh_axes)
    before, after = decode(step.source[position]), decode(step.target[position])
    there = local_shape(global_shape, step.target, mesh.sizes)
    if 0 in global_shape:
        return jnp.zeros(there, x.dtype)  # without elements there is nothing to send
    match step.kind, before, after:
        case "all_reduce", _, _ if step.wide and step.wide.dim is not None:
            dim = step.wide.dim
            total = wide_block(x, names, n, (dim, -(-x.shape[dim] // n)), step.wide)
            whole = lax.all_gather(total, names, axis=dim, tiled=True)
            return _first(whole, dim, there[dim])
        case "reduce_scatter", _, Split(dim=d) if step.wide:
            return wide_block(x, names, n, (d, there[d]), step.wide)
        case "all_reduce", Unreduced(monoid=monoid), _:
            return all_reduce(x, monoid, names, n)
        case "reduce_scatter", Unreduced(monoid=monoid), Split(dim=d):
            return reduce_scatter(x, monoid, names[0], d, there[d], mesh)
        case "all_gather", Split(dim=d), _ if len(names) == 1:
            return _first(lax.all_gather(x, names[0], axis=d, tiled=True), d, there[d])
        case "all_gather", _, _:
            return all_gather(x, global_shape, step, mesh)
        case "all_to_all", Split(dim=d), Split(dim=e):
            x = pad_dim(x, e, n * there[e])
            joined = lax.all_to_all(x, names[0], split_axis=e, concat_axis=d, tiled=True)
            joined = _first(joined, d, there[d])
            # The TPU compiler would lay the columns of an exchange out as rows, and copy every
            # array that meets it into that layout (tests/tpu/test_compiled_memory.py).
            relaid = mesh.hardware.platform == "tpu" and joins_lanes(x.shape, there)
            return in_rows(joined) if relaid else joined
        case "slice", _, Split(dim=d):
            x = _apart(pad_dim(x, d, n * there[d]))
            start = lax.axis_index(names[0]) * there[d]
            part = lax.dynamic_slice_in_dim(x, start, there[d], d, allow_negative_indices=False)
            return _apart(part)
        case "mask", _, Unreduced(monoid=monoid):
            return (
                x
                if monoid not in ("sum", "prod")
                else jnp.where(lax.axis_index(names[0]) == 0, x, neutral(monoid, x.dtype))
            )
        case "zero_pad", Split(dim=d), Unreduced(monoid=monoid):
            shape = (*x.shape[:d], n * x.shape[d], *x.shape[d + 1 :])
            whole = jnp.full(shape, neutral(monoid, x.dtype))
            start = lax.axis_index(names[0]) * x.shape[d]
            whole = lax.dynamic_update_slice_in_dim(whole, x, start, d)
            return _first(whole, d, there[d])
        case _:
            raise SbpInternalError(f"no kernel for boxing step {step}")


def all_gather(x: Any, global_shape: Sequence[int], step: Step, mesh: MeshSpec) -> Any:
    """One all-gather over several mesh axes. Blocks are joined inner axis first, and padding is
    cut where sizes do not divide."""
    sizes = [mesh.sizes[i] for i in step.mesh_axes]
    x = lax.all_gather(x, tuple(mesh.names[i] for i in step.mesh_axes), axis=0).reshape(
        *sizes, *x.shape
    )
    joined = list(step.source)
    for level in reversed(range(len(sizes))):
        position = step.mesh_axes[level]
        dim = step.source[position] - 1
        joined[position] = 0
        x = jnp.moveaxis(x, level, level + dim)
        at = level + dim
        x = x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
        x = _first(x, at, local_shape(global_shape, tuple(joined), mesh.sizes)[dim])
    return x


def all_reduce(x: Any, monoid: str, names: tuple[str, ...], n: int) -> Any:
    """The reduction of all parts, on every device.

    Arguments:
      x: this device's part.
      monoid: what reduces the parts.
      names: the mesh axes.
      n: the product of their sizes.
    """
    match monoid:
        case "sum":
            return lax.psum(x, names)
        case "max" | "min":
            return _extreme(x, monoid, names)
        case "and" | "or" if x.dtype == np.bool_:
            reduce = lax.pmin if monoid == "and" else lax.pmax
            return reduce(x.astype(jnp.uint8), names).astype(np.bool_)
        case _:  # each device reduces one block: the bytes of a ring all-reduce
            blocks = _exchange(x.reshape(-1), names, n, 0, -(-x.size // n))
            total = reduce_dims(blocks, monoid, 0)
            return _first(lax.all_gather(total, names, axis=0, tiled=True), 0, x.size).reshape(
                x.shape
            )


def reduce_scatter(x: Any, monoid: str, name: str, dim: int, size: int, mesh: MeshSpec) -> Any:
    """This device's block of the reduction.

    Arguments:
      x: this device's part.
      monoid: what reduces the parts.
      name: the mesh axis.
      dim: the dim that is split.
      size: length of a block along it.
      mesh: the mesh.
    """
    n = mesh.size(name)
    if monoid == "sum":
        x = pad_dim(x, dim, n * size)
        stages = mesh.stages(n)
        ways = mesh.arrangements(x.shape, dim, n, x.dtype.itemsize)
        if "exchange" not in ways:
            for groups, how in zip(_groups(stages) or (None,), ways, strict=True):
                x = run_scatter(x, name, dim, groups or [[*range(n)]], how)
            return x
    return reduce_dims(_exchange(x, (name,), n, dim, size), monoid, dim)


def wide_block(x: Any, names: tuple[str, ...], n: int, block: tuple[int, int], how: WideSum) -> Any:
    """This device's block of the sum, accumulated in a wider dtype and rounded to that of `x`.

    Arguments:
      x: this device's part.
      names: the mesh axes.
      n: the product of their sizes.
      block: the dim that is split, and the length of a block along it.
      how: the dtype in which parts are added.
    """
    parts = _exchange(x, names, n, *block)
    return jnp.sum(parts.astype(how.dtype), block[0], dtype=how.dtype).astype(x.dtype)


def split_axes(codes: Codes, mesh: MeshSpec, dim: int) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the mesh axes that split a dim, outer axes first.

    Arguments:
      codes: the type of the tensor.
      mesh: the mesh.
      dim: the dim.
    """
    return tuple(axis for axis, code in zip(mesh.axes, codes, strict=True) if code == dim + 1)


def without_padding(x: Any, global_shape: Sequence[int], codes: Codes, mesh: MeshSpec) -> Any:
    """This device's shard with 0 in place of its padding, so that what is returned and saved does
    not depend on how it was computed.

    Arguments:
      x: the shard.
      global_shape: shape of the whole tensor.
      codes: its type.
      mesh: the mesh.
    """
    if _jax.in_host(jax.typeof(x)):  # the mask is in device memory, and JAX does not mix the two
        on_device = jax.device_put(x, _jax.space_of(False))
        on_device = without_padding(on_device, global_shape, codes, mesh)
        return jax.device_put(on_device, _jax.space_of(True))
    for dim, size in enumerate(global_shape):
        real = shard_extent(size, split_axes(codes, mesh, dim), lax.axis_index)
        if not isinstance(real, int) and not _jax.is_extended(x.dtype):
            is_real = lax.broadcasted_iota(np.int32, x.shape, dim) < real
            x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
    return x
