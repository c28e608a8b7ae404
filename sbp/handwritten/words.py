"""Findings in words: a diagnostic for each, with labels on the user's lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sbp.errors import Diagnostic, Help, Label, Span
from sbp.handwritten.emulation import outs_of
from sbp.handwritten.faults import Finding, Kind
from sbp.handwritten.one_device import ComparedRun
from sbp.machine.mesh import MeshSpec
from sbp.signatures.rule import RANKS
from sbp.source.reader import scope_of, source_text, users_span
from sbp.trace.collectives import KINDS, SENDING, SUMS, names_of
from sbp.trace.graph import Node
from sbp.types import B, Split

_CODES: dict[Kind, str] = {
    "averaged": "wrong-reduction",
    "blocks": "wrong-placement",
    "copies": "wrong-placement",
    "copies-as-partial": "wrong-placement",
    "copies-as-split": "wrong-placement",
    "doubled": "doubled-reduction",
    "local": "local-result",
    "missing": "missing-reduction",
    "monoid": "wrong-reduction",
    "partial-as-split": "wrong-placement",
    "pending": "wrong-reduction",
    "order": "wrong-placement",
    "own-block": "missing-reduction",
    "own-positions": "wrong-placement",
    "same-block": "wrong-placement",
    "scaled": "wrong-reduction",
    "split-as-whole": "wrong-placement",
    "uneven": "wrong-placement",
    "wrong-dim": "wrong-placement",
    "wrong-gather": "wrong-placement",
}
"""The diagnostic code of a kind of fault. Those of other kinds are missing or misplaced
reductions."""


_TITLES: dict[Kind, str] = {
    "added": "{what} adds a whole value to a partial one on {axes}",
    "averaged": "{what} averages the parts of a sum on {axes}",
    "blocks": "{what} adds up the shards of a value that is {types} on {axes}",
    "copies": "{what} moves {n} equal copies on {axes}",
    "copies-as-partial": "{result} is whole on {axes} and returned as {claim}",
    "copies-as-split": "{result} is whole on {axes} and returned as {claim}",
    "doubled": "{what} reduces a value that is already whole on {axes}",
    "local": "{what} {kernel} on {axes}",
    "missing": "{what} is left partial on {axes}",
    "mixed": "{what} takes a split and a partial value on {axes}",
    "monoid": "{what} reduces a value that is {types} on {axes}",
    "nonlinear": "{what} takes a partial value on {axes}",
    "partial-as-split": "{what} is left partial on {axes} and taken as {claim}",
    "pending": "{what} adds up means of shards on {axes}",
    "product": "{what} multiplies partial values on {axes}",
    "ratio": "{what} divides by a partial value on {axes}",
    "scales": "{what} adds values whose scales differ by a factor of {n} on {axes}",
    "order": "the specs of {what} name {axes} in two different orders",
    "own-block": "{what} takes one block of a partial value on {axes}",
    "own-positions": "{what} counts from zero in each shard on {axes}",
    "same-block": "{what} takes the same block of a whole value on all devices of {axes}",
    "scaled": "{what} is {n} times too large on {axes}",
    "split-as-whole": "{result} is {types} on {axes} and returned as {claim}",
    "uneven": "{result} differs between the devices of {axes} and is returned as {claim}",
    "wrong-dim": "{result} is {types} on {axes} and returned as {claim}",
    "wrong-gather": "{what} gathers dim {dim} of a value that is {types} on {axes}",
}
"""The title of a finding: the subject as written, what is not possible, the mesh axes."""

_LABELS: dict[Kind, str] = {
    "added": "each of {n} devices adds it; reduce first, then add",
    "averaged": "{n} times too small; use lax.psum for parts of a sum",
    "blocks": "one device has no shards to add up: sum the dim first, or gather it",
    "copies": "its operand is B: every device has the same",
    "copies-as-partial": "this is B: each of {n} devices would add it",
    "copies-as-split": "this is B: the result would hold {n} copies",
    "doubled": "counted {n} times",
    "local": "its operand is {parts}: each device sees only its own shard",
    "missing": "{parts} from here on",
    "mixed": "one operand is {parts}, the other is split; reduce the {parts} operand first",
    "monoid": "the parts of {parts} need another reduction",
    "nonlinear": "it does not take {parts}; reduce first",
    "order": "use one order in all specs; the first axis is the outermost",
    "own-block": "each device has its own part of its block of {parts}; reduce first",
    "own-positions": "in the whole value, a device's shard begins at {index} times its length",
    "partial-as-split": "{parts} from here on",
    "pending": "{n} times too large; use lax.pmean for means of shards",
    "product": "it does not take {parts}; reduce first",
    "ratio": "reduce both operands first: the ratio of two parts is not a part of the ratio",
    "same-block": "the block that belongs to a device depends on its index",
    "scaled": "{n} times too large",
    "scales": "one is a sum over the devices, the other a mean; use one reduction for both",
    "split-as-whole": "this is {parts}",
    "uneven": "from here on, the devices have different values",
    "wrong-dim": "this is {parts}",
    "wrong-gather": "the shards follow one another along dim {dims}",
}
"""The primary label of a finding."""


def primary(finding: Finding) -> Node:
    """The operation that a finding points at."""
    fault = finding.fault
    return fault.made if fault.kind == "pending" and fault.made is not None else fault.node


def diagnostic(
    finding: Finding, mesh: MeshSpec, repairs: tuple[tuple[Help, ...], bool]
) -> Diagnostic:
    """A finding in words.

    Arguments:
      finding: the finding.
      mesh: the mesh.
      repairs: its helps, and whether there may be more.
    """
    (helps, untried), kind, main = repairs, finding.fault.kind, primary(finding)
    other = "missing-reduction" if finding.observer is None else "misplaced-reduction"
    more = ("sbp did not try every repair",) if untried else ()
    facts, at = _facts(finding, mesh), main if users_span(main) else finding.region
    marked = [(at, _LABELS[kind].format(**facts)), *_others(finding, main)]
    return Diagnostic(
        code=_CODES.get(kind, other),
        severity="warning" if finding.numbers else "error",
        title=_TITLES[kind].format(**facts),
        labels=_labels(marked) if users_span(at) else (),
        notes=(*_notes(finding), *more),
        helps=helps,
        scope=scope_of(main),
    )


def _facts(finding: Finding, mesh: MeshSpec) -> dict[str, Any]:
    """What the texts of titles and primary labels name."""
    fault, axes = finding.fault, finding.mesh_axes
    claim = "" if finding.claim is None else repr(finding.claim)
    if fault.kind == "partial-as-split" and not claim:
        claim = f"S({fault.operand})"
    types = " or ".join(map(repr, fault.atoms))
    unknown = "partial" if fault.kind in ("missing", "partial-as-split") else "two partial sums"
    return {
        "what": _subject(primary(finding)),
        "result": f"result {finding.result} of {_subject(finding.region)}",
        "claim": claim,
        "axes": f"mesh {'axis' if len(axes) == 1 else 'axes'} "
        + " and ".join(f"`{a}`" for a in axes),
        "dim": fault.operand,
        "kernel": RANKS.get(fault.node.op, "works on each shard alone"),
        "n": math.prod(mesh.size(a) for a in axes),
        "types": types or "of unknown type",
        "parts": types or unknown,
        "dims": " or ".join(str(a.dim) for a in fault.atoms if isinstance(a, Split)),
        "index": " and ".join(f'lax.axis_index("{a}")' for a in axes),
    }


def _subject(node: Node) -> str:
    """The user's expression for a node."""
    text = f"`{source_text(users_span(node)) or node.op}`"
    return f"the gradient of {text}" if node.backward else text


