"""The collectives that a plan runs, as devices send them: a step of a conversion may be several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sbp.infer.sends import step_sends
from sbp.plan.program import Program
from sbp.signatures import Sent
from sbp.trace.collectives import KINDS, SENT_AS
from sbp.trace.traffic import collective_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """Collectives of one kind at one place of a plan.

    Arguments:
      kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `broadcast`.
      mesh_axes: names of the mesh axes that they run over.
      runs: how many run in one call.
      bytes_per_device: bytes that one device sends in all of them.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    runs: int
    bytes_per_device: float


def planned_collectives(program: Program) -> Iterator[PlannedCollective]:
    """The collectives of a plan: of its conversions, of its kernels, of regions written by hand."""
    names, mesh = program.mesh.names, program.mesh
    for planned in program.boxes():
        aval = program.graph.avals[planned.box.target.value]
        for step in planned.box.steps:
            for sent in step_sends(step, aval, mesh):
                axes = tuple(names[i] for i in step.mesh_axes)
                yield _planned(sent, axes, planned.trips)
    for operation, runs in program.kernels():
        for position, sent in operation.sends:
            yield _planned(sent, (names[position],), runs)
    for region, runs in program.written_by_hand():
        for run in collective_runs(region):
            sent = Sent(SENT_AS[KINDS[run.node.op]], run.bytes_per_device, run.runs)
            yield _planned(sent, run.mesh_axes, runs)


def _planned(sent: Sent, mesh_axes: tuple[str, ...], runs: int) -> PlannedCollective:
    return PlannedCollective(
        kind=sent.kind,
        mesh_axes=mesh_axes,
        runs=runs * sent.rounds,
        bytes_per_device=runs * sent.bytes,
    )
