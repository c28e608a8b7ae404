"""Types of inputs and outputs as the user writes them, and as JAX can give them at the boundary."""

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
    """Whether an entry of `in_types` or `out_types` is one type, not a tree of them."""
    return (
        x is None
        or isinstance(x, NdSbp | str | PartitionSpec | NamedSharding | Split | Unreduced | type(B))
        or (callable(x) and not isinstance(x, type))
    )


def check_types(types: Any, mesh: MeshSpec) -> None:
    """Checks the mesh axes of all types of a tree.

    Raises:
      SbpError: `unknown-axis`.
    """
    for leaf in jax.tree.leaves(types, is_leaf=is_type_leaf):
        if leaf is not None and is_type_leaf(leaf) and not callable(leaf):
            check_axes(as_type(leaf, mesh_axes=mesh.names), mesh, "in_types and out_types")


def broadcast_types(entry: Any, tree: Any, where: str, mesh: MeshSpec) -> list[NdSbp | None]:
    """The type of each leaf of `tree` from a pytree prefix of types.

    Arguments:
      entry: the prefix; its leaves are types, None, or functions of a leaf's path and shape.
      tree: the arguments or results.
      where: what `entry` is, for errors.
      mesh: the mesh.

    Raises:
      SbpError: where `entry` is no prefix of `tree`, or a type does not fit the mesh or its leaf.
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
    """The type that an argument's own NamedSharding on this mesh's devices pins."""
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
        # a split order against the mesh is no type: the array is moved, as from any other layout
        return None


def shape_of(x: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an input.

    Raises:
      SbpError: for what is no array.
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
    """A type in codes, None on free axes; None for None."""
    if t is None:
        return None
    return tuple(
        None if axis in t.free else c
        for axis, c in zip(mesh.names, from_type(t, mesh), strict=True)
    )


def even_boundary(
    t: NdSbp | None, shape: tuple[int, ...], mesh: MeshSpec, where: str
) -> tuple[NdSbp | None, Pin | None]:
    """The type that JAX can give an array at the boundary. Dims that do not divide are B there;
    the program splits or gathers them inside.

    Arguments:
      t: the type asked for; None for a free one.
      shape: the global shape.
      mesh: the mesh.
      where: the input or output, for the warning.

    Returns:
      The type at the boundary, and the pin inside where the two differ.
    """
    if t is None or is_even(shape, from_type(t, mesh), mesh.sizes):
        return t, None
    atoms: dict[str, Atom] = {}
    for axis in mesh.names:
        if axis not in t.free:
            trial = NdSbp({**atoms, axis: t.get(axis)})
            atoms[axis] = t.get(axis) if is_even(shape, from_type(trial, mesh), mesh.sizes) else B
    held = NdSbp(atoms, t.free)
    text = f"does not divide under {t!r}; it is held {held!r} there and sliced or gathered inside"
    warn("uneven-boundary", f"{where} of shape {shape}", text, stacklevel=7)
    return held, Pin(t, complete=True)


def partial_axes(t: NdSbp, mesh: MeshSpec) -> tuple[str, ...]:
    """The mesh axes on which a type is partial."""
    return tuple(a for a in mesh.names if isinstance(t.get(a), Unreduced))
