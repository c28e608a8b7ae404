"""Types as JAX writes them, `PartitionSpec` and `NamedSharding`, and arrays in these."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.infer.space import Codes
from sbp.machine.mesh import MeshSpec


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


def placed(x: Any, sharding: NamedSharding) -> jax.Array:
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
        return _jax.wrap_key(placed(_jax.words(x), NamedSharding(sharding.mesh, spec)), x.dtype)
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )
