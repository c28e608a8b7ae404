"""The check of a program with `jax.shard_map`: its trace, its findings and their repairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from sbp import _jax
from sbp.errors import (
    SHOWN,
    Diagnostic,
    Help,
    SbpError,
    Span,
    position_text,
    refused,
)
from sbp.handwritten.emulation import claims, regions_of
from sbp.handwritten.faults import (
    BY_SHARD,
    COUNTED,
    Fault,
    Finding,
    region_findings,
    reversed_order,
)
from sbp.handwritten.measured import scalars
from sbp.handwritten.one_device import ComparedRun, Comparisons
from sbp.handwritten.repairs import GraphEdit, Repairs, bytes_sent, edit_program
from sbp.handwritten.sites import Sites
from sbp.handwritten.words import DIFFERS, diagnostic, primary, run_diagnostic
from sbp.kinds import leaves_of, returning_arrays
from sbp.machine.mesh import MeshSpec
from sbp.source.reader import source_text, users_span
from sbp.trace.build import body_graph
from sbp.trace.collectives import CollectiveRun, collective_runs
from sbp.trace.graph import Graph, Node

# ---- coverage -----------------------------------------------------------------------------------
# What was checked of a program: its collectives with the bytes that they send, and its comparisons
# with one device.


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCollective:
    """A collective of a region, with all calls of its line.

    Arguments:
      text: the user's expression.
      span: its place; None where the user's line is not known.
      op: the primitive's name.
      mesh_axes: the mesh axes that it runs over.
      runs: how often it runs in one call of the program.
      bytes_per_device: the bytes that one device sends in all runs.
    """

    text: str
    span: Span | None
    op: str
    mesh_axes: tuple[str, ...]
    runs: int
    bytes_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was checked of a program.

    Arguments:
      regions: the number of its regions, including the regions of gradients.
      values: the number of values in them.
      collectives: its collectives, in program order.
      runs: its comparisons with one device of each mesh axis.
    """

    regions: int
    values: int
    collectives: tuple[CheckedCollective, ...]
    runs: tuple[ComparedRun, ...] = ()


def coverage(compared: Comparisons) -> Coverage:
    """What was checked of a program, by its comparisons."""
    regions = [*regions_of(compared.graph)]
    grouped: dict[Any, list[CollectiveRun]] = {}
    for run in (run for region in regions for run in collective_runs(region)):
        span = users_span(run.node)
        grouped.setdefault((span or run.node.id, run.node.op, run.mesh_axes), []).append(run)
    return Coverage(
        regions=len(regions),
        values=sum(len(n.outputs) for r in regions for n in r.params["body"].walk()),
        collectives=tuple(
            CheckedCollective(
                text=source_text(users_span(runs[0].node)) or runs[0].node.op,
                span=users_span(runs[0].node),
                op=runs[0].node.op,
                mesh_axes=runs[0].mesh_axes,
                runs=sum(r.runs for r in runs),
                bytes_per_device=sum(r.bytes_per_device for r in runs),
            )
            for runs in grouped.values()
        ),
        runs=tuple(c.run for c in compared.compared),
    )


# ---- analysis -----------------------------------------------------------------------------------


def check_mesh(graph: Graph, mesh: MeshSpec) -> None:
    """Checks that a program has regions, over a given mesh.

    Raises:
      SbpError: `bad-argument` when there is none, or one over another mesh.
    """
    every = [*regions_of(graph)]
    if not every:
        raise SbpError(
            "the function does not call jax.shard_map, so there is nothing to check; for other"
            " functions, use sbp.jit(f, mesh).check(..)"
        )
    for node in every:
        given = {str(k): int(n) for k, n in node.params["mesh"].shape.items()}
        if given != dict(mesh.axes):
            where = f" at {position_text(node.span.file, node.span.line)}" if node.span else ""
            own = " ".join(f"{k}={n}" for k, n in given.items())
            raise SbpError(
                f"the shard_map{where} uses the mesh {own}, but mesh= has {mesh}; pass the mesh of"
                " the shard_map"
            )


