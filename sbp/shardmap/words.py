"""Findings in words: a diagnostic for each, with labels on the user's lines."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sbp.errors import Diagnostic, Help, Label
from sbp.explain.names import scope_of
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.held import Kind
from sbp.shardmap.state import Finding, Note
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node

_CODES: dict[Kind, str] = {
    "averaged": "wrong-reduction",
    "blocks": "wrong-placement",
    "copies": "wrong-placement",
    "copies-as-split": "wrong-placement",
    "doubled": "doubled-reduction",
    "local": "local-result",
    "missing": "missing-reduction",
    "monoid": "wrong-reduction",
    "order": "wrong-placement",
    "partial-as-split": "wrong-placement",
    "pending": "wrong-reduction",
    "predicate": "missing-reduction",
    "split-as-whole": "wrong-placement",
    "wrong-dim": "wrong-placement",
    "wrong-gather": "wrong-placement",
}
"""The code of each kind; the others are reductions that come too late, or not at all."""


def code_of(finding: Finding) -> str:
    """The diagnostic code of a finding."""
    return _CODES.get(
        finding.fault.kind,
        "missing-reduction" if finding.observer is None else "misplaced-reduction",
    )


def diagnostic(finding: Finding, mesh: MeshSpec, helps: tuple[Help, ...]) -> Diagnostic:
    """A finding in words.

    Arguments:
      finding: what is wrong.
      mesh: the mesh.
      helps: edits that were tried.
    """
    words = _Words(finding, mesh)
    return Diagnostic(
        code=code_of(finding),
        severity="error",
        title=words.title(),
        labels=tuple(words.labels()),
        notes=tuple(words.notes()),
        helps=helps,
        scope=scope_of(primary(finding)),
    )


def note(found: Note) -> Diagnostic:
    """Something that the checker cannot say, in words."""
    span = users_span(found.node)
    labels = (
        (
            Label(
                span=span,
                text="nothing is known of this" if found.severity == "warning" else "",
                primary=True,
            ),
        )
        if span
        else ()
    )
    return Diagnostic(
        code="not-analysed",
        severity=found.severity,
        title=found.text,
        labels=labels,
        scope=scope_of(found.node),
    )


def primary(finding: Finding) -> Node:
    """The operation that a finding points at."""
    fault = finding.fault
    return fault.made if fault.kind == "pending" and fault.made is not None else fault.node


class _Words:
    """One finding, about to be put in words."""

    def __init__(self, finding: Finding, mesh: MeshSpec) -> None:
        self.finding, self.fault, self.mesh = finding, finding.fault, mesh
        self.n = math.prod(mesh.size(a) for a in finding.mesh_axes)
        one = len(finding.mesh_axes) == 1
        self.axes = f"mesh {'axis' if one else 'axes'} " + " and ".join(
            f"`{a}`" for a in finding.mesh_axes
        )

    def subject(self, node: Node) -> str:
        """The user's expression for a node."""
        text = f"`{source_text(users_span(node)) or node.op}`"
        return f"the gradient of {text}" if node.backward else text

    def title(self) -> str:
        """The subject as written, what is not possible, the mesh axis."""
        what = self.subject(primary(self.finding))
        result = f"result {self.finding.result} of {self.subject(self.finding.region)}"
        claim = self.finding.claim
        match self.fault.kind:
            case "nonlinear":
                return f"{what} takes a partial value on {self.axes}"
            case "product":
                return f"{what} multiplies partial values on {self.axes}"
            case "ratio":
                return f"{what} divides by a partial value on {self.axes}"
            case "added":
                return f"{what} adds a whole value to a partial one on {self.axes}"
            case "scales":
                return f"{what} adds values that are {self.n} times apart on {self.axes}"
            case "mixed":
                return f"{what} takes a split and a partial value on {self.axes}"
            case "local":
                return f"{what} {self.fault.detail.split(', ', 1)[1]} on {self.axes}"
            case "blocks":
                return f"{what} takes a sum of different shards for one shard on {self.axes}"
            case "wrong-gather":
                return (
                    f"{what} gathers dim {self.fault.operand} of a value that is"
                    f" {self.fault.detail} on {self.axes}"
                )
            case "order":
                if not claim:
                    return f"{what} meets shards in another order on {self.axes}"
                return f"{result} is split in another order than {claim} says on {self.axes}"
            case "copies":
                return f"{what} moves {self.n} equal copies on {self.axes}"
            case "doubled":
                return f"{what} reduces what is whole already on {self.axes}"
            case "averaged":
                return f"{what} averages the parts of a sum on {self.axes}"
            case "pending":
                return f"{what} adds up means of shards on {self.axes}"
            case "monoid":
                return f"{what} reduces a value that is {self.fault.detail} on {self.axes}"
            case "predicate":
                return f"the predicate of {what} is left partial on {self.axes}"
            case "missing":
                return f"{what} is left partial on {self.axes}"
            case "partial-as-split":
                return (
                    f"{what} is left partial on {self.axes} and taken as"
                    f" {claim or f'S({self.fault.operand})'}"
                )
            case "split-as-whole" | "wrong-dim":
                return f"{result} is {self.fault.detail} on {self.axes} and returned as {claim}"
            case "copies-as-split":
                return f"{result} is whole on {self.axes} and returned as {claim}"

    def says(self) -> str:
        """The primary label."""
        match self.fault.kind:
            case "nonlinear" | "product":
                return f"it does not take {self.fault.detail or 'two partial sums'}; reduce first"
            case "ratio":
                return "a ratio of shares is no share of the ratio; reduce both first"
            case "added":
                return f"each of {self.n} devices adds it; reduce first, then add"
            case "scales":
                return "one is a sum over the devices, the other their mean"
            case "mixed":
                return (
                    f"one operand is {self.fault.detail}, the other split; reduce the first before"
                )
            case "local":
                return (
                    f"its operand is {self.fault.detail.split(', ', 1)[0]}: the others' shards are"
                    " not seen"
                )
            case "blocks":
                return "this is no gradient of one shard"
            case "wrong-gather":
                return f"the shards follow one another along dim {self.fault.detail.strip('S()')}"
            case "order":
                return "the axes of a split dim are ordered, the first one outermost"
            case "copies":
                return "its operand is B: every device has the same"
            case "doubled":
                return f"counted {self.n} times"
            case "averaged":
                return f"{self.n} times too small; parts of a sum add up"
            case "pending":
                return f"{self.n} times too large; means of shards are averaged"
            case "monoid":
                return f"parts of {self.fault.detail} join otherwise"
            case "predicate":
                return "devices would go different ways"
            case "missing" | "partial-as-split":
                return f"{self.fault.detail or 'partial'} from here on"
            case "split-as-whole" | "wrong-dim":
                return f"this is {self.fault.detail}"
            case "copies-as-split":
                return f"this is B: the result would hold {self.n} copies"

    def labels(self) -> Iterator[Label]:
        """The primary label, then where the value comes from and what takes it."""
        main = primary(self.finding)
        span = users_span(main) or users_span(self.finding.region)
        if span is None:
            return
        yield Label(span=span, text=self.says(), primary=True)
        seen = {span}
        for node, text in self.others(main):
            other = users_span(node)
            if other is not None and other not in seen:
                seen.add(other)
                yield Label(span=other, text=text)

    def others(self, main: Node) -> Iterator[tuple[Node, str]]:
        """Other operations that play a part."""
        fault = self.fault
        if fault.kind == "pending":
            yield fault.node, "the mean of one shard is taken here"
        elif fault.made is not None:
            text = {
                "doubled": "reduced here first",
                "copies": "whole from here on",
                "blocks": "the shards are added up here",
            }
            yield fault.made, text.get(fault.kind, "partial from here on")
        if self.finding.observer is not None and self.finding.observer is not main:
            yield self.finding.observer, "taken here"
        if self.finding.claim:
            held = "whole" if self.finding.claim == "B" else self.finding.claim
            yield self.finding.region, f"out_specs say that result {self.finding.result} is {held}"

    def notes(self) -> Iterator[str]:
        """Facts that no label shows."""
        body = self.finding.region.params["body"]
        if self.fault.kind == "missing":
            made = next((i for i, n in enumerate(body.nodes) if n is self.fault.node), 0)
            for node in body.nodes[made:]:
                axes = (
                    [a for a in node.params.get("axes", ()) if isinstance(a, str)]
                    if node.op.startswith("psum")
                    else []
                )
                span = users_span(node)
                if axes and span and not set(axes) & set(self.finding.mesh_axes):
                    yield (
                        f"the sum over devices at line {span.line} runs over"
                        f" {', '.join(f'`{a}`' for a in axes)}"
                    )
        if primary(self.finding).backward:
            yield (
                "with check_vma=True, JAX itself adds up the gradient of what is whole; with"
                " check_vma=False it does not"
            )
