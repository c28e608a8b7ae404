"""Checks the types that a hand-written region claims: by what its operations make of them, as
`sbp.check_shard_map` reads a `jax.shard_map`, then by running it on random values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from jax.sharding import AbstractMesh

from sbp import _jax
from sbp.errors import Diagnostic, Label, SbpTypeError, Span, note, noting, warn
from sbp.handwritten.claims import ClaimedArray, false_claims
from sbp.handwritten.one_device import Alone, ClaimedBody
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.check import diagnostics_of
from sbp.shardmap.coverage import Coverage
from sbp.shardmap.regions import analyse
from sbp.shardmap.run_words import run_diagnostics, run_text
from sbp.shardmap.words import why_text
from sbp.trace.build import body_graph
from sbp.trace.collectives import SHARD_MAP
from sbp.trace.graph import Constant, Graph, Node, Operand

CODE, NOT_ANALYSED = "manual-types", "not-analysed"
CLAIMED = "its types are claimed here"


@dataclass(frozen=True, slots=True, eq=False)
class ClaimingRegion:
    """A call of a region with its claims.

    Arguments:
      name: the name of its function.
      body: its body on the shards of one device, as a jaxpr.
      ins: its operands; the arrays that it closes over come first.
      outs: its results.
      closed_over: the arrays that it closes over.
      mesh: the mesh.
      abstract: the same mesh, as JAX has it.
      span: the user's line that calls it.
      made: the user's line that calls `sbp.manual`.
      fn: its function.
      alone: gives its body on a mesh with an axis of size 1, as a jaxpr, with its operands.
    """

    name: str
    body: Any
    ins: Sequence[ClaimedArray]
    outs: Sequence[ClaimedArray]
    closed_over: Sequence[Any]
    mesh: MeshSpec
    abstract: AbstractMesh
    span: Span | None
    made: Span | None
    fn: Callable[..., Any]
    alone: Alone

    @property
    def key(self) -> str:
        """Two regions with equal keys have the same claims about the same body."""
        return f"{self.body}\n{[h.type for h in self.ins]}\n{[h.type for h in self.outs]}"

    def check(self) -> None:
        """Checks the claims; says what is not checked.

        Raises:
          SbpTypeError: `manual-types`, with all claims that do not hold.
        """
        graph = body_graph(self.body)
        program = self._program(graph)
        found = analyse(program, self.mesh)
        read = diagnostics_of(program, self.mesh, found)
        wrong = [d for d in read if d.severity == "error"]
        if wrong:
            raise SbpTypeError([self._claimed(d) for d in wrong])
        false, untried = false_claims(graph, self.ins, self.outs, len(self.closed_over), self.mesh)
        if untried:
            warn(
                CODE,
                f"the types that manual region {self.name!r}",
                f"claims are not checked: {untried}",
                span=self.span,
            )
        if false:
            raise SbpTypeError([self._ran(false)])
        coverage = found.coverage
        if coverage.unread:
            body = ClaimedBody(self.fn, graph, self.ins, self.outs, self.mesh, self.alone)
            coverage = replace(coverage, runs=tuple(body.compared(program, found)))
            note(self._unread(coverage))
        for d in (*read, *run_diagnostics(coverage)):
            if d.code == NOT_ANALYSED:
                note(replace(d, severity="note"))
            else:  # a division with two readings, shards that do not belong together, a ring
                span = d.primary.span if d.primary else self.span
                with noting():  # a report has the finding itself, with its labels and notes
                    warn(CODE, f"in manual region {self.name!r}", d.title, span=span)
                note(self._claimed(d))

    def _program(self, body: Graph) -> Graph:
        """The region as a program of its own, in which its operands and results have types."""
        avals, values = dict(body.avals), count(max(body.avals, default=0) + 1)
        inputs: list[int] = []

        def operand(h: ClaimedArray, value: Any) -> Operand:
            aval = _jax.empty_aval(h.shape, h.dtype)
            if value is not None and not isinstance(value, _jax.Tracer):
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
                "mesh": self.abstract,
                "body": body,
                "in_specs": tuple(h.type for h in self.ins),
                "out_specs": tuple(h.type for h in self.outs),
                "manual_axes": frozenset(self.mesh.names),
                "check_vma": False,
            },
            inputs=operands,
            outputs=results,
            span=self.span,
            stack=(self.span,) if self.span else (),
        )
        return Graph(inputs=tuple(inputs), outputs=results, nodes=(region,), avals=avals)

    def _claimed(self, found: Diagnostic) -> Diagnostic:
        """A finding about the body as one about the claims."""
        shown = {(label.span.file, label.span.line) for label in found.labels}
        known = bool(self.made and (self.made.file, self.made.line) not in shown)
        made = (Label(span=self.made, text=CLAIMED),) if self.made and known else ()
        more = f"more on this kind of fault: sbp explain {found.code}"
        return replace(found, code=CODE, labels=(*found.labels, *made), notes=(*found.notes, more))

    def _unread(self, read: Coverage) -> Diagnostic:
        """The values of the body at which readings end, and how the region runs on one device."""
        labels: dict[Span, Label] = {}
        for u in read.unread:
            if u.span is not None:
                primary = not labels
                labels.setdefault(u.span, Label(span=u.span, text=why_text(u), primary=primary))
        several = len(read.unread) > 1
        many = f"{len(read.unread)} values" if several else "a value"
        verb = "have" if several else "has"
        return Diagnostic(
            code=NOT_ANALYSED,
            severity="note",
            title=f"{many} of manual region `{self.name}` {verb} no reading",
            labels=tuple(labels.values()),
            notes=(
                "what depends on that is checked by a run on random values only: results that"
                " claim B are equal on all devices",
                *map(run_text, read.runs),
            ),
        )

    def _ran(self, false: Sequence[str]) -> Diagnostic:
        """The claims that the run on random values refutes."""
        at = self.span or self.made
        labels = [Label(span=at, text=false[0], primary=True)] if at else []
        if at and self.made and (self.made.file, self.made.line) != (at.file, at.line):
            labels.append(Label(span=self.made, text=CLAIMED))
        return Diagnostic(
            code=CODE,
            severity="error",
            title=f"manual region `{self.name}` does not keep the types it claims",
            labels=tuple(labels),
            notes=(
                *false[1 if labels else 0 :],
                "the region was run on random values, device by device",
            ),
        )
