"""Types of inputs and outputs: as the user writes them, and as JAX can lay arrays out."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotations import Pin, as_type
from sbp.api.trees import (
    KeyPath,
    fill,
    has_keys,
    is_patterns,
    leaf_ranges,
    no_prefix,
    path_names,
    types_by_pattern,
)
from sbp.errors import SbpError, Span, refused, warn
from sbp.infer.pins import check_axes, check_monoids
from sbp.infer.request import TypeSource
from sbp.infer.space import from_type, is_even
from sbp.kinds import is_whole, leaves_of, paths_of, show, takes_no_such_call
from sbp.layout import FullySharded, PaddedType
from sbp.machine.mesh import MeshSpec
from sbp.run.arrays import (
    Padded,
    Partial,
    axes_of,
    fits_on,
    held_padded,
    part_sizes,
    same_layout,
)
from sbp.source.editing import argument_span, constants_in
from sbp.trace.places import HOST
from sbp.types import Atom, B, Broadcast, NdSbp, Split, Unreduced

# ---- leaves -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """An array that a function takes or returns, and what the user asks for it: type and memory.

    Arguments:
      path: its path in the arguments or results.
      name: the user's name of it, such as `params['w']`.
      aval: its global shape and dtype.
      type: its type; None leaves it free.
      source: what asks for the type of an argument.
      pin: its type inside the program, if that differs from the type at the boundary.
      padded: whether it is held as `sbp.Padded`. Its splits then need not divide.
      memory: the kind of memory that the user asks for, or None. For an argument of a call, the
        kind of memory in which it arrives; None for the device's own.
      spec: the `PartitionSpec` that the user wrote for the type; None for another form.
      in_host: whether the function gets an argument as a value in host memory. As with `jax.jit`,
        an argument that is no JAX array yet is a value in device memory.
      struct: the ShapeDtypeStruct that the user gave as an argument; None for an array.
      donated: whether the call takes an argument by donation.
    """

    path: KeyPath
    name: str
    aval: Any
    type: NdSbp | None = None
    source: TypeSource = "argument"
    pin: Pin | None = None
    padded: bool = False
    memory: str | None = None
    spec: PartitionSpec | None = None
    in_host: bool = False
    struct: jax.ShapeDtypeStruct | None = None
    donated: bool = False

    @property
    def demand(self) -> tuple[Any, ...]:
        """What is asked of it, as a key."""
        return self.type, self.padded, self.memory, self.spec, self.in_host

    @property
    def is_free(self) -> bool:
        """Whether nothing is asked of it."""
        return self.demand == (None, False, None, None, False)

    @property
    def partial(self) -> NdSbp | None:
        """Its type where that is partial."""
        return self.type if self.type is not None and self.type.is_partial else None

    @property
    def description(self) -> str:
        """An argument in words, to tell it from another one."""
        weak = "weakly typed " if self.aval.weak_type else ""
        memory = self.memory or ("host" if self.in_host else "")
        return (
            f"{weak}{self.aval.dtype}{[*self.aval.shape]}"
            + (f" as {self.partial}" if self.partial else "")
            + (f" in {memory} memory" if memory else "")
        )

    def with_type(self, t: NdSbp | None) -> "Leaf":
        """The same with a type. A spec stays where the type is the one that it says."""
        return replace(
            self,
            type=t,
            spec=None if t != self.type or self.partial or self.padded else self.spec,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leaves:
    """The structure of the arguments or results of a function, with its leaves."""

    tree: Any
    leaves: tuple[Leaf, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The user's name of each leaf."""
        return tuple(leaf.name for leaf in self.leaves)

    @property
    def padded(self) -> frozenset[int]:
        """The positions of leaves that are held as `Padded`."""
        return frozenset(i for i, leaf in enumerate(self.leaves) if leaf.padded)

    def like(self, values: Sequence[Any]) -> Any:
        """The structure with types or shardings as its leaves."""
        return fill(self.tree, values, [leaf.path for leaf in self.leaves])


# ---- memories -----------------------------------------------------------------------------------
# In which memory arguments and results lie: what the user asks for, and what JAX traces.


