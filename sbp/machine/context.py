"""The mesh that the user sets with `jax.set_mesh`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Hides the caller's mesh context, so that traced equations carry no mesh."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def other_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> AbstractMesh | None:
    """The mesh that the user set, where it has other axes than these; None where none is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or (mesh.axis_names, mesh.axis_sizes) == (names, sizes) else mesh


@contextlib.contextmanager
def users_mesh(
    names: tuple[str, ...], sizes: tuple[int, ...], *, other: bool = False
) -> Iterator[AbstractMesh | None]:
    """Hides the mesh that the user set with `jax.set_mesh`, unless it has these axes: then a
    PartitionSpec in the program means it. Yields this mesh where all its axes are Explicit, and the
    types of JAX have shardings; else None.

    Arguments:
      names, sizes: the axes.
      other: whether a PartitionSpec means a mesh with other axes, too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if (mesh.axis_names, mesh.axis_sizes) == (names, sizes):
        yield mesh if set(mesh.axis_types) == {AxisType.Explicit} else None
    else:
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        shown = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
        with jax.sharding.use_abstract_mesh(shown) if other else no_mesh():
            yield None


def call_without_mesh(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function where no mesh is set. On Explicit axes, it takes and returns arrays whose
    JAX types have no sharding."""

    def call(*args: Any) -> Any:
        with no_mesh():
            return fn(*args)

    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return (jax.sharding.auto_axes(call, out_sharding=PartitionSpec()) if explicit else call)(*args)
