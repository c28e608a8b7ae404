"""The check of a program with `jax.shard_map`: its findings and their repairs."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp.errors import SHOWN, Diagnostic, Help, OptionEdit, Span
from sbp.handwritten.compared import (
    DIFFERS,
    diverging,
    first_unknown,
    joining,
    labels_of,
    numbers_note,
    plain_diagnostic,
    run_diagnostic,
)
from sbp.handwritten.emulation import (
    bodies,
    function_of,
    outs_of,
    program_run,
    regions_of,
    splits_jointly,
)
from sbp.handwritten.faults import find_faults
from sbp.handwritten.measured import Body, Finding, Kind
from sbp.handwritten.one_device import ComparedRun, Comparisons
from sbp.handwritten.repairs import READS_OF_PARTIAL, GraphEdit, Repairs, edit_program
from sbp.machine.mesh import MeshSpec
from sbp.signatures.rule import RANKS
from sbp.source.editing import in_order, sizes_text
from sbp.source.reader import expression_at, name_called, scope_of, source_text, users_span
from sbp.trace.collectives import (
    CALLED,
    SHARD_MAP,
    collective_runs,
    handwritten_bytes,
    names_of,
)
from sbp.trace.graph import CONTROL_FLOW, Graph, Node, group_by
from sbp.types import B, Split

# ---- words --------------------------------------------------------------------------------------
# Findings in words: a diagnostic for each, with labels on the user's lines.


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
    "number": "local-result",
    "partial-as-split": "wrong-placement",
    "pending": "wrong-reduction",
    "order": "wrong-placement",
    "own-block": "missing-reduction",
    "own-positions": "wrong-placement",
    "same-block": "wrong-placement",
    "scaled": "wrong-reduction",
    "small": "wrong-reduction",
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
    "number": "a number in {what} changes with the number of devices on {axes}",
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
    "small": "{what} is {n} times too small on {axes}",
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
    "missing": "{its}{parts} from here on",
    "mixed": "one operand is {parts}, the other is split; reduce the partial one first",
    "monoid": "the parts of {parts} need another reduction",
    "nonlinear": "it does not take {parts}; reduce first",
    "number": "{changed} as with one device: is it the size of a shard?",
    "order": "use one order in all specs; the first axis is the outermost",
    "own-block": "each device has its own part of its block of {parts}; reduce first",
    "own-positions": "in the whole value, a device's shard begins at {index} times its length",
    "partial-as-split": "{its}{parts} from here on",
    "pending": "{pending}",
    "product": "it does not take {parts}; reduce first",
    "ratio": "reduce both operands first: the ratio of two parts is not a part of the ratio",
    "same-block": "the block that belongs to a device depends on its index",
    "scaled": "{n} times too large",
    "small": "{n} times too small",
    "scales": "one is a sum over the devices, the other a mean; use one reduction for both",
    "split-as-whole": "this is {parts}",
    "uneven": "from here on, the devices have different values",
    "wrong-dim": "this is {parts}",
    "wrong-gather": "the shards follow one another along dim {dims}",
}
"""The primary label of a finding."""

_ITS = "its gradient is "
"""The start of a label at the forward line of a gradient."""

_MEAN = "a partial value (the mean of one shard)"


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
    more = ("sbp did not try every repair",) if untried else ()
    facts, at = _facts(finding, mesh), main if users_span(main) else finding.region
    marked = [(at, _LABELS[kind].format(**facts)), *_others(finding, main)]
    return Diagnostic(
        code=_CODES.get(
            kind, "missing-reduction" if finding.observer is None else "misplaced-reduction"
        ),
        severity="warning" if finding.numbers or finding.reordered else "error",
        title=_TITLES[kind].format(**facts),
        labels=labels_of(marked) if users_span(at) else (),
        notes=tuple(dict.fromkeys((*_notes(finding), *more))),
        helps=helps,
        scope=scope_of(main),
    )


def _facts(finding: Finding, mesh: MeshSpec) -> dict[str, Any]:
    """What the texts of titles and primary labels name."""
    fault, axes = finding.fault, finding.mesh_axes
    taken = f"S({fault.operand})" if fault.kind == "partial-as-split" else ""
    types = " or ".join(map(repr, fault.atoms))
    unknown = "partial" if fault.kind in ("missing", "partial-as-split") else "two partial sums"
    n = math.prod(mesh.size(a) for a in axes) ** fault.power
    pending = f"{n} times too large: use lax.pmean for means of shards"
    called = name_called(expression_at(users_span(primary(finding)))[0])
    if called in (CALLED["gathered"], CALLED["scattered"]):
        # The gradient of a gather adds up.
        what = "the loss, or the gradient," if called == CALLED["gathered"] else "it"
        pending = f"{n} times too large: divide {what} by {sizes_text(axes)}"
    if primary(finding).in_gradient and finding.region.params.get("check_vma", True):
        # What follows may add up the gradient again.
        pending = (
            "too large: JAX has summed the gradient already; take lax.pmean of the loss inside the"
            " gradient, and no sum after it"
        )
    return {
        "what": _subject(primary(finding)),
        "pending": pending,
        "result": f"result {finding.result_text} of {_subject(finding.region)}",
        "claim": taken if finding.claim is None else repr(finding.claim),
        "axes": f"mesh {'axis' if len(axes) == 1 else 'axes'} "
        + " and ".join(f"`{a}`" for a in axes),
        "dim": fault.operand,
        "kernel": RANKS.get(fault.node.op, "works on each shard alone"),
        "n": n,
        "changed": fault.number,
        "types": types or "of unknown type",
        "its": _ITS * primary(finding).in_gradient,
        "parts": _MEAN if finding.means else types or unknown,
        "dims": " or ".join(str(a.dim) for a in fault.atoms if isinstance(a, Split)),
        "index": " and ".join(f'lax.axis_index("{a}")' for a in axes),
    }


def _subject(node: Node) -> str:
    """The user's expression for a node."""
    op = function_of(node) if node.op == SHARD_MAP else node.op
    text = f"`{source_text(users_span(node)) or op}`"
    return f"the gradient of {text}" if node.in_gradient else text