def own_kind(kind: str | None, mesh: Mesh | AbstractMesh) -> str | None:
    """A kind of memory; None for the device's own."""
    default = (
        mesh.devices.flat[0].default_memory().kind if isinstance(mesh, Mesh) and kind else "device"
    )
    return None if kind in (None, default, "device") else kind


def result_kind(
    leaf: Leaf, in_host: bool, mesh: MeshSpec, users_mesh: Mesh | AbstractMesh
) -> str | None:
    """The kind of memory in which a result is returned; None for the device's own.

    Arguments:
      leaf: the result.
      in_host: whether the function returns it in host memory.
      mesh, users_mesh: the mesh, with its hardware and as the user has it.

    Raises:
      SbpError: `memory-kind` for a kind that the platform cannot return.
    """
    if leaf.memory is None:
        return HOST if in_host else None
    platform = (
        users_mesh.devices.flat[0].platform
        if isinstance(users_mesh, Mesh)
        else mesh.hardware.platform
    )
    if leaf.memory == "unpinned_host" and platform != "cpu":
        raise SbpError(
            f"output {leaf.name} has a sharding in unpinned_host memory, and XLA for {platform}"
            f" cannot return results there; use memory_kind={HOST!r}",
            code="memory-kind",
        )
    return own_kind(leaf.memory, users_mesh)


# ---- types --------------------------------------------------------------------------------------
# Types of inputs and outputs: as the user writes them, and as JAX can lay arrays out.


@contextlib.contextmanager
def about_option(option: str, call: Span | None = None) -> Iterator[None]:
    """Errors that are raised inside are about an option of `sbp.jit`.

    Arguments:
      option: the option.
      call: the user's call of `sbp.jit`, where an error is to name the place of the wrong value in
        the option, or else of the option.
    """
    try:
        yield
    except SbpError as error:
        error.option = option
        part = argument_span(call, option)
        wrong = (
            constants_in(part, error.slip[0], f"{error.slip[0]}_")
            if part is not None and error.slip is not None
            else ()
        )
        error.span = error.span or next((edit.span for edit in wrong), part)
        raise


def is_type_leaf(x: Any) -> bool:
    """Whether an entry of `in_types` or `out_types` is one type instead of a tree of types."""
    # A module of Equinox and a variable of Flax can be called, but are trees.
    return (
        x is None
        or _jax.is_unspecified(x)
        or isinstance(
            x,
            (FullySharded | PaddedType | NdSbp | str | PartitionSpec | NamedSharding)
            | (Split | Unreduced | Broadcast),
        )
        or (callable(x) and not isinstance(x, type) and jax.tree_util.all_leaves([x]))
    )


def check_types(types: Any, mesh: MeshSpec, users_mesh: Mesh | AbstractMesh, option: str) -> None:
    """Checks that the mesh has the axes of all types of a tree, and that the `NamedSharding`s of
    `in_shardings` and `out_shardings` are on it.

    Arguments:
      types: the tree.
      mesh, users_mesh: the mesh, with its hardware and as the user has it.
      option: the argument of `sbp.jit` that it is.

    Raises:
      SbpError: `unknown-axis`; `bad-argument` for a `NamedSharding` on another mesh.
    """
    for path, leaf in paths_of(types, option, is_type_leaf)[0]:
        if (
            option.endswith("shardings")
            and isinstance(leaf, NamedSharding)
            and not same_mesh(leaf.mesh, users_mesh)
        ):
            raise refused(
                f"{option} has a NamedSharding on {leaf.mesh}, but sbp.jit uses {users_mesh}; build"
                " the sharding on the mesh of sbp.jit",
                ValueError,
            )
        t, _ = _plain_type(leaf, (), mesh)
        if is_type_leaf(t) and not (t is None or _jax.is_unspecified(t) or callable(t)):
            _read_type(t, f"{option}{jax.tree_util.keystr(path)}", mesh)


