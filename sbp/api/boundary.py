"""Types of inputs and outputs: as the user writes them, and as JAX can lay arrays out."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotations import Pin, as_type
from sbp.errors import SbpError, warn
from sbp.infer.pins import check_axes
from sbp.infer.space import from_type, is_even
from sbp.machine.mesh import MeshSpec
from sbp.run.partial import Partial
from sbp.types import Atom, B, NdSbp, Split, Unreduced


def is_type_leaf(x: Any) -> bool:
    """Whether an entry of `in_types` or `out_types` is one type instead of a tree of types."""
    return (
        x is None
        or isinstance(x, NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | type(B))
        or (callable(x) and not isinstance(x, type))
    )


def check_types(types: Any, mesh: MeshSpec) -> None:
    """Checks that the mesh has the axes of all types of a tree.

    Raises:
      SbpError: `unknown-axis`.
    """
    for leaf in jax.tree.leaves(types, is_leaf=is_type_leaf):
        if leaf is not None and is_type_leaf(leaf) and not callable(leaf):
            check_axes(as_type(leaf, mesh_axes=mesh.names), mesh, "in_types and out_types")


def broadcast_types(entry: Any, tree: Any, where: str, mesh: MeshSpec) -> list[NdSbp | None]:
    """The type of each leaf of `tree` from a pytree prefix of types.

    Arguments:
      entry: the prefix. Its leaves are types, None, or functions of a leaf's path and its
        `ShapeDtypeStruct` that return a type or None.
      tree: the arguments or results.
      where: the name of `entry`, for errors.
      mesh: the mesh.

    Raises:
      SbpError: `bad-argument` where `entry` is no prefix of `tree`; `unknown-axis`, `type-syntax`
        or `dim-out-of-range` for a type that does not fit the mesh or its leaf.
    """
    with_path, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, Partial)
    )
    numbers = jax.tree.unflatten(structure, list(range(len(with_path))))
    found: list[NdSbp | None] = [None] * len(with_path)

    def assign(t: Any, subtree: Any) -> None:
        for number in jax.tree.leaves(subtree):
            path, leaf = with_path[number]
            rank = leaf.parts.ndim - leaf.rank if isinstance(leaf, Partial) else len(np.shape(leaf))
            own = t
            if callable(t) and not isinstance(
                t, Unreduced | str | NdSbp | PartitionSpec | NamedSharding
            ):
                own = t(
                    path, leaf if isinstance(leaf, jax.ShapeDtypeStruct) else shape_of(leaf, where)
                )
            if own is None:
                continue
            checked = as_type(own, rank, mesh.names)
            check_axes(checked, mesh, f"{where}{jax.tree_util.keystr(path)}")
            found[number] = checked

    try:
        jax.tree.map(assign, entry, numbers, is_leaf=is_type_leaf)
    except ValueError as error:
        raise SbpError(
            f"{where} is no prefix of the argument it types: {' '.join(str(error).split())[:200]}"
        ) from error
    return found


def carried_type(leaf: Any, mesh: Mesh | AbstractMesh) -> NdSbp | None:
    """The type that pins an argument because it has it already: that of a `Partial`, or of a
    `NamedSharding` on the same devices. None for other arguments."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Partial):
        return leaf.type
    if not isinstance(sharding, NamedSharding) or isinstance(leaf, _jax.Tracer):
        return None
    if sharding.mesh.axis_names != mesh.axis_names or tuple(sharding.mesh.axis_sizes) != tuple(
        mesh.axis_sizes
    ):
        return None
    if (
        isinstance(mesh, Mesh)
        and isinstance(sharding.mesh, Mesh)
        and not np.array_equal(sharding.mesh.devices, mesh.devices)
    ):
        return None
    try:
        return as_type(sharding, len(leaf.shape))
    except SbpError:
        # One dim split over mesh axes in another order than the mesh's is no type: such an array is
        # moved.
        return None


def shape_of(x: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an input.

    Raises:
      SbpError: `bad-argument` for an input that is no array.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False))
        )
    try:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
        )  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, AttributeError) as error:
        raise SbpError(
            f"input {name} is no array: {type(x).__name__}; mark it static or pass an array"
        ) from error


def codes_of(t: NdSbp | None, mesh: MeshSpec) -> tuple[int | None, ...] | None:
    """A type in codes, with None on each free axis; None for None."""
    if t is None:
        return None
    return tuple(
        None if axis in t.free else c
        for axis, c in zip(mesh.names, from_type(t, mesh), strict=True)
    )


def even_boundary(
    t: NdSbp | None, shape: tuple[int, ...], mesh: MeshSpec, where: str
) -> tuple[NdSbp | None, Pin | None]:
    """The type of an array at the boundary of a program. JAX shards arrays evenly, so a mesh axis
    that does not divide its dim becomes B there, with a warning; the program slices or gathers the
    array inside.

    Arguments:
      t: the type that is asked for; None for a free one.
      shape: the global shape.
      mesh: the mesh.
      where: the input or output, for the warning.

    Returns:
      The type at the boundary, and the pin inside the program where that type is another one.
    """
    if t is None or is_even(shape, from_type(t, mesh), mesh.sizes):
        return t, None
    atoms: dict[str, Atom] = {}
    for axis in mesh.names:
        if axis not in t.free:
            trial = NdSbp({**atoms, axis: t.get(axis)})
            atoms[axis] = t.get(axis) if is_even(shape, from_type(trial, mesh), mesh.sizes) else B
    even = NdSbp(atoms, t.free)
    why = f"does not divide under {t!r}" if 0 not in shape else f"has no elements to split {t!r}"
    text = f"{why}; it is held {even!r} there and sliced or gathered inside"
    warn("uneven-boundary", f"{where} of shape {shape}", text)
    return even, Pin(t, complete=True)


def partial_axes(t: NdSbp, mesh: MeshSpec) -> tuple[str, ...]:
    """The mesh axes on which a type is partial."""
    return tuple(a for a in mesh.names if isinstance(t.get(a), Unreduced))