def _others(finding: Finding, main: Node) -> Iterator[tuple[Node, str]]:
    """Other operations that play a part."""
    fault = finding.fault
    if fault.kind == "pending":
        word = (
            "mean"
            if "mean" in source_text(users_span(fault.node))
            else "gradient"
            if fault.node.in_gradient
            else "value"
        )
        yield fault.node, f"the {word} of one shard is taken here"
    elif fault.made is not None:
        texts = {"doubled": "reduced here first", "copies": "whole from here on"}
        partial = f"{_MEAN if finding.means else 'partial'} from here on"
        yield fault.made, _ITS * fault.made.in_gradient + texts.get(fault.kind, partial)
    if finding.observer is not None and finding.observer is not main:
        yield finding.observer, "taken here"
    if finding.claim is not None:
        outs, claim = outs_of(finding.region), "whole" if finding.claim == B else finding.claim
        yield finding.region, f"{outs} say that result {finding.result_text} is {claim}"


def _notes(finding: Finding) -> Iterator[str]:
    """Facts that no label shows."""
    if finding.numbers:
        yield numbers_note(finding.numbers)
    if finding.reordered:
        yield (
            "the results are the same on your arguments, and differ when the elements of each array"
            " are in another order"
        )
    made, node = finding.fault.made, finding.fault.node
    if finding.fault.kind in READS_OF_PARTIAL and made and users_span(made) == users_span(node):
        yield "the partial value is " + (
            "a gradient of this line"
            if made.in_gradient
            else "made inside of this call: gather its argument, or write it out"
        )
    if finding.fault.kind == "local":
        yield "to let each device work alone, as in local SGD, pass a plain function as `against`"
    called = name_called(expression_at(users_span(primary(finding)))[0])
    if primary(finding).in_gradient and called not in CALLED.values():
        yield (
            "with check_vma=True, JAX sums the gradient of a whole value over the devices; with"
            " check_vma=False it does not"
        )


# ---- coverage -----------------------------------------------------------------------------------
# What was checked of a program: its collectives with their bytes, and its comparisons.


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
    grouped = group_by(
        (run for region in regions for run in collective_runs(region)),
        lambda run: (users_span(run[0]) or run[0].id, run[0].op, names_of(run[0])),
    )
    return Coverage(
        regions=len(regions),
        values=sum(len(n.outputs) for r in regions for n in r.params["body"].walk()),
        collectives=tuple(
            CheckedCollective(
                text=_subject(node).replace("`", ""),
                span=users_span(node),
                op=op,
                mesh_axes=mesh_axes,
                runs=sum(count for _, count, _ in runs),
                bytes_per_device=sum(sent for _, _, sent in runs),
            )
            for (_, op, mesh_axes), runs in grouped.items()
            for node in [runs[0][0]]
        ),
        runs=tuple(run for run in (compared.plain, *(c.run for c in compared.compared)) if run),
    )


# ---- helps --------------------------------------------------------------------------------------
# Helps: edits of the source with which the program computes on the mesh what it does on one device,
# with the bytes that the edited program sends as their price.


TRIED = 24
"""The largest number of repairs that are tried for one finding."""

