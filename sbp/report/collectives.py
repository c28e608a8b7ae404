"""Program -> collectives: what is sent, which line made the value, which line forces it there and
why not later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sbp.handwritten.traffic import handwritten_bytes
from sbp.infer.space import Step, decode
from sbp.plan.ir import Apply, Block, Loop
from sbp.plan.program import Program
from sbp.plan.text import node_place, place, shape_text
from sbp.report.facts import Spot, output_name, spots
from sbp.report.wording import annotation_span, axes_text, change_text, listed, node_text, quoted
from sbp.signatures import Op, kernel_named, rule_for
from sbp.trace.graph import Node
from sbp.trace.regions import interface_of
from sbp.types import Unreduced

_RETURNED = "returned as "
LOCAL = frozenset({"slice", "mask", "zero_pad"})
"""Boxing steps that send nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind on the same mesh axes, made and needed at the same lines.

    Arguments:
      kind: the collective.
      mesh_axes: names of the mesh axes it runs over.
      changes: what becomes of the atoms on them.
      runs: executions per call.
      bytes_per_device: bytes one device sends per call.
      tensors: dtype and global shape of what is converted.
      line: the line that made the value, or else the one that needs it.
      made: where the value comes from.
      needed: what forces the conversion here.
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


def collectives(program: Program, output_names: tuple[str, ...] = ()) -> list[Collective]:
    """The plan's collectives, most bytes first; equal ones in program order."""
    origins = _origins(program)
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for spot in spots(program):
        for step in spot.box.steps:
            if step.kind not in LOCAL:
                one = _collective(program, spot, step, origins, output_names)
                key = (
                    one.kind,
                    one.mesh_axes,
                    *one.changes,
                    *one.made,
                    "" if spot.box.reader is None else one.needed[0],
                )
                groups.setdefault(key, []).append(one)
    for one in (*_handwritten(program, program.block, 1), *_inside_kernels(program)):
        groups.setdefault((one.kind, one.mesh_axes, one.line), []).append(one)
    return sorted((_merged(group) for group in groups.values()), key=lambda c: -c.bytes_per_device)


def _handwritten(program: Program, block: Block, trips: int) -> Iterator[Collective]:
    """What regions written by hand send themselves: one entry for each region."""
    for instruction in block.instructions:
        if isinstance(instruction, Loop):
            for inner in instruction.blocks:
                yield from _handwritten(program, inner, trips * instruction.trips)
        elif isinstance(instruction, Apply) and instruction.node.op == "shard_map":
            node = instruction.node
            sent = handwritten_bytes(node)
            if sent:
                yield Collective(
                    kind="by hand",
                    mesh_axes=", ".join(program.mesh.names),
                    changes=("in a manual region",),
                    runs=trips,
                    bytes_per_device=trips * sent,
                    tensors=tuple(shape_text(program.graph.avals[v]) for v in node.outputs),
                    line=place(node.span) if node.span else "",
                    made=(f"a region written by hand {node_place(node)}",),
                    needed=("it stands there",),
                )


def _inside_kernels(program: Program) -> Iterator[Collective]:
    """What operations send themselves, one entry for each mesh axis and operation."""
    for operation, runs in program.kernels():
        node = operation.node
        for position, sent in operation.sends:
            kernel = kernel_named(operation.row.kernels[position])
            yield Collective(
                kind=sent.kind,
                mesh_axes=program.mesh.names[position],
                changes=(f"inside {node.op}",),
                runs=runs * sent.rounds,
                bytes_per_device=runs * sent.bytes,
                tensors=tuple(shape_text(program.graph.avals[v]) for v in node.outputs),
                line=place(node.span) if node.span else "",
                made=(node_text(node),),
                needed=(f"its kernel {kernel.name!r}: {kernel.summary}",),
            )


def by_line(found: Iterable[Collective]) -> list[Collective]:
    """The same, grouped by kind, mesh axes and source line only."""
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
    )


def detail(one: Collective, limit: int = 2) -> str:
    """Why a collective is where it is, in a sentence."""
    results = [n.removeprefix(_RETURNED) for n in one.needed if n.startswith(_RETURNED)]
    needed = [n for n in one.needed if not n.startswith(_RETURNED)] + (
        [_RETURNED + listed(results, limit)] if results else []
    )
    return f"made by {listed(one.made, limit)}; {listed(needed, limit)}"


