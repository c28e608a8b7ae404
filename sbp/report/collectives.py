"""Program -> collectives: what they send, which line makes each value, and what needs it
converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sbp.annotations import annotate_p
from sbp.explain.origins import Origins
from sbp.explain.places import AtomChange, SourcePlace
from sbp.explain.reasons import ConversionReason, Reasons
from sbp.infer.sends import step_sends, step_stages
from sbp.infer.space import LOCAL, Step
from sbp.plan.ir import Apply, Block, Loop
from sbp.plan.program import PlannedBox, Program
from sbp.plan.text import place, shape_text
from sbp.report.reasons import argument_text, maker_text, need_text, output_name
from sbp.report.wording import axes_text, change_text, listed, node_text, place_cell, place_text
from sbp.signatures import Sent, kernel_named
from sbp.source.annotations import annotation_span
from sbp.trace.traffic import handwritten_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind on the same mesh axes, made and needed at the same lines.

    Arguments:
      kind: the collective.
      mesh_axes: names of the mesh axes it runs over.
      changes: the atoms on these axes before and after, in words.
      runs: executions per call.
      bytes_per_device: bytes one device sends per call.
      tensors: dtype and global shape of the converted values.
      line: the line that makes the value; the line of the reader where there is none.
      made: the makers of the values, in words.
      needed: the readers that need the values converted, in words, without results of the program.
      returned: names of the results of the program that are returned converted.
    """

    kind: str
    mesh_axes: str
    changes: tuple[str, ...]
    runs: int
    bytes_per_device: float
    tensors: tuple[str, ...]
    line: str
    made: tuple[str, ...]
    needed: tuple[str, ...]
    returned: tuple[str, ...] = ()


def collectives(program: Program, output_names: tuple[str, ...] = ()) -> list[Collective]:
    """The plan's collectives, grouped, most bytes first; groups of equal bytes in program order.

    Arguments:
      program: the plan.
      output_names: names of the results.
    """
    reasons = Reasons(program, Origins.of(program.typing))
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for planned in program.boxes():
        for step in planned.box.steps:
            if step.kind in LOCAL:
                continue
            reason = reasons.of(planned, AtomChange.of_step(step))
            aval = program.graph.avals[planned.box.target.value]
            for sent in step_sends(step, aval, program.mesh):
                one = _collective(program, planned, (step, sent), reason, output_names)
                needed = one.needed[0] if reason.need.is_read else ""
                key = (one.kind, one.mesh_axes, *one.changes, *one.made, needed)
                groups.setdefault(key, []).append(one)
    for one in (*_written_by_hand(program), *_inside_kernels(program)):
        groups.setdefault((one.kind, one.mesh_axes, one.line), []).append(one)
    return sorted((_merged(group) for group in groups.values()), key=lambda c: -c.bytes_per_device)


def _written_by_hand(program: Program) -> Iterator[Collective]:
    """The collectives of regions written by hand: one entry for each region."""
    for node, runs in program.written_by_hand():
        sent = handwritten_bytes(node)
        if sent:
            yield Collective(
                kind="by hand",
                mesh_axes=", ".join(program.mesh.names),
                changes=("in a manual region",),
                runs=runs,
                bytes_per_device=runs * sent,
                tensors=tuple(shape_text(program.graph.avals[v]) for v in node.outputs),
                line=place(node.span) if node.span else "",
                made=(f"a region written by hand {place_text(SourcePlace.of(node))}",),
                needed=("it stands there",),
            )


def _inside_kernels(program: Program) -> Iterator[Collective]:
    """The collectives inside kernels: one entry for each operation and mesh axis."""
    for operation, runs in program.kernels():
        node = operation.node
        for position, sent in operation.sends:
            kernel = kernel_named(operation.row.kernels[position])
            yield Collective(
                kind=sent.kind,
                mesh_axes=program.mesh.names[position],
                changes=(f"inside {node.name}",),
                runs=runs * sent.rounds,
                bytes_per_device=runs * sent.bytes,
                tensors=tuple(shape_text(program.graph.avals[v]) for v in node.outputs),
                line=place(node.span) if node.span else "",
                made=(node_text(node),),
                needed=(f"its kernel {kernel.name!r}: {kernel.summary}",),
            )


def by_line(found: Iterable[Collective]) -> list[Collective]:
    """Groups of collectives merged by kind, mesh axes and source line."""
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for one in found:
        groups.setdefault((one.kind, one.mesh_axes, one.line), []).append(one)
    return sorted((_merged(group) for group in groups.values()), key=lambda c: -c.bytes_per_device)


def _merged(group: list[Collective]) -> Collective:
    return dataclasses.replace(
        group[0],
        changes=tuple(dict.fromkeys(change for c in group for change in c.changes)),
        runs=sum(c.runs for c in group),
        bytes_per_device=sum(c.bytes_per_device for c in group),
        tensors=tuple(t for c in group for t in c.tensors),
        made=tuple(dict.fromkeys(m for c in group for m in c.made)),
        needed=tuple(dict.fromkeys(n for c in group for n in c.needed)),
        returned=tuple(dict.fromkeys(n for c in group for n in c.returned)),
    )


def detail(one: Collective, limit: int = 2) -> str:
    """The makers and readers of a collective, in a sentence.

    Arguments:
      one: the collective.
      limit: how many makers, readers and results are named; the others are counted.
    """
    returned = (f"returned as {listed(one.returned, limit)}",) if one.returned else ()
    needed = listed((*one.needed, *returned), limit)
    return f"made by {listed(one.made, limit)}; {needed}"


def _collective(
    program: Program,
    planned: PlannedBox,
    sends: tuple[Step, Sent],
    reason: ConversionReason,
    output_names: tuple[str, ...],
) -> Collective:
    step, sent = sends
    stages = step_stages(step, program.graph.avals[planned.box.target.value], program.mesh)
    need, results = reason.need, list[str]()
    if need.node is None and not need.is_between:
        numbers = (n.number for n in reason.needs if n.node is None)
        results = [listed([output_name(output_names, n) for n in numbers], 1)]
    return Collective(
        kind=sent.kind,
        mesh_axes=axes_text(step, program.mesh),
        changes=(change_text(step, stages),),
        runs=planned.trips * sent.rounds,
        bytes_per_device=sent.bytes * planned.trips,
        tensors=(shape_text(program.graph.avals[planned.box.target.value]),),
        line=_line(reason),
        made=(maker_text(reason),),
        needed=() if results else (need_text(reason),),
        returned=tuple(results),
    )


def _line(reason: ConversionReason) -> str:
    """The line of the maker; where it has none, that of the reader."""
    reader = reason.need.node if reason.need.is_read else None
    for node in (reason.maker, reader):
        if node is not None and node.span is not None:
            annotates = node.op == annotate_p.name
            span = (annotation_span(node) if annotates else None) or node.span
            return (
                f"{'the ' if node.backward else ''}{place_cell(SourcePlace(span, node.backward))}"
            )
    argument = "" if reason.argument is None else argument_text(reason.argument)
    return argument or "the end of the program"


def instructions(block: Block) -> int:
    """The number of local operations in a block and its regions."""
    total = 0
    for instruction in block.instructions:
        total += isinstance(instruction, Apply)
        if isinstance(instruction, Loop):
            total += sum(instructions(inner) for inner in instruction.blocks)
    return total
