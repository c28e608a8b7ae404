"""Types as JAX writes them, `PartitionSpec` and `NamedSharding`, and arrays in these.

An array whose splits do not divide is padded. A process may have a part of an array: the elements
of its own devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.errors import ArgumentError
from sbp.infer.space import Codes
from sbp.machine.mesh import MeshSpec
from sbp.signatures.kernels.shards import padded_blocks
from sbp.types import NdSbp, Split


def partition_spec(codes: Codes, mesh: MeshSpec, ndim: int) -> PartitionSpec:
    """The JAX spec of a type. Each mesh axis on which the type is P gives one leading dim, which is
    split over it.

    Arguments:
      codes: the type.
      mesh: the mesh.
      ndim: rank of the tensor, without the leading dims.
    """
    leading = [name for name, c in zip(mesh.names, codes, strict=True) if c < 0]
    return PartitionSpec(*leading, *_dims(codes, mesh, ndim))


def named_sharding(
    codes: Codes, mesh: MeshSpec, users_mesh: Mesh | AbstractMesh, ndim: int
) -> NamedSharding:
    """The JAX sharding of a type, in which mesh axes with P are `unreduced`. JAX has this word only
    for Explicit axes, so such a sharding is on a copy of the mesh with these.

    Arguments:
      codes: the type.
      mesh: the mesh.
      users_mesh: the same mesh as JAX has it.
      ndim: rank of the tensor.
    """
    unreduced = frozenset(name for name, c in zip(mesh.names, codes, strict=True) if c < 0)
    spec = PartitionSpec(*_dims(codes, mesh, ndim), unreduced=unreduced)
    if not unreduced:
        return NamedSharding(users_mesh, spec)
    names, explicit = mesh.names, (AxisType.Explicit,) * len(mesh.names)
    if isinstance(users_mesh, Mesh):
        return NamedSharding(Mesh(users_mesh.devices, names, axis_types=explicit), spec)
    return NamedSharding(AbstractMesh(mesh.sizes, names, axis_types=explicit), spec)


def _dims(codes: Codes, mesh: MeshSpec, ndim: int) -> list[Any]:
    """The entry of each dim in a spec: the mesh axes that split it, outer first."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for name, c in zip(mesh.names, codes, strict=True):
        if c > 0:
            dims[c - 1].append(name)
    return [tuple(d) if len(d) > 1 else d[0] if d else None for d in dims]