def _others(finding: Finding, main: Node) -> Iterator[tuple[Node, str]]:
    """Other operations that play a part."""
    fault = finding.fault
    if fault.kind == "pending":
        yield fault.node, "the mean of one shard is taken here"
    elif fault.made is not None:
        text = {
            "doubled": "reduced here first",
            "copies": "whole from here on",
        }
        yield fault.made, text.get(fault.kind, "partial from here on")
    if finding.observer is not None and finding.observer is not main:
        yield finding.observer, "taken here"
    if finding.claim is not None:
        region, number = finding.region, finding.result
        claim = "whole" if finding.claim == B else repr(finding.claim)
        yield region, f"{outs_of(region)} say that result {number} is {claim}"


def _notes(finding: Finding) -> Iterator[str]:
    """Facts that no label shows."""
    body = finding.region.params["body"]
    if finding.fault.kind == "missing":
        made = next((i for i, n in enumerate(body.nodes) if n is finding.fault.node), 0)
        for node in body.nodes[made:]:
            axes = names_of(node) if node.op in SUMS else ()
            span = users_span(node)
            if axes and span and not set(axes) & set(finding.mesh_axes):
                yield (
                    f"the sum over devices at line {span.line} runs over"
                    f" {', '.join(f'`{a}`' for a in axes)}"
                )
    if finding.numbers:
        listed = " or ".join(f"`{n}`" for n in finding.numbers)
        yield (
            f"the program may be right: if {listed} means the number of devices, write"
            " lax.axis_size instead, so that sbp knows"
        )
    if primary(finding).backward:
        yield (
            "with check_vma=True, JAX sums the gradient of a whole value over the devices; with"
            " check_vma=False it does not"
        )


