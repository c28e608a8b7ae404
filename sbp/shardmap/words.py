"""Findings in words: a diagnostic for each, with labels on the user's lines."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sbp.errors import Diagnostic, Label
from sbp.machine.mesh import MeshSpec
from sbp.shardmap.coverage import UnreadValue, Why
from sbp.shardmap.distribution import Kind
from sbp.shardmap.doubt_words import source_of, types_text
from sbp.shardmap.specs import outs_of, spec_text
from sbp.shardmap.state import Finding, FoundRepairs, Reading
from sbp.source.reader import scope_of, users_span
from sbp.trace.collectives import SUMS
from sbp.trace.graph import Node
from sbp.types import B, Split

_CODES: dict[Kind, str] = {
    "averaged": "wrong-reduction",
    "blocks": "wrong-placement",
    "claimed-order": "wrong-placement",
    "copies": "wrong-placement",
    "copies-as-partial": "wrong-placement",
    "copies-as-split": "wrong-placement",
    "doubled": "doubled-reduction",
    "local": "local-result",
    "missing": "missing-reduction",
    "monoid": "wrong-reduction",
    "not-returned": "wrong-placement",
    "order": "wrong-placement",
    "partial-as-split": "wrong-placement",
    "own-block": "missing-reduction",
    "pending": "wrong-reduction",
    "predicate": "missing-reduction",
    "rewritten": "wrong-placement",
    "split-as-whole": "wrong-placement",
    "unmasked": "local-result",
    "wrong-dim": "wrong-placement",
    "wrong-gather": "wrong-placement",
}
"""The diagnostic code of a kind of fault; for other kinds see `code_of`."""


def code_of(finding: Finding) -> str:
    """The diagnostic code of a finding."""
    return _CODES.get(
        finding.fault.kind,
        "missing-reduction" if finding.observer is None else "misplaced-reduction",
    )


def diagnostic(finding: Finding, mesh: MeshSpec, repairs: FoundRepairs) -> Diagnostic:
    """A finding in words.

    Arguments:
      finding: the finding.
      mesh: the mesh.
      repairs: its helps, and whether there may be more.
    """
    more = ("other repairs were not tried",) if repairs.untried else ()
    words = _Words(finding, mesh)
    return Diagnostic(
        code=code_of(finding),
        severity=finding.severity,
        title=words.title(),
        labels=tuple(words.labels()),
        notes=(*words.notes(), *more),
        helps=repairs.helps,
        scope=scope_of(primary(finding)),
    )


_KERNELS = {
    "candidates": "picks from each shard alone",
    "masked_gather": "looks up in each shard alone",
    "pair": "finds an index within each shard alone",
    "prefix": "runs over each shard alone",
    "sorting_network": "sorts each shard alone",
}
"""For each kernel, the text about an operation that needs it on a split dim."""


_TITLES: dict[Kind, str] = {
    "added": "{what} adds a whole value to a partial one on {axes}",
    "averaged": "{what} averages the parts of a sum on {axes}",
    "blocks": "{what} takes a sum of different shards for one shard on {axes}",
    "claimed-order": "{result} is split in another order than {claim} says on {axes}",
    "copies": "{what} moves {n} equal copies on {axes}",
    "copies-as-partial": "{result} is whole on {axes} and returned as {claim}",
    "copies-as-split": "{result} is whole on {axes} and returned as {claim}",
    "doubled": "{what} reduces what is whole already on {axes}",
    "local": "{what} {kernel} on {axes}",
    "missing": "{what} is left partial on {axes}",
    "mixed": "{what} takes a split and a partial value on {axes}",
    "monoid": "{what} reduces a value that is {types} on {axes}",
    "nonlinear": "{what} takes a partial value on {axes}",
    "not-returned": "{what} takes the results of other devices' shards for its own on {axes}",
    "order": "{what} meets shards in another order on {axes}",
    "own-block": "{what} takes one block of a partial value on {axes}",
    "partial-as-split": "{what} is left partial on {axes} and taken as {claim}",
    "pending": "{what} adds up means of shards on {axes}",
    "predicate": "the predicate of {what} is left partial on {axes}",
    "product": "{what} multiplies partial values on {axes}",
    "ratio": "{what} divides by a partial value on {axes}",
    "rewritten": "{what} writes one device's block on {axes} and is taken as whole",
    "scales": "{what} adds values that are {n} times apart on {axes}",
    "split-as-whole": "{result} is {types} on {axes} and returned as {claim}",
    "unmasked": "{what} also looks up places of other shards on {axes}",
    "wrong-dim": "{result} is {types} on {axes} and returned as {claim}",
    "wrong-gather": "{what} gathers dim {dim} of a value that is {types} on {axes}",
}
"""The title of a finding: the subject as written, what is not possible, the mesh axes."""


_WHY: dict[Why, str] = {
    "branch": "the branches give it different types, or devices may take different ones",
    "collective": "sbp does not analyze this collective",
    "exchange": "from other devices, and no exchange of one split dim for another",
    "index": "depends on the index of its device in a way that sbp does not follow",
    "loop": "the loop runs along a split dim, or its carry changes its type",
    "nested": "a shard_map inside a shard_map",
    "part": "made of one device's own part, for a later step to merge",
    "permute": "from another device",
    "row": "no rule takes operands that are {types}",
    "side-by-side": "made of the devices' own results in a way that sbp does not follow",
}


def why_text(value: UnreadValue) -> str:
    """Why a value has no reading, in words."""
    return _WHY[value.why].format(types=", ".join(value.types))


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

    @property
    def types(self) -> str:
        """The types of the faulty operand, in words."""
        return types_text(self.fault.atoms)

    def dims(self) -> list[str]:
        """The dims along which the faulty operand is split."""
        return [str(a.dim) for a in self.fault.atoms if isinstance(a, Split)]

    def subject(self, node: Node) -> str:
        """The user's expression for a node."""
        text = f"`{source_of(node)}`"
        return f"the gradient of {text}" if node.backward else text

    def title(self) -> str:
        """The title; that of a warning names the reading under which the program is wrong."""
        if self.finding.reading is None:
            return self.wrong()
        return f"{self.wrong()}, if {self.counted(self.finding.reading)}"

    def counted(self, reading: Reading) -> str:
        """A reading of a division in words."""
        counted = "devices" if reading.counts == "devices" else "elements of one shard"
        return f"the {reading.number:g} in {self.subject(reading.node)} is the number of {counted}"

    def wrong(self) -> str:
        """The subject as written, what is not possible, the mesh axis."""
        claim = "" if self.finding.claim is None else repr(self.finding.claim)
        if self.fault.kind == "claimed-order":
            claim = spec_text(self.finding.region.params["out_specs"][self.finding.result])
        elif self.fault.kind == "partial-as-split" and not claim:
            claim = f"S({self.fault.operand})"
        return _TITLES[self.fault.kind].format(
            what=self.subject(primary(self.finding)),
            result=f"result {self.finding.result} of {self.subject(self.finding.region)}",
            claim=claim,
            axes=self.axes,
            dim=self.fault.operand,
            kernel=_KERNELS.get(self.fault.kernel, ""),
            n=self.n,
            types=self.types,
        )

    def says(self) -> str:
        """The primary label."""
        match self.fault.kind:
            case "nonlinear" | "product":
                taken = self.types if self.fault.atoms else "two partial sums"
                return f"it does not take {taken}; reduce first"
            case "own-block":
                return f"each device has its own part of its block of {self.types}; reduce first"
            case "unmasked":
                return "set it to zero where the place is not in this shard, before it is added up"
            case "ratio":
                return "a ratio of shares is no share of the ratio; reduce both first"
            case "added":
                return f"each of {self.n} devices adds it; reduce first, then add"
            case "scales":
                return "one is a sum over the devices, the other their mean"
            case "mixed":
                return f"one operand is {self.types}, the other split; reduce the first before"
            case "local":
                return f"its operand is {self.types}: the others' shards are not seen"
            case "blocks":
                return "this is no gradient of one shard"
            case "wrong-gather":
                return f"the shards follow one another along dim {' or '.join(self.dims())}"
            case "order" | "claimed-order":
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
                return f"parts of {self.types} join otherwise"
            case "predicate":
                return "devices would go different ways"
            case "rewritten":
                return f"the other blocks along dim {self.dims()[0]} stay as they were"
            case "not-returned":
                return "one operand is of other devices' shards; send it back first"
            case "missing" | "partial-as-split":
                return f"{self.types if self.fault.atoms else 'partial'} from here on"
            case "split-as-whole" | "wrong-dim":
                return f"this is {self.types}"
            case "copies-as-split":
                return f"this is B: the result would hold {self.n} copies"
            case "copies-as-partial":
                return f"this is B: each of {self.n} devices would add it"

    def labels(self) -> Iterator[Label]:
        """The primary label, then the maker of the value and its reader."""
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
                "not-returned": "sent here",
            }
            yield fault.made, text.get(fault.kind, "partial from here on")
        if self.finding.observer is not None and self.finding.observer is not main:
            yield self.finding.observer, "taken here"
        if self.finding.claim is not None:
            claim = "whole" if self.finding.claim == B else repr(self.finding.claim)
            outs = outs_of(self.finding.region)
            yield self.finding.region, f"{outs} say that result {self.finding.result} is {claim}"

    def notes(self) -> Iterator[str]:
        """Facts that no label shows."""
        body = self.finding.region.params["body"]
        if self.fault.kind == "missing":
            made = next((i for i, n in enumerate(body.nodes) if n is self.fault.node), 0)
            for node in body.nodes[made:]:
                axes = (
                    [a for a in node.params.get("axes", ()) if isinstance(a, str)]
                    if node.op in SUMS
                    else []
                )
                span = users_span(node)
                if axes and span and not set(axes) & set(self.finding.mesh_axes):
                    yield (
                        f"the sum over devices at line {span.line} runs over"
                        f" {', '.join(f'`{a}`' for a in axes)}"
                    )
        if self.finding.reading is not None:
            yield (
                f"two readings: if {self.counted(self.finding.reading)}, this is wrong; if it is"
                " another number, nothing is wrong"
            )
        if primary(self.finding).backward:
            yield (
                "with check_vma=True, JAX itself adds up the gradient of what is whole; with"
                " check_vma=False it does not"
            )