CHAINED = 6
"""The largest number of repairs that one help combines."""

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
        self.repairs = Repairs(compared.graph, compared.mesh)
        self.wrong = compared.wrong_of(compared.graph)

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
        repairs, before = self.repairs.of(finding), self.compared
        for variants in itertools.islice(repairs, self.tried):
            for edit in variants:
                if edit.place in places:
                    break
                if edit.text not in found and (
                    help_ := self.help((edit,), edit_program(before.graph, edit, before.mesh))
                ):
                    found[edit.text] = help_
                    places |= {edit.place} - {None}
                    break
            if len(found) == most:
                break
        if checked := self.checked_help(finding, found.values()):
            return (checked, *(h for h in found.values() if h.clears_all_errors)), False
        if not found:
            return self.chain(finding)
        return (
            tuple(sorted(found.values(), key=lambda h: h.bytes_per_device)),
            most > 1 and next(repairs, None) is not None,
        )

    def checked_help(self, finding: Finding, found: Iterable[Help]) -> Help | None:
        """The help to pass check_vma=True, alone or with a help that the program needs then, for a
        gradient that no other edit of the source mends."""
        node, region = primary(finding), finding.region
        function = function_of(region)
        checks = outs_of(region) == "out_types" or region.params.get("check_vma", True)
        if checks or not node.in_gradient or any(h.clears_all_errors for h in found):
            return None
        after, text = self.checked, f"pass check_vma=True to {function}"
        if after is None:
            return None
        edit = OptionEdit(option="check_vma", value=True, function=function)
        if not self.compared.wrong_of(after.graph):
            return Help(
                text=text,
                edits=(edit,),
                bytes_per_device=handwritten_bytes(after.graph, {}),
                peak_memory_bytes=None,
                clears_all_errors=True,
            )
        helps = (h for f in find_faults(after)[0] for h in Helper(after).helps(f)[0])
        best = next((h for h in helps if h.clears_all_errors), None)
        return best and replace(best, text=f"{text}, and {best.text}", edits=(edit, *best.edits))

    @functools.cached_property
    def checked(self) -> Comparisons | None:
        return self.compared.with_checks()

    def help(self, edits: Sequence[GraphEdit], made: Graph) -> Help | None:
        """The help of some edits that make a program. None where its wrong results are not fewer
        than before, or where the source does not show the place of an edit."""
        if self.wrong is None or not all(e.source or e.options for e in edits):
            return None
        wrong = self.compared.wrong_of(made)
        if wrong is None or not wrong <= self.wrong:
            return None
        results, before = ({w for w in every if len(w) == 1} for every in (wrong, self.wrong))
        if not (results < before or (not before and wrong < self.wrong)):
            return None
        return Help(
            text=", and ".join(edit.text for edit in edits),
            edits=(
                *in_order(tuple(e for edit in edits for e in edit.source)),
                *(option for edit in edits for option in edit.options),
            ),
            bytes_per_device=handwritten_bytes(made, {}),
            peak_memory_bytes=None,
            clears_all_errors=not wrong,
        )

    def chain(self, finding: Finding) -> tuple[tuple[Help, ...], bool]:
        """The help of several repairs that mend a result only together, and whether the search
        stopped at a limit. Each repair gives more values of the program a meaning."""
        compared, edits = self.compared, list[GraphEdit]()
        findings: Sequence[Finding] = (finding,)
        while findings and len(edits) < CHAINED:
            repairs = Repairs(compared.graph, compared.mesh).of(findings[0])
            after = None
            for edit in itertools.chain(*itertools.islice(repairs, self.tried)):
                after = compared.of_edited(edit_program(compared.graph, edit, compared.mesh))
                if after is not None and after.meaning > compared.meaning:
                    break
            else:
                return (), next(repairs, None) is not None
            compared = after
            edits.append(edit)
            if len(edits) > 1 and (help_ := self.help(edits, compared.graph)):
                return (help_,), False
            findings, _ = find_faults(compared)
        return (), bool(findings)


# ---- checks -------------------------------------------------------------------------------------


def diagnostics_of(compared: Comparisons) -> tuple[Diagnostic, ...]:
    """The faults of a program in words, in source order; then comparisons that show a fault and
    that no finding explains, and axes on which nothing was compared."""
    findings, ends = find_faults(compared)
    causes = _causes(findings)
    helper = functools.cache(lambda: Helper(compared))
    said = _together([diagnostic(f, compared.mesh, helper().helps(f)) for f in causes])
    if compared.plain is None:
        loops = [n for n in bodies(compared.graph) if n.op in CONTROL_FLOW]
        at = (ends.get(c.run.mesh_axis) or loops for c in compared.compared)
        shown = map(run_diagnostic, (c.run for c in compared.compared), at)
        said += [d for d in shown if d is not None and not (causes and d.code == DIFFERS)]
        every = itertools.product(bodies(compared.graph), compared.mesh.names)
        if any(itertools.starmap(joining, every)) and helper().wrong is not None:
            ran = program_run(compared.graph, every=True)(compared.values)
            said += diverging(ran, compared.mesh)
    elif compared.plain.apart and all(d.severity != "error" for d in said):
        ran, want = (
            program_run(graph, every=True)(compared.values)
            for graph in filter(None, (compared.graph, compared.against))
        )
        left_at = first_unknown(ran, want, compared.mesh.sizes)
        said += [plain_diagnostic(compared.plain, left_at, [*itertools.chain(*ends.values())])]
    return tuple(
        sorted(said, key=lambda d: (d.primary is None, d.primary.span if d.primary else None))
    )


