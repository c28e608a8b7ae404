"""The check of a program with `jax.shard_map`: its trace, and its findings as diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from sbp.errors import Diagnostic, refused
from sbp.machine.mesh import MeshSpec
from sbp.pytrees import leaves_of, returning_arrays
from sbp.shardmap.doubt_words import doubt_diagnostic
from sbp.shardmap.helps import Helper
from sbp.shardmap.regions import Analysis
from sbp.shardmap.state import Finding, FoundRepairs
from sbp.shardmap.words import diagnostic, primary
from sbp.trace.build import body_graph
from sbp.trace.graph import Graph


def traced(fn: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh | AbstractMesh) -> Graph:
    """The program on abstract arguments, with dead code: the divisions of a gradient are found by
    those of its forward part."""
    leaves, structure = leaves_of(args, "sbp.check_shard_map")
    shapes = [_abstract(x) for x in leaves]

    def flat(*values: Any) -> Any:
        return returning_arrays(fn)(*jax.tree.unflatten(structure, values))

    try:
        return body_graph(jax.make_jaxpr(flat)(*shapes))
    except ValueError as error:
        if "context mesh cannot be empty" not in str(error):
            raise
    with jax.sharding.use_abstract_mesh(
        mesh.abstract_mesh
    ):  # a shard_map without a mesh of its own
        return body_graph(jax.make_jaxpr(flat)(*shapes))


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype"):
        sharding = getattr(x, "sharding", None)
        explicit = (
            isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
        )
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if explicit else None)
    if isinstance(x, bool | int | float | complex):
        dtype = np.asarray(x).dtype
        if dtype.kind != "O":  # as for whole numbers of more than 64 bits
            return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(dtype), weak_type=True)
    raise refused(
        f"sbp.check_shard_map takes arrays and jax.ShapeDtypeStructs, got {type(x).__name__}; close"
        " over what is no array",
        TypeError,
    )


def diagnostics_of(
    graph: Graph, mesh: MeshSpec, found: Analysis, *, helped: bool = True
) -> tuple[Diagnostic, ...]:
    """The findings and doubts of a program in words, in source order.

    Arguments:
      graph: the program.
      mesh: its mesh.
      found: its findings and doubts.
      helped: whether findings get helps.
    """
    helper = Helper(graph, mesh, found) if helped else None
    said = [
        diagnostic(f, mesh, helper.helps(f) if helper else FoundRepairs())
        for f in _causes(found.findings)
    ]
    said += [doubt_diagnostic(d) for d in found.doubts]
    return in_source_order(said)


def in_source_order(said: Sequence[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Diagnostics by their places; those without one come last."""
    return tuple(
        sorted(said, key=lambda d: (d.primary is None, d.primary.span if d.primary else None))
    )


def _causes(findings: tuple[Finding, ...]) -> list[Finding]:
    """Findings without consequences. A finding in a gradient is one where the forward part has a
    finding on the same mesh axis; a doubled reduction is one where the value is left partial on
    another mesh axis, over which the reduction was meant to run."""
    forward = [f for f in findings if not primary(f).backward]

    def follows(finding: Finding) -> bool:
        certain = finding.severity == "error"
        causes = [f for f in forward if f.severity == "error" or not certain]
        axes = {axis for f in causes for axis in f.mesh_axes}
        if primary(finding).backward and axes & set(finding.mesh_axes):
            return True
        return any(_misdirected(finding, f) for f in causes)

    return [f for f in findings if not follows(f)]


def _misdirected(doubled: Finding, missing: Finding) -> bool:
    """Whether a reduction over the wrong mesh axis reduces the value of another finding, which is
    not reduced over the right one."""
    if (doubled.fault.kind, missing.fault.kind) != ("doubled", "missing"):
        return False
    if doubled.region is not missing.region or set(doubled.mesh_axes) & set(missing.mesh_axes):
        return False
    reached = set(missing.fault.node.outputs)
    for node in doubled.region.params["body"].nodes:
        if reached & set(node.inputs):
            reached |= set(node.outputs)
    return bool(reached & set(doubled.fault.node.inputs))
