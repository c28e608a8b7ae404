"""Compares a hand-written region on a mesh with the same region on one device: both run on the same
random values, without devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp.errors import SbpInternalError
from sbp.handwritten.claims import ClaimedArray, outcome
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.emulation import FAILURES, differ, not_emulated, reason_of, too_large
from sbp.signatures.laws.parts import assemble
from sbp.trace.build import body_graph
from sbp.trace.graph import Graph


@dataclass(frozen=True, slots=True)
class OneDeviceRun:
    """What a region computes on a mesh, against what it computes on one device.

    Arguments:
      apart: the positions of the results that differ.
      untried: why it was not compared; empty where it was.
    """

    apart: tuple[int, ...] = ()
    untried: str = ""


def compared(
    graph: Graph,
    alone: Callable[[], tuple[Any, Sequence[ClaimedArray]]],
    ins: Sequence[ClaimedArray],
    outs: Sequence[ClaimedArray],
    mesh: MeshSpec,
) -> OneDeviceRun:
    """Runs a region on a mesh and on one device.

    Arguments:
      graph: its body on the mesh.
      alone: gives its body on axes of size 1, as a jaxpr, with its operands.
      ins: its operands on the mesh.
      outs: its results.
      mesh: the mesh.
    """
    if reason := too_large(graph, mesh.num_devices):
        return OneDeviceRun(untried=reason)
    one = replace(mesh, axes=tuple((name, 1) for name in mesh.names))
    try:
        got = outcome(graph, ins, mesh, 0)
    except SbpInternalError:
        raise
    except FAILURES as error:  # of `vmap`, which has no rule for some collectives; the note says it
        return OneDeviceRun(untried=not_emulated(error))
    try:
        body, operands = alone()
        if [(h.shape, h.dtype) for h in operands] != [(h.shape, h.dtype) for h in ins]:
            return OneDeviceRun(untried="it closes over other arrays there")
        wanted = outcome(body_graph(body), operands, one, 0)
    except SbpInternalError:
        raise
    except (
        FAILURES
    ) as error:  # of the user's code on sizes it was not written for; the note says it
        return OneDeviceRun(untried=f"it does not run there: {reason_of(error)}")
    return OneDeviceRun(
        apart=tuple(
            i
            for i, h in enumerate(outs)
            if wanted[i][(0,) * len(one.sizes)].shape != h.shape
            or differ(_whole(got[i], h, mesh), _whole(wanted[i], h, one))
        )
    )


def _whole(parts: Any, claimed: ClaimedArray, mesh: MeshSpec) -> Any:
    reader = (0,) * len(mesh.sizes)
    return assemble(parts, claimed.atoms, mesh.sizes, claimed.shape, reader)