def find_faults(compared: Comparisons) -> tuple[tuple[Finding, ...], dict[str, list[Node]]]:
    """The faults of a program; and for each mesh axis, operations at which types end because of a
    value of another device or of the device's index."""
    found, ends = dict[tuple[Any, ...], Finding](), dict[str, list[Node]]()
    for c in compared.compared:
        name, written = c.run.mesh_axis, compared.axes[c.run.mesh_axis]
        for node, results in claims(compared.graph) if any(c.types) or c.uneven else ():
            manual = node.params.get("newly_manual_axes", node.params.get("manual_axes", ()))
            if name not in manual:
                continue
            uneven = [i for at, i, a in compared.uneven if (at, a) == (node.id, name)]
            for finding in region_findings(node, c, results, uneven, ends.setdefault(name, [])):
                kind = finding.fault.kind
                if c.meant and not c.uneven and kind in (*COUNTED, *BY_SHARD):
                    continue
                if kind in COUNTED and scalars(finding.fault.node):
                    numbers = (*finding.numbers, *sorted(written.numbers))
                    finding = replace(finding, numbers=numbers)
                # The same fault on several mesh axes is one.
                known = found.get(finding.key, finding)
                both = {*known.mesh_axes, *finding.mesh_axes}
                axes = tuple(a for a in compared.mesh.names if a in both)
                found[finding.key] = replace(known, mesh_axes=axes)
    if not found and all(c.wrong for c in compared.compared):
        orders = ((node, reversed_order(node)) for node in regions_of(compared.graph))
        wrong = (Finding(Fault("order", node), axes, None, node) for node, axes in orders if axes)
        found |= {finding.key: finding for finding in wrong}
    # A collective that mixes up the dims of a value does so on other mesh axes as well.
    placed = {f.fault.node.id for f in found.values() if f.fault.kind != "local"}
    findings = (
        f for f in found.values() if f.fault.kind != "local" or f.fault.node.id not in placed
    )
    return tuple(findings), ends


# ---- helps --------------------------------------------------------------------------------------
# Helps: edits of the source with which the program computes on the mesh what it does on one device,
# with the bytes that the edited program sends as their price.


TRIED = 24
"""The largest number of repairs that are tried for one finding."""

_ONE = ("copies-as-split", "doubled", "missing", "pending")
"""Kinds of faults whose candidates are one repair in several spellings: only the first accepted one
is offered."""


class Helper:
    """Tries repairs on a program.

    Arguments:
      compared: its comparisons with one device.
      tried: the largest number of repairs that are tried for one finding.
    """

    def __init__(self, compared: Comparisons, *, tried: int = TRIED) -> None:
        self.tried, self.compared = tried, compared
        self.graph, self.mesh = compared.graph, compared.mesh
        self.sites = Sites(self.graph)
        self.wrong = compared.wrong_of(self.graph)

    def helps(self, finding: Finding) -> tuple[tuple[Help, ...], bool]:
        """The accepted repairs, cheapest first, and whether the search for repairs stopped at a
        limit before all were tried."""
        found: dict[str, Help] = {}
        places: set[object] = set()
        if finding.region.backward:  # it follows from the region that is differentiated
            return (), False
        untried = {c.run.mesh_axis for c in self.compared.compared if c.run.untried}
        if self.wrong is None or untried & {*finding.mesh_axes}:  # nothing says what is right
            return (), True
        most = 1 if finding.fault.kind in _ONE else SHOWN
        repairs = Repairs(self.mesh, self.sites).of(finding)
        for variants in islice(repairs, self.tried):
            for edit in variants:
                if edit.place in places or (edit.spare and found):
                    break
                left = self.left(edit)
                if left is not None and edit.text not in found:
                    made, wrong = left
                    found[edit.text] = Help(
                        text=edit.text,
                        edits=(*edit.source, *edit.options),
                        bytes_per_device=bytes_sent(made),
                        peak_memory_bytes=None,
                        clears_all_errors=not wrong,
                    )
                    places |= {edit.place} - {None}
                    break
            if len(found) == most:
                break
        cheapest = tuple(sorted(found.values(), key=lambda h: h.bytes_per_device))
        return cheapest, most > 1 and next(repairs, None) is not None

    def left(self, edit: GraphEdit) -> tuple[Graph, frozenset[Any]] | None:
        """The edited program, and which of its results are wrong. None where these are not fewer
        than before, or where the source does not show the place of the edit."""
        if not (edit.source or edit.options):
            return None
        made = edit_program(self.graph, edit, dict(self.mesh.axes))
        wrong = self.compared.wrong_of(made)
        if wrong is None or self.wrong is None:
            return None
        results, before = ({w for w in every if len(w) == 1} for every in (wrong, self.wrong))
        fewer = results < before or (not before and wrong < self.wrong)
        return (made, wrong) if fewer and wrong <= self.wrong else None