def _read_type(t: Any, where: str, mesh: MeshSpec, rank: int | None = None) -> NdSbp:
    """Reads an entry as a type. Errors begin with the place of the entry."""
    try:
        found = as_type(t, rank, mesh.names)
    except SbpError as error:
        raise error.about(where) from None
    check_axes(found, mesh, where)
    return found


def _plain_type(t: Any, shape: tuple[int, ...], mesh: MeshSpec) -> tuple[Any, bool]:
    """An entry that is no function as a type in JAX's or sbp's own words, and whether it asks for
    `sbp.Padded`."""
    found = t.type_of(shape, mesh.axes) if isinstance(t, FullySharded) else t
    return (found.type, True) if isinstance(found, PaddedType) else (found, False)


def broadcast_types(
    entry: Any, tree: Any, leaves: Sequence[Leaf], names: tuple[str, str], mesh: MeshSpec, skip: int
) -> list[Leaf]:
    """The leaves of `tree` with what a pytree prefix of types asks of them.

    Arguments:
      entry: the prefix. Its leaves are types, None, functions of a leaf's path and its
        `ShapeDtypeStruct` that return a type or None, or dicts of these by patterns of paths.
      tree: the structure of the arguments or results.
      leaves: their leaves.
      names: the names of `entry` and of `tree`, for errors.
      mesh: the mesh.
      skip: how many keys of each path lead to `tree`.

    Raises:
      SbpError: `bad-argument` where `entry` is no prefix of `tree`, or for a pattern that names no
        leaf; `unknown-axis`, `type-syntax` or `dim-out-of-range` for a type that does not fit the
        mesh or its leaf.
    """
    return [
        read_entry(t, leaf, names, mesh, skip)
        for t, leaf in zip(
            entries_of(entry, tree, [path_names(x.path[skip:]) for x in leaves], names),
            leaves,
            strict=True,
        )
    ]


def entries_of(
    entry: Any,
    tree: Any,
    paths: Sequence[tuple[str, ...]],
    names: tuple[str, str],
    here: KeyPath = (),
) -> list[Any]:
    """The entry of each leaf of `tree`. A dict with the keys of the dict in its place is a part of
    the prefix; another dict with a `/` or a `*` in a key is one of patterns.

    Arguments:
      entry, tree, names: as `broadcast_types` takes them.
      paths: the path of each leaf.
      here: the path of `tree` below the name in `names`.

    Raises:
      SbpError: `bad-argument` where `entry` is no prefix of `tree`, and for a pattern that names no
        leaf.
    """
    if is_patterns(entry):
        if not has_keys(tree, entry):
            return types_by_pattern(entry, [[one] for one in paths], names[0])
        names, here = (names[0], f"{names[1]}{jax.tree_util.keystr(here)}"), ()
    parts, prefix = paths_of(
        entry, "a pytree of types", lambda x: x is not entry or is_type_leaf(x)
    )
    if prefix.node_data() is None:
        return [entry] * tree.num_leaves
    children = tree.children()
    if tree.node_data() != prefix.node_data() or len(children) != len(parts):
        raise no_prefix(prefix, tree, here, names)
    return [
        found
        for (key, part), (child, at) in zip(parts, leaf_ranges(children), strict=True)
        for below in [[path[1:] for path in paths[at.start : at.stop]]]
        for found in entries_of(part, child, below, names, (*here, *key))
    ]


def read_entry(t: Any, leaf: Leaf, names: tuple[str, str], mesh: MeshSpec, skip: int) -> Leaf:
    """A leaf with the type of its entry.

    Arguments:
      t: the entry of `in_types` or `out_types`.
      leaf: the leaf.
      names, mesh, skip: as for `broadcast_types`.
    """
    path, shape = leaf.path[skip:], leaf.aval
    if callable(t) and not isinstance(t, Unreduced | str | NdSbp | PartitionSpec | NamedSharding):
        try:
            # The truth of a ShapeDtypeStruct is its length, which a scalar does not have.
            t = t(path, shape if leaf.struct is None else leaf.struct)
        except SbpError as error:  # of `sbp.padded` without parentheses
            raise error.about(names[0]) from None
        except TypeError as error:
            if takes_no_such_call(error):
                raise refused(
                    f"{names[0]} has {t!r}, which is not a function of a path and a"
                    f" ShapeDtypeStruct: {error}",
                    error,
                ) from error
            raise
    t, padded = _plain_type(t, shape.shape, mesh)
    if t is None or _jax.is_unspecified(t):
        return replace(leaf, type=None, source="in_types", padded=padded)
    where = f"{names[0]} for {names[1]}{jax.tree_util.keystr(path)}"
    spec = t.spec if isinstance(t, NamedSharding) else t
    return replace(
        leaf,
        type=_read_type(t, where, mesh, len(shape.shape)),
        source="in_types",
        padded=padded,
        memory=t.memory_kind if isinstance(t, NamedSharding) else None,
        spec=spec if isinstance(spec, PartitionSpec) else None,
    )