def place_array(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array in a sharding. What a process has as a whole (a NumPy array, an array on its own
    devices) is one global value, equal in all processes: each takes its part, and nothing is sent.

    Arguments:
      x: the array.
      sharding: the sharding, which may have devices of other processes.
    """
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if _jax.is_extended(x.dtype):
        rank = len(_jax.key_shape(x.dtype))
        spec = PartitionSpec(*sharding.spec, *[None] * (x.ndim - len(sharding.spec) + rank))
        return _jax.wrap_key(
            place_array(_jax.words(x), NamedSharding(sharding.mesh, spec)), x.dtype
        )
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )


# ---- padding -------------------------------------------------------------------------------------
# How an array is padded so that JAX can shard it: the blocks of its dims, which need not divide, as
# equally large buffers.


Axes = tuple[tuple[str, int], ...]
"""Names and sizes of mesh axes, outer first."""


@dataclass(frozen=True, slots=True)
class Padding:
    """The blocks of an array's dims. A dim of length L over axes of sizes n1, n2, .. has blocks of
    ceil(L / n1), each of them has blocks of ceil(ceil(L / n1) / n2), and so on.

    Arguments:
      shape: the true shape.
      counts: for each dim, the sizes of the mesh axes that split it, outer first.

    >>> Padding((15, 3), ((2, 4), ())).padded_shape
    (16, 3)
    >>> Padding((5, 3), ((2, 4), ())).ranges(0)
    [(0, 1), (1, 2), (2, 3), (3, 3), (3, 4), (4, 5), (5, 5), (5, 5)]
    """

    shape: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int], t: NdSbp, axes: Sequence[tuple[str, int]]) -> Padding:
        """The blocks of a type.

        Arguments:
          shape: the true shape.
          t: the type.
          axes: names and sizes of the mesh axes, outer first.
        """
        counts = tuple(
            tuple(n for name, n in axes if t.get(name) == Split(dim)) for dim in range(len(shape))
        )
        return cls(tuple(shape), counts)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The buffer of one block."""
        return tuple(self._lengths(dim)[-1] for dim in range(len(self.shape)))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of all buffers together."""
        sizes = zip(self.block_shape, self.counts, strict=True)
        return tuple(block * math.prod(counts) for block, counts in sizes)

    def _lengths(self, dim: int) -> list[int]:
        """The length of a dim, and that of its blocks after each axis."""
        lengths = [self.shape[dim]]
        for n in self.counts[dim]:
            lengths.append(-(-lengths[-1] // n))
        return lengths

    def ranges(self, dim: int) -> list[tuple[int, int]]:
        """The elements of each block of a dim, from start to stop."""
        found = [(0, self.shape[dim])]
        for n, length in zip(self.counts[dim], self._lengths(dim)[1:], strict=True):
            found = [
                (min(start + i * length, stop), min(start + (i + 1) * length, stop))
                for start, stop in found
                for i in range(n)
            ]
        return found

    def pad(self, x: Any) -> Any:
        """An array of the true shape as one of the padded shape; padding is 0.

        Arguments:
          x: a NumPy or JAX array.
        """
        if _jax.is_extended(x.dtype):  # keys are padded by their words
            return _jax.wrap_key(self.pad(_jax.words(x)), x.dtype)
        for dim, counts in enumerate(self.counts):
            x = padded_blocks(x, dim, counts)
        return x

    def cut(self, x: Any) -> Any:
        """The inverse of `pad`."""
        if _jax.is_extended(x.dtype):
            return _jax.wrap_key(self.cut(_jax.words(x)), x.dtype)
        for dim, counts in enumerate(self.counts):
            before, after = x.shape[:dim], x.shape[dim + 1 :]
            lengths, blocks = self._lengths(dim), math.prod(counts)
            for n, size, length in zip(counts[::-1], lengths[-2::-1], lengths[:0:-1], strict=True):
                blocks //= n
                x = x.reshape(*before, blocks, n * length, *after)
                x = x[(slice(None),) * (dim + 1) + (slice(0, size),)]
                x = x.reshape(*before, blocks * size, *after)
        return x


def of_process(x: Any, padding: Padding, sharding: NamedSharding, name: str) -> jax.Array:
    """The global array, padded, from this process's part. Nothing is sent.

    Arguments:
      x: the part: the elements of the true shape that the devices of this process hold, blocks in
        ascending order along each dim, without padding.
      padding: the blocks of the whole.
      sharding: the sharding of the padded shape.
      name: the name of the argument, for errors.

    Raises:
      SbpError: `bad-argument` for a part of another shape.
    """
    sizes = padding.block_shape
    # For each dim, the blocks that devices of this process hold, in ascending order.
    held = sharding.addressable_devices_indices_map(padding.padded_shape).values()
    blocks = [
        sorted({(index[dim].start or 0) // max(size, 1) for index in held if index is not None})
        for dim, size in enumerate(sizes)
    ]
    ranges = [[padding.ranges(dim)[b] for b in own] for dim, own in enumerate(blocks)]
    expected = tuple(sum(stop - start for start, stop in own) for own in ranges)
    if tuple(x.shape) != expected:
        raise ArgumentError(
            f"{name}: the array has shape {tuple(x.shape)}; pass the whole array, of shape"
            f" {padding.shape}, or the part of process {jax.process_index()}, of shape {expected}"
        )
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)

    def buffer(index: Any) -> np.ndarray:
        """The buffer of one device: its blocks, of which a dim that is not split has one."""
        picked = host
        for dim, where in enumerate(index):
            block = (where.start or 0) // max(sizes[dim], 1)
            at = blocks[dim].index(block)
            ends = list(itertools.accumulate((b - a for a, b in ranges[dim]), initial=0))
            picked = picked[(slice(None),) * dim + (slice(ends[at], ends[at + 1]),)]
        missing = [(0, size - n) for size, n in zip(sizes, picked.shape, strict=True)]
        return np.pad(picked, missing)

    return jax.make_array_from_callback(padding.padded_shape, sharding, buffer, dtype=host.dtype)
