"""Pins on a mesh: unknown axes are refused, device assignments become types."""

import difflib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sbp.annotations import Pin, annotate_p, axes_of_entry, check_rank, from_spec
from sbp.errors import ArgumentValueError, SbpError, Span, nearest
from sbp.infer.space import from_type, to_type
from sbp.kinds import show
from sbp.machine.mesh import MeshSpec
from sbp.signatures.factors import admissible, monoid_refusal
from sbp.trace.graph import Graph, Node
from sbp.types import NdSbp, Split, Unreduced

# ---- shardings ----------------------------------------------------------------------------------
# Pins that a program asks for in JAX's own words: the types of `NamedSharding`s on a mesh.


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
    free = [d for d, e in enumerate(sharding.spec.partitions) if e is PartitionSpec.UNCONSTRAINED]
    whole = tuple(d for d in range(len(shape)) if d not in free) if free else ()
    return replace(pin, type=t, sharding=None, complete=not free, whole=whole)


def _is_same(own: Mesh, mesh: MeshSpec, ids: np.ndarray | None) -> bool:
    """Whether a mesh has the axes of another one, and its devices where it has any."""
    axes = tuple(map(str, own.axis_names)), tuple(int(n) for n in own.devices.shape)
    return axes == (mesh.names, mesh.sizes) and (
        ids is None or np.array_equal(device_ids(own), ids)
    )


def _check_sizes(sharding: NamedSharding, mesh: MeshSpec) -> None:
    """Checks that the mesh has the axes that a sharding names, of equal size."""
    spec = sharding.spec
    for axis in (*itertools.chain(*map(axes_of_entry, spec.partitions)), *sorted(spec.unreduced)):
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
    axes, entries = [str(a) for a in sharding.mesh.axis_names], sharding.spec.partitions
    padded = [*entries, *[None] * len(shape)][: len(shape)]
    dims = [[axes.index(a) for a in axes_of_entry(entry)] for entry in padded]
    own = device_ids(sharding.mesh)
    if not sharding.spec.unreduced and PartitionSpec.UNCONSTRAINED not in entries:
        found = _type_with(own, block_numbers(own.shape, dims), mesh, ids)
        if found is not None:
            return found
    raise SbpError(
        f"no type on the mesh of sbp.jit ({mesh}) puts the shards on the same devices as"
        f" {sharding.spec} on the mesh {dict(sharding.mesh.shape)}; build the sharding on the mesh"
        " of sbp.jit",
        code="bad-placement",
    )


def _type_with(
    devices: np.ndarray, blocks: np.ndarray, mesh: MeshSpec, ids: np.ndarray
) -> NdSbp | None:
    """The first type that gives each device its block along each dim; None when no type does.

    Arguments:
      devices: ids of devices.
      blocks: for each dim the blocks of these devices.
      mesh: the mesh.
      ids: ids of its devices, in the shape of the mesh.
    """
    order = np.argsort(ids, axis=None)
    if not np.array_equal(np.sort(devices, axis=None), ids.ravel()[order]):
        return None
    wanted, rank = blocks[:, np.argsort(devices, axis=None)], len(blocks)
    for codes in itertools.product(range(rank + 1), repeat=len(mesh.sizes)):
        splits = [[i for i, c in enumerate(codes) if c == d + 1] for d in range(rank)]
        if np.array_equal(block_numbers(ids.shape, splits)[:, order], wanted):
            return to_type(codes, mesh)
    return None


def block_numbers(sizes: Sequence[int], dims: Sequence[Sequence[int]]) -> np.ndarray:
    """The number of each device's block along each dim, with devices in the order of the mesh.

    Arguments:
      sizes: sizes of the mesh axes.
      dims: for each dim the positions of the axes that split it, outer first.
    """
    at = np.indices(sizes).reshape(len(sizes), math.prod(sizes))
    found = np.zeros((len(dims), at.shape[1]), dtype=int)
    for d, axes in enumerate(dims):
        for axis in axes:
            found[d] = found[d] * sizes[axis] + at[axis]
    return found


def device_ids(mesh: Any) -> np.ndarray:
    """The ids of the devices of a mesh, in its shape."""
    return np.vectorize(lambda d: d.id, otypes=[int])(mesh.devices)


# ---- pins ---------------------------------------------------------------------------------------


def check_axes(t: NdSbp, mesh: MeshSpec, where: str, span: Span | None = None) -> None:
    """Checks that the mesh has all axes that a type names.

    Arguments:
      t: the type.
      mesh: the mesh.
      where: the place of the type, for the error.
      span: the user's line.

    Raises:
      SbpError: `unknown-axis`.
    """
    for axis in (*t, *sorted(t.free)):
        if axis not in mesh.names:
            error = ArgumentValueError(
                f"the mesh ({mesh}) has no axis {show(axis)}{nearest(axis, mesh.names)}",
                code="unknown-axis",
                span=span,
                subject=where,
            )
            near = difflib.get_close_matches(axis, mesh.names, n=len(mesh.names) or 1, cutoff=0.0)
            raise error.with_slip(axis, *near)


