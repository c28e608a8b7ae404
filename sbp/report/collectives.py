"""Program -> collectives: what they send, which line makes each value, and what needs it
converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from sbp.annotations import annotate_p
from sbp.explain.origins import Origins
from sbp.explain.places import AtomChange, SourcePlace
from sbp.explain.reasons import ConversionReason, Reasons
from sbp.plan.ir import Apply, Block, walk
from sbp.plan.program import Program
from sbp.plan.text import place, shape_text
from sbp.plan.traffic import Send, sends
from sbp.report.reasons import argument_text, maker_text, need_text, output_name
from sbp.report.wording import listed, node_text, place_cell, place_text
from sbp.signatures import kernel_named
from sbp.source.annotations import annotation_span


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
    for send in sends(program):
        if send.planned is None or send.step is None:
            one = _of_operation(program, send)
            key = one.kind, one.mesh_axes, one.line
        else:
            reason = reasons.of(send.planned, AtomChange.of_step(send.step))
            one = _of_conversion(program, send, reason, output_names)
            needed = one.needed[0] if reason.need.is_read else ""
            key = (one.kind, one.mesh_axes, *one.changes, *one.made, needed)
        groups.setdefault(key, []).append(one)
    return sorted((_merged(group) for group in groups.values()), key=lambda c: -c.bytes_per_device)


def _collective(
    program: Program, send: Send, values: Iterable[int], line: str, made: str
) -> Collective:
    return Collective(
        kind=send.kind,
        mesh_axes=send.axes,
        changes=(send.change,),
        runs=send.runs,
        bytes_per_device=send.bytes,
        tensors=tuple(shape_text(program.graph.avals[v]) for v in values),
        line=line,
        made=(made,),
        needed=(),
    )


def _of_operation(program: Program, send: Send) -> Collective:
    """A collective inside a kernel or a region written by hand."""
    node = send.maker
    assert node is not None
    made, needed = f"a region written by hand {place_text(SourcePlace.of(node))}", "it stands there"
    if send.kernel:
        kernel = kernel_named(send.kernel)
        made, needed = node_text(node), f"its kernel {kernel.name!r}: {kernel.summary}"
    line = place(node.span) if node.span else ""
    one = _collective(program, send, node.outputs, line, made)
    return dataclasses.replace(one, needed=(needed,))


def _of_conversion(
    program: Program, send: Send, reason: ConversionReason, output_names: tuple[str, ...]
) -> Collective:
    """A collective of a conversion."""
    assert send.planned is not None
    need, values = reason.need, (send.planned.box.target.value,)
    one = _collective(program, send, values, _line(reason), maker_text(reason))
    if need.node is not None or need.is_between:
        return dataclasses.replace(one, needed=(need_text(reason),))
    numbers = (n.number for n in reason.needs if n.node is None)
    returned = listed([output_name(output_names, n) for n in numbers], 1)
    return dataclasses.replace(one, returned=(returned,))


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
    return sum(isinstance(instruction, Apply) for instruction, *_ in walk(block))