def _collective(
    program: Program, spot: Spot, step: Step, origins: dict[int, str], output_names: tuple[str, ...]
) -> Collective:
    box = spot.box
    return Collective(
        kind=step.kind,
        mesh_axes=axes_text(step, program.mesh),
        changes=(change_text(step),),
        runs=spot.runs,
        bytes_per_device=step.bytes_sent * spot.runs,
        tensors=(shape_text(program.graph.avals[box.target.value]),),
        line=_line(spot, origins),
        made=(
            (
                node_text(box.maker)
                if box.maker is not None
                else origins.get(box.source.value, "an argument")
            ),
        ),
        needed=(_needed(program, spot, step, output_names),),
    )


def _line(spot: Spot, origins: dict[int, str]) -> str:
    for node in (spot.box.maker, spot.box.reader):
        if node is not None and node.span is not None:
            span = (annotation_span(node) if node.op == "sbp_annotate" else None) or node.span
            return f"the gradient of {place(span)}" if node.backward else place(span)
    return origins.get(spot.box.source.value, "the end of the program")


def _origins(program: Program) -> dict[int, str]:
    """In words, what each argument of the program and of its regions is."""
    words: dict[int, str] = {}
    for register, name in zip(program.block.inputs, program.graph.input_names, strict=False):
        words[register.value] = f"input {name}"

    def outer(loop: Loop, number: int) -> str:
        operand = loop.node.inputs[number]
        return (
            words.get(operand, f"an operand of {node_text(loop.node)}")
            if isinstance(operand, int)
            else "a constant"
        )

    def visit(block: Block) -> None:
        for instruction in block.instructions:
            if isinstance(instruction, Loop):
                for position, body in enumerate(instruction.blocks):
                    for number, register in enumerate(body.inputs):
                        words[register.value] = _region_input(
                            instruction, position, number, lambda n, at=instruction: outer(at, n)
                        )
                    visit(body)

    visit(program.block)
    return words


def _region_input(loop: Loop, position: int, number: int, outer: Callable[[int], str]) -> str:
    """What an argument of a body is: an operand from outside, a carry, or a slice for each trip."""
    entry = interface_of(loop.node).fed[position][number]
    match entry.kind:
        case "carry":
            return f"the carry of {loop.node.op} {node_place(loop.node)}"
        case "slice":
            return f"a slice of {outer(entry.operand)}"
        case _:
            return outer(entry.operand)


def _needed(program: Program, spot: Spot, step: Step, output_names: tuple[str, ...]) -> str:
    """What forces a conversion here, and why the value cannot go on as it is."""
    box = spot.box
    reader = box.reader
    if reader is None:
        if spot.loops:
            return (
                f"returned by the body of {spot.loops[-1].node.op}"
                f" {node_place(spot.loops[-1].node)}"
            )
        numbers = [i for i, s in enumerate(program.block.outputs) if s == box.target]
        return (
            _RETURNED + listed([output_name(output_names, i) for i in numbers], 1)
            if numbers
            else "returned"
        )
    if reader.op == "sbp_annotate":
        span = annotation_span(reader)
        where = "" if span is None else f"{quoted(span)} at {place(span)}"
        return f"pinned by{where}"
    return f"needed by {node_text(reader, box.maker)}{_why(program, spot, step, reader)}"


def _why(program: Program, spot: Spot, step: Step, reader: Node) -> str:
    """Whether the reader could have taken the value before the step, on the first of the step's
    mesh axes."""
    at = step.mesh_axes[0]
    before, after = decode(step.source[at]), decode(step.target[at])
    if reader.regions or not isinstance(before, Unreduced):
        return f", which takes {after!r}"
    found = rule_for(reader.op)
    if found is None:
        return ", which has no signature"
    avals = tuple(program.graph.aval(o) for o in reader.inputs)
    op = Op(
        reader.op,
        reader.params,
        avals,
        tuple(program.graph.avals[o] for o in reader.outputs),
        program.mesh.sizes[at],
    )
    # A barrier's row speaks of each of its operands.
    each = reader.op == "optimization_barrier"
    positions = [
        0 if each else i for i, o in enumerate(reader.inputs) if o == spot.box.target.value
    ]
    takes = any(row.ins[i] == before for row in found.rows(op) for i in positions)
    return f", which takes {after!r} here" if takes else f", which has no row for {before!r}"


def instructions(block: Block) -> int:
    """How many local operations a block holds, regions included."""
    total = 0
    for instruction in block.instructions:
        total += isinstance(instruction, Apply)
        if isinstance(instruction, Loop):
            total += sum(instructions(inner) for inner in instruction.blocks)
    return total