def check_monoids(t: NdSbp, dtype: Any, where: str, span: Span | None = None) -> None:
    """Checks that a dtype has all monoids of a type: booleans have no sum, floats no bitwise
    monoid. The other arguments are those of `check_axes`.

    Arguments:
      dtype: of the value that has the type.

    Raises:
      SbpError: `bad-argument`.
    """
    for axis, atom in t.items():
        if isinstance(atom, Unreduced) and atom.monoid not in admissible(dtype):
            raise SbpError(
                monoid_refusal(dtype, atom, axis),
                span=span,
                subject=where,
            )


def _check_order(t: NdSbp, mesh: MeshSpec, where: str, span: Span | None) -> None:
    """Checks that the axes which split one dim stand in the order of the mesh.

    Raises:
      SbpError: `bad-placement`.
    """
    for dim in sorted({atom.dim for atom in t.values() if isinstance(atom, Split)}):
        given = [name for name, atom in t.items() if atom == Split(dim)]
        wanted = [name for name in mesh.names if name in given]
        if given != wanted:
            raise SbpError(
                f"dim {dim} is split over {', '.join(given)}, but the mesh has these axes in the"
                f" order {', '.join(wanted)}; name them in the order of the mesh, or build the mesh"
                f" in the order {', '.join(given)}",
                code="bad-placement",
                span=span,
                subject=where,
            )


def resolve_pins(graph: Graph, mesh: MeshSpec, device_ids: np.ndarray | None) -> Graph:
    """The graph with annotations that fit the mesh. A device assignment becomes a type.

    Arguments:
      graph: the traced program.
      mesh: the mesh.
      device_ids: ids of the mesh's devices in the shape of the mesh; None for an abstract mesh,
          whose ids count from 0.

    Raises:
      SbpError: `unknown-axis`, `bad-argument` or `bad-placement` for an annotation that does not
        fit the mesh or the dtype.
    """
    # The devices of an abstract mesh count from 0.
    ids = np.arange(mesh.num_devices).reshape(mesh.sizes) if device_ids is None else device_ids

    def visit(g: Graph) -> Graph:
        return replace(g, nodes=tuple(node_of(g, n) for n in g.nodes))

    def node_of(g: Graph, node: Node) -> Node:
        if node.regions:
            node = replace(node, regions=tuple(visit(r) for r in node.regions))
        where = str(node.span) if node.span else "an annotation"
        if node.op == annotate_p.name and node.params["cotangent"] is not None:
            check_axes(node.params["cotangent"].type, mesh, where, node.span)
        if node.op != annotate_p.name or node.params["pin"] is None:
            return node
        pin: Pin = node.params["pin"]
        aval = g.avals[node.outputs[0]]
        if pin.device_assignment is not None:
            t = placement(aval.shape, pin.device_assignment, mesh, ids, where, node.span)
            pin = replace(pin, type=t, device_assignment=None)
        elif pin.sharding is not None:
            pin = pin_of_sharding(pin, aval.shape, mesh, device_ids, node.span)
        check_axes(pin.type, mesh, where, node.span)
        if pin.ordered:
            _check_order(pin.type, mesh, where, node.span)
        check_monoids(pin.type, aval.dtype, where, node.span)
        return replace(node, params=node.params | {"pin": pin})

    return visit(graph)


def placement(
    shape: tuple[int, ...],
    assignment: Any,
    mesh: MeshSpec,
    ids: np.ndarray,
    where: str,
    span: Span | None = None,
) -> NdSbp:
    """The ND type that places slices on the devices of a mesh as a GShard device assignment does.

    Arguments:
      shape: the shape of the value.
      assignment: the number of partitions along each dim, and the device ids of the slices in
        row-major order.
      mesh: the mesh.
      ids: ids of the mesh's devices in the shape of the mesh.
      where: the place of the annotation, for the error.
      span: the user's line.

    Raises:
      SbpError: `bad-placement` when no type does.
    """
    counts, flat = assignment
    if len(counts) == len(shape):
        blocks = np.indices(counts).reshape(len(counts), len(flat))
        found = _type_with(np.array(flat), blocks, mesh, ids)
        if found is not None:
            return found
    raise SbpError(
        f"no split on the mesh ({mesh}) puts {tuple(counts)} slices of an array of shape {shape} on"
        " the devices in the given order; build the mesh with its devices in that order",
        code="bad-placement",
        span=span,
        subject=where,
    )


def pinned_codes(pin: Pin, mesh: MeshSpec) -> tuple[int | None, ...]:
    """The code that a pin asks on each mesh axis; None where it leaves the axis to inference."""
    return tuple(
        c if (axis in pin.type or (pin.complete and axis not in pin.type.free)) else None
        for axis, c in zip(mesh.names, from_type(pin.type, mesh), strict=True)
    )
