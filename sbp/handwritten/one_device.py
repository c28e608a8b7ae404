"""Compares a hand-written region on a mesh with the same region on one device of a mesh axis: both
run on the same random values, without devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from sbp.errors import SbpInternalError
from sbp.handwritten.claims import ClaimedArray, outcome
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.comparison import (
    Attempt,
    ComparedRun,
    NotOnOneDevice,
    OneDeviceComparison,
    Run,
)
from sbp.shardmap.emulation import reason_of, too_large
from sbp.shardmap.meant import lengths_of, meant
from sbp.shardmap.regions import Analysis
from sbp.shardmap.written_sizes import AxisInCode, WrittenSizes
from sbp.signatures.laws.parts import assemble
from sbp.trace.build import body_graph
from sbp.trace.graph import Graph
from sbp.types import Split

Alone = Callable[[str, Callable[[Any], Any]], tuple[Any, Sequence[ClaimedArray]]]
"""Gives a body on a mesh in which one axis has size 1, as a jaxpr, with its operands; it takes the
name of the axis, and a function that copies the user's function."""


@dataclass(frozen=True, slots=True, eq=False)
class ClaimedBody:
    """The body of a region with its claims.

    Arguments:
      fn: the user's function.
      graph: the body on the mesh.
      ins: its operands.
      outs: its results.
      mesh: the mesh.
      alone: gives the body on a smaller mesh.
    """

    fn: Callable[..., Any]
    graph: Graph
    ins: Sequence[ClaimedArray]
    outs: Sequence[ClaimedArray]
    mesh: MeshSpec
    alone: Alone

    def compared(self, program: Graph, found: Analysis) -> Iterator[ComparedRun]:
        """Compares the region with one device, for each mesh axis on which it has values without a
        reading.

        Arguments:
          program: a program with the region alone.
          found: its analysis.
        """
        unread = {a for u in found.coverage.unread for a in u.mesh_axes}
        reason = too_large(self.graph, self.mesh.num_devices)
        for name, n in self.mesh.axes:
            if name not in unread:
                continue
            if reason:
                yield ComparedRun(mesh_axis=name, size=n, untried=reason, given=False)
                continue
            written = WrittenSizes(AxisInCode(name, n, lengths_of(program, name)))
            comparison = OneDeviceComparison(
                run=self.run(self.graph, self.mesh),
                alone=lambda attempt, sizes=written: self.on_one_device(attempt, sizes),
                written=written,
                values=(),
                given=False,
            )
            yield comparison.made(False, [*meant(program, found.sighted.ranked), *self.own(name)])

    def own(self, name: str) -> Iterator[str]:
        """What may differ because the region's operands are random, and are not taken apart."""
        if any(jnp.issubdtype(h.dtype, jnp.integer) for h in self.ins):
            yield "integers were not given, and random ones were taken"
        split = [h for h in self.ins if self.one_each(h, name)]
        if split:
            yield "it may have a stage for each device"

    def one_each(self, claimed: ClaimedArray, name: str) -> bool:
        """Whether each device of a mesh axis has one element of an array along a dim."""
        atom = claimed.atoms[self.mesh.names.index(name)]
        return isinstance(atom, Split) and claimed.local(self.mesh.sizes)[atom.dim] == 1

    def on_one_device(self, attempt: Attempt, written: WrittenSizes) -> Run:
        """Runs the region with one device on an axis.

        Raises:
          NotOnOneDevice: where its function cannot be traced there.
        """
        name = written.axis.name
        written.read(self.fn)
        try:
            body, operands = self.alone(name, written.replaced(attempt.names))
        except SbpInternalError:
            raise
        except Exception as error:  # the user's function, which may raise anything on other sizes
            raise NotOnOneDevice(reason_of(error)) from error
        if [(h.shape, h.dtype) for h in operands] != [(h.shape, h.dtype) for h in self.ins]:
            raise NotOnOneDevice("it closes over other arrays there")
        axes = tuple((a, 1 if a == name else n) for a, n in self.mesh.axes)
        return self.run(body_graph(body), replace(self.mesh, axes=axes))

    def run(self, graph: Graph, mesh: MeshSpec) -> Run:
        """A function that gives the whole results of the region on random values."""

        def results(values: Sequence[Any]) -> list[np.ndarray]:
            parts = outcome(graph, self.ins, mesh, 0)
            return [_whole(p, h, mesh) for p, h in zip(parts, self.outs, strict=True)]

        return results


def _whole(parts: Any, claimed: ClaimedArray, mesh: MeshSpec) -> np.ndarray:
    reader = (0,) * len(mesh.sizes)
    shape = list(parts[reader].shape)
    for atom, n in zip(claimed.atoms, mesh.sizes, strict=True):
        if isinstance(atom, Split):
            shape[atom.dim] *= n
    return assemble(parts, claimed.atoms, mesh.sizes, tuple(shape), reader)
