"""Pins on a mesh: unknown axes are refused, device assignments become types."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from typing import Any

import numpy as np

from sbp.annotations import Pin, annotate_p
from sbp.errors import ArgumentValueError, SbpError, Span, nearest
from sbp.infer.shardings import pin_of_sharding
from sbp.infer.space import from_type, to_type
from sbp.kinds import shown
from sbp.machine.mesh import MeshSpec
from sbp.signatures.factors import admissible
from sbp.trace.graph import Graph, Node
from sbp.types import NdSbp, Split, Unreduced


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
                f"the mesh ({mesh}) has no axis {shown(axis)}{nearest(axis, mesh.names)}",
                code="unknown-axis",
                span=span,
                subject=where,
            )
            near = difflib.get_close_matches(axis, mesh.names, n=len(mesh.names), cutoff=0.0)
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
            known = ", ".join(admissible(dtype)) or "no monoid"
            raise SbpError(
                f"{axis}:{atom!r} on {dtype}, which has {known}; convert it first or pin another"
                " type",
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
                f"dim {dim} is split over {', '.join(given)}, against the mesh order"
                f" {', '.join(wanted)}; name them in that order, or build the mesh in the other",
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
    ids = np.arange(mesh.num_devices).reshape(mesh.sizes) if device_ids is None else device_ids

    def visit(g: Graph) -> Graph:
        return dataclasses.replace(g, nodes=tuple(node_of(g, n) for n in g.nodes))

    def node_of(g: Graph, node: Node) -> Node:
        if node.regions:
            node = dataclasses.replace(node, regions=tuple(visit(r) for r in node.regions))
        if node.op != annotate_p.name or node.params["pin"] is None:
            return node
        pin: Pin = node.params["pin"]
        where = str(node.span) if node.span else "an annotation"
        if pin.device_assignment is not None:
            t = placement(
                g.avals[node.outputs[0]].shape, pin.device_assignment, mesh, ids, where, node.span
            )
            return dataclasses.replace(
                node,
                params=node.params
                | {"pin": dataclasses.replace(pin, type=t, device_assignment=None)},
            )
        if pin.sharding is not None:
            shape = g.avals[node.outputs[0]].shape
            pin = pin_of_sharding(pin, shape, mesh, device_ids, node.span)
            node = dataclasses.replace(node, params=node.params | {"pin": pin})
        check_axes(pin.type, mesh, where, node.span)
        if pin.ordered:
            _check_order(pin.type, mesh, where, node.span)
        check_monoids(pin.type, g.avals[node.outputs[0]].dtype, where, node.span)
        return node

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
    wanted = np.array(flat).reshape(counts)
    for codes in itertools.product(range(len(shape) + 1), repeat=len(mesh.sizes)):
        parts = [
            math.prod(n for c, n in zip(codes, mesh.sizes, strict=True) if c == d + 1)
            for d in range(len(shape))
        ]
        if tuple(parts) != tuple(counts) or (0 in codes and math.prod(counts) != mesh.num_devices):
            continue
        order: list[int] = []
        for d in range(len(shape)):
            order += [i for i, c in enumerate(codes) if c == d + 1]
        placed = ids.transpose([*order, *(i for i, c in enumerate(codes) if c == 0)])
        if placed.size == wanted.size and np.array_equal(placed.reshape(counts), wanted):
            return to_type(codes, mesh)
    raise SbpError(
        f"no split of the mesh ({mesh}) places slices of {shape} in the device order"
        f" given, partitions {tuple(counts)}; build the mesh with its devices permuted to that"
        " order",
        code="bad-placement",
        span=span,
        subject=where,
    )


def pinned_codes(pin: Pin, mesh: MeshSpec) -> tuple[int | None, ...]:
    """The code that a pin asks on each mesh axis; None where it leaves the axis to inference."""
    codes = from_type(pin.type, mesh)
    return tuple(
        c if (axis in pin.type or (pin.complete and axis not in pin.type.free)) else None
        for axis, c in zip(mesh.names, codes, strict=True)
    )