def _together(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Joins diagnostics with the same helps, diagnostics with the same text and the same secondary
    labels, and diagnostics that one help mends."""
    clear = next((d for d in diagnostics if any(h.clears_all_errors for h in d.helps)), None)
    ordered = sorted(diagnostics, key=lambda d: d is not clear)

    def cause(d: Diagnostic) -> Any:
        shown = d if clear is None or any(h.clears_all_errors for h in d.helps) else clear
        others = tuple(label for label in d.labels if not label.primary)
        if shown.helps or d.primary is None or not others:
            return shown.helps or id(d)
        return d.code, d.primary.text, others

    same = group_by(ordered, cause)
    said = []
    for first, *rest in same.values():
        # Of several expressions on one line, the first one has the label that they share.
        labels = {x.span: x for x in first.labels}
        for label in (x for d in rest for x in d.labels):
            if all((x.span.line, x.text) != (label.span.line, label.text) for x in labels.values()):
                labels.setdefault(label.span, replace(label, primary=False))
        notes = (
            f"{'the help also mends this' if first.helps else 'the same fault'}: {title}"
            for title in dict.fromkeys(d.title for d in rest if d.title != first.title)
        )
        said.append(replace(first, labels=tuple(labels.values()), notes=(*first.notes, *notes)))
    return said


def _causes(findings: tuple[Finding, ...]) -> list[Finding]:
    """The findings that are not consequences of other findings. There are three consequences:

    A finding in a gradient follows from a finding of the forward part on the same mesh axis, unless
    the latter is a partial result that the gradient does not read.
    A doubled reduction follows if the value is left partial on another mesh axis, over which the
    reduction was meant to run.
    A scaled gradient follows if the same reduction adds up means on another mesh axis.
    """
    forward = [f for f in findings if not primary(f).backward]
    own = [
        f
        for f in findings
        if not primary(f).backward
        or not any(
            {*f.mesh_axes} & {*other.mesh_axes}
            and (other.fault.kind != "missing" or _reads(f, other))
            for other in forward
        )
    ]
    # Gradients that JAX has added up are means of shards on one mesh axis, too large on another.
    summed = [f for f in own if f.fault.kind == "pending" and primary(f).backward]
    scaled = [f for f in own if f.fault.kind == "scaled" and primary(f).backward and summed]
    every = {axis for f in scaled for axis in f.mesh_axes}
    # Where axes split a dim together, a value of both orders of its parts has no type of its own.
    unsure = [
        f
        for f in own
        if f.fault.kind in ("local", "wrong-gather")
        and all(splits_jointly(f.region, axis) for axis in f.mesh_axes)
    ]
    own = [f for f in own if f not in unsure] or own
    own = [
        replace(
            f,
            mesh_axes=tuple(
                a for a in f.region.params["mesh"].shape if a in {*f.mesh_axes, *every}
            ),
        )
        if f in summed
        else f
        for f in own
        if f not in scaled
    ]
    return [
        f
        for f in own
        if not any(_follows(f, other) for other in own)
        and not any(_is_misdirected(f, other) for other in forward)
    ]


def _follows(scaled: Finding, doubled: Finding) -> bool:
    """Whether a gradient is too large because a doubled reduction made it so."""
    return (
        scaled.fault.kind in ("pending", "scaled")
        and doubled.fault.kind == "doubled"
        and {*scaled.mesh_axes} <= {*doubled.mesh_axes}
        and _reads(scaled, doubled)
    )


def _reads(finding: Finding, other: Finding, *, made: bool = False) -> bool:
    """Whether the operation of a finding reads, directly or not, what the operation of another one
    makes, or with `made` its partial value."""
    body = Body(finding.region.params["body"], {}, "")
    read = (body.upstream(o) for o in finding.fault.node.inputs)
    node = other.fault.made if made else other.fault.node
    return finding.region is other.region and node in body.makers(itertools.chain(*read))


def _is_misdirected(doubled: Finding, missing: Finding) -> bool:
    """Whether a reduction over the wrong mesh axis reduces the value of another finding, which is
    not reduced over the right one."""
    is_read = missing.fault.kind in READS_OF_PARTIAL
    return (
        doubled.fault.kind in ("blocks", "doubled")
        and (is_read or missing.fault.kind == "missing")
        and not {*doubled.mesh_axes} & {*missing.mesh_axes}
        and _reads(doubled, missing, made=is_read)
    )