# ---- comparisons --------------------------------------------------------------------------------

DIFFERS = "differs-on-one-device"


def run_text(run: ComparedRun) -> str:
    """What a comparison came to, as a sentence."""
    where = f"with one device on mesh axis `{run.mesh_axis}`"
    if run.untried:
        return f"sbp did not compare the program with a run {where}, because {run.untried}"
    if run.lost or not run.apart:
        lost = f"; {_lost(run)}" if run.lost else ""
        return f"{where}, the program computes the same results: {_how(run)}{lost}"
    text = f"{where}, the program computes other values for {_results(run.apart)}: {_how(run)}"
    return "; ".join([text, *run.because])


def _how(run: ComparedRun) -> str:
    values = "its arguments" if run.given else "random values"
    ways = "its {} stages one after the other" if run.stages else "it with {} devices and with one"
    return f"sbp ran {ways.format(run.size)}, on {values}"


def _results(numbers: tuple[int, ...]) -> str:
    return f"result{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _lost(run: ComparedRun) -> str:
    """That a part of some results is made of constants."""
    return (
        f"part of {_results(run.lost)} does not depend on any argument: a slice along the first dim"
    )


def run_diagnostic(run: ComparedRun, ends: Sequence[Node]) -> Diagnostic | None:
    """A comparison that shows a fault, or did not take place, in words; None for any other.

    Arguments:
      run: the comparison.
      ends: operations at which types end.
    """
    axis = f"mesh axis `{run.mesh_axis}`"
    if run.untried:
        return Diagnostic(
            code="not-analysed",
            severity="note" if run.refused else "warning",
            title=f"sbp did not check the program on {axis}: {run.untried}",
        )
    if not run.apart:
        return None
    title = (
        f"{_results(run.apart)} {'change' if len(run.apart) > 1 else 'changes'} when {axis} has one"
        " device"
    )
    if run.because:
        return Diagnostic(
            code=DIFFERS,
            severity="note",
            title=f"{title}; you may intend this: {'; '.join(run.because)}",
        )
    # Values that come from other devices are the most telling ones.
    sent = [(n, "from another device") for n in ends if KINDS.get(n.op) in SENDING]
    others = [(n, "depends on the device") for n in ends if KINDS.get(n.op) not in SENDING]
    return Diagnostic(
        code=DIFFERS,
        severity="warning",
        title=_lost(run) if run.lost else title,
        labels=_labels([*sent, *others]),
        notes=(
            run_text(run),
            f"the marked values have no type on {axis}; look for a wrong neighbor, owner, offset or"
            " number of steps, or for an operation that only some devices are meant to run",
        ),
    )


def _labels(texts: Iterable[tuple[Node, str]]) -> tuple[Label, ...]:
    """Labels on the user's lines of some operations, the first one as the primary one."""
    found = dict[Span, str]()
    for node, text in texts:
        span = users_span(node)
        if span is not None:
            found.setdefault(span, text)
    return tuple(
        Label(span=span, text=text, primary=i == 0) for i, (span, text) in enumerate(found.items())
    )