# ---- checks -------------------------------------------------------------------------------------


def trace_program(
    fn: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh | AbstractMesh
) -> Graph:
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
        # JAX 0.12 warns of a struct of 64 bits where a call of the function would not.
        dtype = x.dtype if _jax.is_extended(x.dtype) else jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding if explicit else None)
    if isinstance(x, bool | int | float | complex):
        dtype = np.asarray(x).dtype
        if dtype.kind != "O":  # as for whole numbers of more than 64 bits
            return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(dtype), weak_type=True)
    raise refused(
        f"sbp.check_shard_map takes arrays and jax.ShapeDtypeStructs, got {type(x).__name__}; pass"
        " other values with functools.partial or a closure",
        TypeError,
    )


def diagnostics_of(compared: Comparisons) -> tuple[Diagnostic, ...]:
    """The faults of a program in words, in source order; then comparisons that show a fault and
    that no finding explains, and axes on which nothing was compared."""
    findings, ends = find_faults(compared)
    causes = _causes(findings)
    helper = Helper(compared) if causes else None
    said = [diagnostic(f, compared.mesh, helper.helps(f)) for f in causes if helper]
    shown = (run_diagnostic(c.run, ends.get(c.run.mesh_axis, ())) for c in compared.compared)
    said += [d for d in shown if d is not None and not (causes and d.code == DIFFERS)]
    return tuple(
        sorted(said, key=lambda d: (d.primary is None, d.primary.span if d.primary else None))
    )


def _causes(findings: tuple[Finding, ...]) -> list[Finding]:
    """Findings without consequences. A finding in a gradient is one where the forward part has a
    finding on the same mesh axis; a doubled reduction is one where the value is left partial on
    another mesh axis, over which the reduction was meant to run."""
    forward = [f for f in findings if not primary(f).backward]
    axes = {axis for f in forward for axis in f.mesh_axes}
    own = (f for f in findings if not primary(f).backward or axes.isdisjoint(f.mesh_axes))
    return [f for f in own if not any(_is_misdirected(f, other) for other in forward)]


def _is_misdirected(doubled: Finding, missing: Finding) -> bool:
    """Whether a reduction over the wrong mesh axis reduces the value of another finding, which is
    not reduced over the right one."""
    kinds = doubled.fault.kind in ("blocks", "doubled") and missing.fault.kind == "missing"
    same_axes = set(doubled.mesh_axes) & set(missing.mesh_axes)
    if not kinds or same_axes or doubled.region is not missing.region:
        return False
    reached = set(missing.fault.node.outputs)
    for node in doubled.region.params["body"].nodes:
        if reached & set(node.inputs):
            reached |= set(node.outputs)
    return bool(reached & set(doubled.fault.node.inputs))