def same_mesh(a: Mesh | AbstractMesh, b: Mesh | AbstractMesh) -> bool:
    """Whether two meshes have the same axes, and the same devices where both have some."""
    return axes_of(a) == axes_of(b) and (
        not (isinstance(a, Mesh) and isinstance(b, Mesh)) or np.array_equal(a.devices, b.devices)
    )


def carried_type(leaf: Any, mesh: Mesh | AbstractMesh) -> NdSbp | None:
    """The type that pins an argument because it has it already: that of a `Partial`, of a `Padded`
    that a mesh with these axes can hold, or of a `NamedSharding` on the same devices. None for
    other arguments."""
    leaf = _jax.primal_of(leaf)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Partial | Padded):
        fits = isinstance(leaf, Partial) or fits_on(leaf, axes_of(mesh))
        return leaf.type if fits else None
    if isinstance(leaf, _jax.Tracer):  # on Auto axes, JAX has no sharding of it
        sharding = jax.typeof(leaf).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return None
    if not isinstance(sharding, NamedSharding) or not same_mesh(sharding.mesh, mesh):
        return None
    try:
        return as_type(sharding, len(leaf.shape))
    except SbpError:
        # One dim split over mesh axes in another order than the mesh's is no type: such an array is
        # moved.
        return None


def with_arrival(leaf: Leaf, x: Any, mesh: Mesh | AbstractMesh) -> Leaf:
    """The argument with facts about the array that arrives: its memory, and whether it is `Padded`.
    It is `Padded` if the array has the type that is asked for, or if no type is asked for.

    Raises:
      SbpError: `not-partial` for a `Partial` that is not pinned to its type, or an array that is
        pinned partial; `memory-kind` where it lies in another memory than is asked, as `jax.jit`
        refuses it.
    """
    own = carried_type(x, mesh) if isinstance(x, Padded) and not leaf.padded else None
    if own is not None and (
        leaf.type is None or same_layout(x, held_padded(x.shape, leaf.type, axes_of(mesh)))
    ):
        leaf = replace(leaf, type=own, padded=True, spec=None)
    what, held = f"input {leaf.name}", x.type if isinstance(x, Partial) else None
    if held != leaf.partial and not isinstance(x, jax.ShapeDtypeStruct):
        other = (
            f"a Partial of {held!r}"
            if held is not None
            else "not an sbp.Partial; pass a Partial, or pin it S or B"
        )
        why = (
            f"is pinned {leaf.type!r} but is {other}"
            if leaf.partial
            else "is an sbp.Partial but not pinned partial; pin it in in_types or call .reduce()"
            " first"
        )
        raise refused(f"{what} {why}", ValueError, code="not-partial")
    if isinstance(x, Partial) and tuple(x.parts.shape[: x.rank]) != part_sizes(x.type, mesh):
        raise refused(
            f"{what} is a Partial of {x.type!r} with parts {tuple(x.parts.shape[: x.rank])}, which"
            f" do not fit the mesh ({', '.join(f'{n}={size}' for n, size in axes_of(mesh))}); call"
            " its .reduce() first",
            ValueError,
            code="not-partial",
        )
    array = x.parts if isinstance(x, Partial | Padded) else x
    sharding = getattr(array, "sharding", None)
    has = own_kind(getattr(sharding, "memory_kind", None), mesh)
    wants = own_kind(leaf.memory, mesh)
    placed = isinstance(sharding, jax.sharding.Sharding)
    if placed and leaf.memory is not None and has != wants:
        raise refused(
            f"{what} is in {has or 'device'} memory, but its sharding in in_shardings or in_types"
            f" asks for {wants or 'device'} memory; move the array with jax.device_put, or ask for"
            f" memory_kind={has or 'device'!r}",
            ValueError,
            code="memory-kind",
        )
    kind = has if placed else wants
    return replace(
        leaf,
        memory=kind,
        in_host=kind == HOST and (placed or isinstance(array, jax.ShapeDtypeStruct)),
    )


