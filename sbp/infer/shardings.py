"""Pins that a program asks for in JAX's own words: the types of `NamedSharding`s on a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sbp.annotations import Pin, check_rank, from_spec
from sbp.errors import SbpError, Span
from sbp.infer.space import to_type
from sbp.machine.mesh import MeshSpec
from sbp.types import NdSbp


def pin_of_sharding(
    pin: Pin, shape: tuple[int, ...], mesh: MeshSpec, ids: np.ndarray | None, span: Span | None
) -> Pin:
    """A pin with the type of its `NamedSharding` on the mesh.

    A dim that the sharding leaves `UNCONSTRAINED` may be split over every axis that the sharding
    does not name. A dim of None is not split over these.

    Arguments:
      pin: the pin, with a sharding and without a type.
      shape: the global shape of the value.
      mesh: the mesh of `sbp.jit`.
      ids: ids of its devices, in the shape of the mesh; None for an abstract mesh.
      span: the user's line.

    Raises:
      SbpError: `unknown-axis`, `bad-placement` or `dim-out-of-range` for a sharding that the mesh
        or the value cannot have.
    """
    sharding: NamedSharding = pin.sharding
    spec: PartitionSpec = sharding.spec
    where = str(span) if span else f"the sharding of {pin.asked_by}"
    try:
        if isinstance(sharding.mesh, Mesh) and not _is_same(sharding.mesh, mesh, ids):
            t = _type_of_blocks(sharding, shape, mesh, ids)
        else:
            _check_sizes(sharding, mesh)
            t = from_spec(sharding.spec, mesh.names)
        check_rank(t, len(shape))
    except SbpError as error:
        raise SbpError(error.title, code=error.code, span=span, subject=where) from None
    free = [d for d, e in enumerate(spec.partitions) if e is PartitionSpec.UNCONSTRAINED]
    whole = tuple(d for d in range(len(shape)) if d not in free) if free else ()
    return replace(pin, type=t, sharding=None, complete=not free, whole=whole)


def _axes(spec: PartitionSpec) -> list[str]:
    """The mesh axes that a spec names."""
    entries = [e for e in spec.partitions if e is not None and e is not PartitionSpec.UNCONSTRAINED]
    split = itertools.chain(*((e,) if isinstance(e, str) else e for e in entries))
    return [*split, *sorted(getattr(spec, "unreduced", ()) or ())]


def _is_same(own: Mesh, mesh: MeshSpec, ids: np.ndarray | None) -> bool:
    """Whether a mesh has the axes of another one, and its devices where it has any."""
    axes = tuple(map(str, own.axis_names)), tuple(int(n) for n in own.devices.shape)
    return axes == (mesh.names, mesh.sizes) and (ids is None or np.array_equal(_ids(own), ids))


def _check_sizes(sharding: NamedSharding, mesh: MeshSpec) -> None:
    """Checks that the mesh has the axes that a sharding names, of equal size."""
    for axis in _axes(sharding.spec):
        size = int(sharding.mesh.shape[axis])
        if mesh.size(axis) != size:  # an unknown axis raises
            raise SbpError(
                f"mesh axis {axis!r} has {size} devices in the mesh of this sharding, and"
                f" {mesh.size(axis)} in the mesh of sbp.jit ({mesh}); build both from one mesh",
                code="bad-placement",
            )


def _type_of_blocks(
    sharding: NamedSharding, shape: tuple[int, ...], mesh: MeshSpec, ids: np.ndarray | None
) -> NdSbp:
    """The type that gives each device the same part as a sharding on another mesh.

    Raises:
      SbpError: `bad-placement` when no type does, or where the devices are others.
    """
    if ids is None:  # an abstract mesh: its devices count from 0
        ids = np.arange(mesh.num_devices).reshape(mesh.sizes)
    axes = [str(a) for a in sharding.mesh.axis_names]
    dims = [[] for _ in shape]
    entries = sharding.spec.partitions
    for d, entry in enumerate(entries[: len(shape)]):
        if entry is not None and entry is not PartitionSpec.UNCONSTRAINED:
            dims[d] = [axes.index(a) for a in ((entry,) if isinstance(entry, str) else entry)]
    own, order = _ids(sharding.mesh), np.argsort(ids, axis=None)
    split = not sharding.spec.unreduced and PartitionSpec.UNCONSTRAINED not in entries
    if (
        split
        and own.size == ids.size
        and np.array_equal(np.sort(own, axis=None), ids.ravel()[order])
    ):
        wanted = _blocks(own.shape, dims)[:, np.argsort(own, axis=None)]
        for codes in itertools.product(range(len(shape) + 1), repeat=len(mesh.sizes)):
            splits = [[i for i, c in enumerate(codes) if c == d + 1] for d in range(len(shape))]
            if np.array_equal(_blocks(ids.shape, splits)[:, order], wanted):
                return to_type(codes, mesh)
    raise SbpError(
        f"no type on the mesh of sbp.jit ({mesh}) places the parts of {sharding.spec} on the"
        f" devices of the mesh {dict(sharding.mesh.shape)}; name the axes of the mesh of sbp.jit",
        code="bad-placement",
    )


def _blocks(sizes: Sequence[int], dims: Sequence[Sequence[int]]) -> np.ndarray:
    """The number of each device's block along each dim, with devices in the order of the mesh.

    Arguments:
      sizes: sizes of the mesh axes.
      dims: for each dim the positions of the axes that split it, outer first.
    """
    at = np.indices(sizes).reshape(len(sizes), -1)
    found = np.zeros((len(dims), at.shape[1]), dtype=int)
    for d, axes in enumerate(dims):
        for axis in axes:
            found[d] = found[d] * sizes[axis] + at[axis]
    return found


def _ids(mesh: Any) -> np.ndarray:
    return np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices)
