"""The check of a program with `jax.shard_map`: its trace, and its findings as diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from sbp.errors import Diagnostic, Help, refused
from sbp.machine.mesh import MeshSpec
from sbp.pytrees import leaves_of, returning_arrays
from sbp.shardmap.doubt_words import doubt_diagnostic
from sbp.shardmap.edits import GraphEdit, bytes_sent, edited
from sbp.shardmap.regions import Analysis, analyse
from sbp.shardmap.repairs import RepairCandidate, Repairs
from sbp.shardmap.sites import Sites
from sbp.shardmap.state import Finding, FoundRepairs
from sbp.shardmap.words import diagnostic, primary
from sbp.trace.build import body_graph
from sbp.trace.graph import Graph

# ---- helps --------------------------------------------------------------------------------------
# Helps: edits of the source that remove a finding and add none, with the bytes that the edited
# program sends as their price.


MAX_HELPS = 3
"""The most repairs that are offered for one finding."""

TRIED = 24
"""The largest number of repairs that are tried for one finding."""

_ONE = ("copies-as-split", "doubled", "missing", "pending")
"""Kinds of faults whose candidates are one repair in several spellings: only the first accepted one
is offered."""


class Helper:
    """Tries repairs on a program.

    Arguments:
      graph: the program.
      mesh: its mesh.
      found: its findings and doubts.
      tried: the largest number of repairs that are tried for one finding.
    """

    def __init__(
        self, graph: Graph, mesh: MeshSpec, found: Analysis, *, tried: int = TRIED
    ) -> None:
        self.tried = tried
        self.graph, self.mesh = graph, mesh
        self.sites = Sites(graph)
        self.keys = frozenset(f.key for f in found.findings)
        self.doubts = frozenset(d.key for d in found.doubts)

    def helps(self, finding: Finding) -> FoundRepairs:
        """The accepted repairs."""
        found: dict[str, Help] = {}
        places: set[object] = set()
        if finding.region.backward:  # it follows from the region that is differentiated
            return FoundRepairs()
        most = 1 if finding.fault.kind in _ONE else MAX_HELPS
        accepted = 0
        repairs = Repairs(self.mesh, self.sites).of(finding)
        for repair in islice(repairs, self.tried):
            if repair.place in places or (repair.spare and found):
                continue
            new = {h.text: h for h in self.ways(finding, repair) if h.text not in found}
            found |= new
            if new:
                places |= {repair.place} - {None}
                accepted += 1
                if accepted == most:
                    break
        return FoundRepairs(
            helps=tuple(sorted(found.values(), key=lambda h: h.bytes_per_device)),
            untried=most > 1 and next(repairs, None) is not None,
        )

    def ways(self, finding: Finding, repair: RepairCandidate) -> list[Help]:
        """The accepted variants of a repair, as helps: one, or several with a condition each where
        the checker cannot decide between them."""
        made = [(e, self.accepted(finding, e)) for e in repair.edits]
        right = [(k, e, g) for k, (e, g) in enumerate(made) if g is not None]
        if any(self.accepted(finding, e) is not None for e in repair.contrary if right):
            return []
        if len(right) == 1 or repair.contrary:
            return [self.help(finding, e, g) for _, e, g in right[:1]]
        return [self.help(finding, e, g, repair.conditions[k]) for k, e, g in right]

    def help(self, finding: Finding, edit: GraphEdit, made: Graph, condition: str = "") -> Help:
        """An edit with its price.

        Arguments:
          finding: what it repairs.
          edit: the edit.
          made: the edited program.
          condition: the condition under which it is right; empty for none.
        """
        return Help(
            text=f"{edit.text}, {condition}" if condition else edit.text,
            edits=(*edit.source, *edit.options),
            bytes_per_device=bytes_sent(made),
            peak_memory_bytes=None,
            clears_all_errors=not self.keys - {finding.key},
            condition=condition,
        )

    def accepted(self, finding: Finding, edit: GraphEdit) -> Graph | None:
        """The edited program. None where the finding remains, another one appears, something about
        the edited values is unknown, or the source does not show the place of the edit."""
        if not (edit.source or edit.options):
            return None
        made = edited(self.graph, edit, dict(self.mesh.axes))
        found = analyse(made, self.mesh)
        left = [f for f in found.findings if not f.region.backward]
        if any(
            f.key == finding.key or f.key not in self.keys or _follows(f, finding) for f in left
        ):
            return None
        return None if self.open(found, finding, edit) else made

    def open(self, found: Analysis, finding: Finding, edit: GraphEdit) -> bool:
        """Whether something about the edited values is unknown, so that the edit is not shown to be
        right."""
        claims = {(finding.region.id, finding.result, a) for a in finding.mesh_axes}
        if finding.claim is not None and claims & found.unshown:
            return True
        maker = self.sites.maker(finding.region, finding.result)
        claimed = set[int]() if maker is None or finding.claim is None else {maker.id}
        near = self.sites.connected(edit.touched() | claimed)
        return any(
            d.key not in self.doubts or d.node.id in near or d.node.id == finding.region.id
            for d in found.doubts
        )


def _follows(other: Finding, finding: Finding) -> bool:
    """Whether a finding in a gradient is a consequence of another one in the forward part; a repair
    must remove both."""
    return (
        primary(other).backward
        and not primary(finding).backward
        and bool(set(other.mesh_axes) & set(finding.mesh_axes))
    )


# ---- checks -------------------------------------------------------------------------------------


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