def _no_array(x: Any) -> str:
    """Why JAX takes no such argument, and what to pass instead."""
    dtype = getattr(x, "dtype", None)
    arrays = np.ndarray | np.generic | jax.ShapeDtypeStruct
    if not isinstance(x, arrays) or not isinstance(dtype, np.dtype):
        return f"is not an array: {type(x).__name__}; mark it static or pass an array"
    if not dtype.isnative and dtype.kind in "biufc":
        return (
            f"has dtype {dtype.str}, the other byte order than this machine's; pass"
            f" x.astype({dtype.newbyteorder('=').name!r})"
        )
    return (
        f"has dtype {dtype.str}, which JAX does not take; pass an array of numbers or booleans,"
        ' such as x.astype("float32"), or mark it static'
    )


def shape_of(x: Any, name: str) -> jax.ShapeDtypeStruct:
    """Global shape and dtype of an input.

    Raises:
      SbpError: `bad-argument` for an input that is no array.
    """
    if isinstance(x, Partial | Padded):
        if x.problem:
            raise refused(f"input {name} is {x!r} and {x.problem}", ValueError)
        return jax.ShapeDtypeStruct(
            x.shape if isinstance(x, Padded) else x.parts.shape[x.rank :],
            jax.dtypes.canonicalize_dtype(x.parts.dtype, allow_extended_dtype=True),
        )
    if isinstance(x, jax.Ref):
        raise refused(
            f"input {name} is a Ref, which devices cannot share; pass its value, and return the new"
            " one",
            TypeError,
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        if not all(is_symbolic_dim(n) or (is_whole(n) and n >= 0) for n in x.shape):
            raise refused(
                f"input {name} is a ShapeDtypeStruct of shape {x.shape}; give each dim's size as a"
                " whole number",
                ValueError,
            )
        if isinstance(x.dtype, np.dtype) and (x.dtype.kind in "OUSMm" or not x.dtype.isnative):
            raise refused(f"input {name} {_no_array(x)}", TypeError)
    try:
        aval: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        kept = _jax.is_extended(aval.dtype)
        dtype = aval.dtype if kept else jax.dtypes.canonicalize_dtype(aval.dtype)
        return jax.ShapeDtypeStruct(
            aval.shape, dtype, weak_type=bool(getattr(aval, "weak_type", False))
        )
    except (TypeError, AttributeError) as error:
        raise refused(f"input {name} {_no_array(x)}", TypeError) from error
    except (OverflowError, ValueError) as error:
        raise refused(f"input {name} is not an array that JAX takes: {error}", error) from error


def codes_of(t: NdSbp | None, mesh: MeshSpec) -> tuple[int | None, ...] | None:
    """A type in codes, with None on each free axis; None for None."""
    return (
        None
        if t is None
        else tuple(
            None if axis in t.free else c
            for axis, c in zip(mesh.names, from_type(t, mesh), strict=True)
        )
    )


def even_boundary(leaf: Leaf, shape: tuple[int, ...], mesh: MeshSpec, where: str) -> Leaf:
    """An array with its type at the boundary of a program. JAX shards arrays evenly, so a mesh axis
    that does not divide its dim becomes B there, with a warning; the program slices or gathers the
    array inside. What is held padded keeps its type, unless it has no elements to split.

    Arguments:
      leaf: the array, with the type that is asked for.
      shape: its global shape.
      mesh: the mesh.
      where: the input or output, for the warning.

    Raises:
      SbpError: for a type with a P that arrays of the dtype do not have.
    """
    t = leaf.type
    check_monoids(t or NdSbp(), leaf.aval.dtype, where)
    if t is None or is_even(shape, from_type(t, mesh), mesh.sizes):
        return leaf.with_type(t)
    if leaf.padded:
        return leaf.with_type(NdSbp(free=t.free) if 0 in shape else t)
    atoms: dict[str, Atom] = {}
    for axis in mesh.names:
        if axis not in t.free:
            trial = NdSbp({**atoms, axis: t.get(axis)})
            atoms[axis] = t.get(axis) if is_even(shape, from_type(trial, mesh), mesh.sizes) else B
    even = NdSbp(atoms, t.free)
    why = "has no elements to split" if 0 in shape else "does not divide evenly"
    more = (
        ""
        if 0 in shape
        else " and slices or gathers it inside the program; pad the dim, or use"
        f' sbp.padded("{t!r}") to keep it split between calls'
    )
    warn(
        "uneven-boundary",
        f"{where} of shape {shape}",
        f"{why} under {t!r}, so sbp holds the array as {even!r} at the boundary{more}",
    )
    return replace(leaf.with_type(even), pin=Pin(t, complete=True))


# ---- shardings ----------------------------------------------------------------------------------
# `in_shardings` and `out_shardings` as `jax.jit` takes them: types by another name.


def is_given(shardings: Any) -> bool:
    """Whether an option asks for shardings at all."""
    return shardings is not None and not _jax.is_unspecified(shardings)


def types_of(types: Any, shardings: Any, option: str) -> Any:
    """The types that one of the options `in_shardings` and `out_shardings` asks for.

    Arguments:
      types: `in_types` or `out_types`.
      shardings: the option: a pytree prefix of `NamedSharding`s, `PartitionSpec`s and None.
      option: its name, for errors.

    Returns:
      A pytree prefix of types. `types`, where no sharding is asked for.

    Raises:
      SbpError: `bad-argument` where both are given, and for what is no sharding of a mesh.
    """
    if not is_given(shardings):
        return types
    if types is not None:
        raise SbpError(f"{option} and {other_option(option)} set the same types; pass one of them")
    if option == "in_shardings" and isinstance(shardings, list):
        shardings = tuple(shardings)  # as jax.jit does
    for leaf in _leaves(shardings):
        spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
        if isinstance(spec, PartitionSpec):
            if PartitionSpec.UNCONSTRAINED in spec.partitions:
                raise refused(
                    f"{option} has {spec}, with an UNCONSTRAINED dim; {other_option(option)} takes"
                    " types with free axes, such as 'data:S(0) model:?'",
                    ValueError,
                )
        elif isinstance(leaf, jax.sharding.Sharding):
            raise refused(
                f"{option} has a {type(leaf).__name__}; give a NamedSharding on the mesh, or None"
                " to leave it to sbp",
                ValueError,
            )
        elif leaf is not None and not _jax.is_unspecified(leaf):
            raise refused(
                f"{option} takes a pytree of NamedSharding, PartitionSpec or None, got"
                f" {show(leaf)}; {other_option(option)} takes types, such as 'data:S(0)', and sbp"
                " leaves layouts in memory to XLA",
                TypeError,
            )
    return shardings


def other_option(option: str) -> str:
    """The option that takes types where this one takes shardings."""
    return option.replace("shardings", "types")


def mesh_of(*shardings: Any) -> Mesh | AbstractMesh | None:
    """The mesh of the first `NamedSharding`; None where there is none."""
    return next(
        (
            leaf.mesh
            for option in shardings
            for leaf in _leaves(option)
            if isinstance(leaf, NamedSharding)
        ),
        None,
    )


def _leaves(shardings: Any) -> list[Any]:
    """The entries of an option; none if the option is not given."""
    return (
        leaves_of(shardings, "in_shardings and out_shardings", lambda x: x is None)[0]
        if is_given(shardings)
        else []
    )
