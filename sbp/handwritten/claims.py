"""Checks the types that a hand-written region claims, as `sbp.check_shard_map` checks out_specs.

The region runs on random values, on the mesh and with one device on each mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from sbp import _jax
from sbp.errors import Diagnostic, Label, SbpTypeError, Span, note, noting, warn
from sbp.handwritten.check import analysed, diagnostics_of
from sbp.handwritten.one_device import compared_runs
from sbp.handwritten.words import DIFFERS
from sbp.machine.mesh import MeshSpec
from sbp.signatures.laws.oracle import Types, localised
from sbp.trace.build import body_graph
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import Constant, Graph, Node, Operand
from sbp.types import NdSbp, Split, Unreduced

CODE = "manual-types"
CLAIMED = "its types are claimed here"


@dataclass(frozen=True, slots=True)
class ClaimedArray:
    """One operand or result of a region.

    Arguments:
      type: its claimed type.
      atoms: its claimed atom on each mesh axis.
      shape: its global shape.
      dtype: its dtype.
    """

    type: NdSbp
    atoms: Types
    shape: tuple[int, ...]
    dtype: Any

    def local(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part."""
        return localised(self.shape, self.atoms, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class RegionBody:
    """The body of a region on the shards of one device.

    Arguments:
      jaxpr: the body.
      mesh: the mesh that its collectives name, as JAX has it.
      ins: its operands; the arrays that it closes over come first.
      outs: its results.
      closed_over: the arrays that it closes over.
    """

    jaxpr: Any
    mesh: Any
    ins: Sequence[ClaimedArray]
    outs: Sequence[ClaimedArray]
    closed_over: Sequence[Any]

    @property
    def key(self) -> str:
        """Two bodies with equal keys have the same claims about the same body."""
        return f"{self.jaxpr}\n{[h.type for h in self.ins]}\n{[h.type for h in self.outs]}"

    def inputs(self) -> list[ClaimedArray]:
        """The operands whose values are not known yet."""
        arrays = [h for h, x in zip(self.ins, self.closed_over, strict=False) if _is_unknown(x)]
        return [*arrays, *self.ins[len(self.closed_over) :]]

    def program(self, span: Span | None) -> Graph:
        """The region as a program of its own, in which its operands and results have types."""
        body = body_graph(self.jaxpr)
        avals, values = dict(body.avals), count(max(body.avals, default=0) + 1)
        inputs: list[int] = []

        def operand(h: ClaimedArray, value: Any) -> Operand:
            aval = _jax.empty_aval(h.shape, h.dtype)
            if not _is_unknown(value):
                return Constant(value, aval)
            inputs.append(next(values))
            avals[inputs[-1]] = aval
            return inputs[-1]

        unknown = (None,) * (len(self.ins) - len(self.closed_over))
        operands = tuple(
            operand(h, x) for h, x in zip(self.ins, (*self.closed_over, *unknown), strict=True)
        )
        results = tuple(next(values) for _ in self.outs)
        avals |= {
            v: _jax.empty_aval(h.shape, h.dtype) for v, h in zip(results, self.outs, strict=True)
        }
        region = Node(
            id=max((n.id for n in body.walk()), default=0) + 1,
            op=SHARD_MAP,
            primitive=None,
            params={
                "mesh": self.mesh,
                "body": body,
                "in_specs": tuple(h.type for h in self.ins),
                "out_specs": tuple(h.type for h in self.outs),
                "manual_axes": frozenset(self.mesh.axis_names),
                "check_vma": False,
            },
            inputs=operands,
            outputs=results,
            span=span,
            stack=(span,) if span else (),
        )
        return Graph(inputs=tuple(inputs), outputs=results, nodes=(region,), avals=avals)


def _is_unknown(value: Any) -> bool:
    return value is None or isinstance(value, _jax.Tracer)


@dataclass(frozen=True, slots=True, eq=False)
class ClaimingRegion:
    """A call of a region with its claims.

    Arguments:
      name: the name of its function.
      fn: its function.
      body: its body on the mesh.
      again: traces another function in the place of `fn`.
      mesh: the mesh.
      span: the user's line that calls it.
      made: the user's line that calls `sbp.manual`.
    """

    name: str
    fn: Callable[..., Any]
    body: RegionBody
    again: Callable[[Callable[..., Any]], RegionBody]
    mesh: MeshSpec
    span: Span | None
    made: Span | None

    def check(self) -> None:
        """Checks the claims; says what is not checked.

        Raises:
          SbpTypeError: `manual-types`, with all claims that do not hold.
        """
        compared = compared_runs(
            self.body.program(self.span),
            self.fn,
            lambda fn: self.again(fn).program(self.span),
            [_jax.empty_aval(h.shape, h.dtype) for h in self.body.inputs()],
            self.mesh,
            meant=self.own(),
        )
        parted = {
            name
            for i, name in enumerate(self.mesh.names)
            if any(isinstance(h.atoms[i], Unreduced) for h in self.body.ins)
        }
        depends = any(c.run.wrong and c.run.mesh_axis in parted for c in compared.compared)
        said = diagnostics_of(analysed(compared, self.mesh), self.mesh)
        if depends:  # on how a P operand is parted
            said = [replace(d, severity="error") if d.code == DIFFERS else d for d in said]
        wrong = [d for d in said if d.severity == "error"]
        if wrong:
            raise SbpTypeError([self._claimed(d) for d in wrong])
        for d in said:
            if d.severity == "note":
                note(self._claimed(d))
                continue
            span = d.primary.span if d.primary else self.span
            with noting():  # a report has the finding itself, with its labels and notes
                warn(CODE, f"in manual region {self.name!r}", d.title, span=span)
            note(self._claimed(d))

    def own(self) -> Iterator[str]:
        """What may differ because the region's operands are not taken apart stage by stage."""
        for h in self.body.ins:
            local = h.local(self.mesh.sizes)
            if any(isinstance(a, Split) and local[a.dim] == 1 for a in h.atoms):
                yield "it may have a stage for each device"

    def _claimed(self, found: Diagnostic) -> Diagnostic:
        """A finding about the body as one about the claims."""
        shown = {(label.span.file, label.span.line) for label in found.labels}
        known = bool(self.made and (self.made.file, self.made.line) not in shown)
        made = (Label(span=self.made, text=CLAIMED),) if self.made and known else ()
        more = f"more on this kind of fault: sbp explain {found.code}"
        return replace(found, code=CODE, labels=(*found.labels, *made), notes=(*found.notes, more))
