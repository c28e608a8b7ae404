"""Program -> facts: tensors with types, annotated tensors, regions, and collectives with the lines
that make the values and need them converted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp import _jax
from sbp.annotations import Pin, annotate_p
from sbp.errors import listed, position_text
from sbp.explain.origins import ConversionReason, Origins
from sbp.explain.subjects import AtomChange, SourcePlace
from sbp.infer.space import local_shape, to_type
from sbp.plan.ir import Apply, Block, Loop, Register, Source, walk
from sbp.plan.program import Program
from sbp.plan.text import place, shape_text
from sbp.plan.traffic import Send, sends
from sbp.report.parts import grouped
from sbp.report.wording import (
    SEGMENT_LIMIT,
    common_name,
    maker_text,
    need_text,
    node_text,
    output_name,
    place_text,
    span_text,
    without_numbers,
)
from sbp.signatures import kernel_named
from sbp.source.reader import annotated_text, annotation_span, shortened
from sbp.types import NdSbp

# ---- tensors ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An argument, a result, an annotated tensor, or what is in memory.

    Arguments:
      name: the user's name.
      shape, local_shape: dtype and shape of the tensor and of one device's shard.
      global_shape: the shape of the tensor.
      type: its type.
      bytes_per_device: bytes of one device's shard.
      donated: whether it is a donated argument.
      padded: whether it is held as `sbp.Padded`.
      kind: the class of what is in memory.
      where: the line of an annotation, and the line that makes what is in memory.
      pin: the type that an annotation asks for.
      is_repeat: whether it is a copy in a backward pass, with another type than the first.
    """

    name: str
    shape: str
    global_shape: tuple[int, ...]
    type: NdSbp
    local_shape: str
    bytes_per_device: float
    donated: bool = False
    padded: bool = False
    kind: str = ""
    where: str = ""
    pin: Pin | None = None
    is_repeat: bool = False


def tensor(program: Program, source: Source, name: str) -> Tensor:
    """A register or constant as a fact.

    Arguments:
      program: the plan.
      source: the register or constant.
      name: the user's name.
    """
    aval = (
        program.graph.avals[source.value] if isinstance(source, Register) else source.constant.aval
    )
    return Tensor(
        name=name,
        shape=shape_text(aval),
        global_shape=tuple(aval.shape),
        type=to_type(source.codes, program.mesh),
        local_shape=shape_text(aval, source.codes, program.mesh.sizes),
        bytes_per_device=math.prod(local_shape(aval.shape, source.codes, program.mesh.sizes))
        * _jax.itemsize(aval.dtype),
    )


def input_names(program: Program) -> Sequence[str]:
    """The names of the arguments."""
    return program.graph.input_names or [f"args[{i}]" for i in range(len(program.block.inputs))]


def inputs(program: Program) -> list[Tensor]:
    """The arguments."""
    return [
        replace(
            tensor(program, register, name),
            donated=number in program.reused,
            padded=program.request.demand.is_padded("input", number),
        )
        for number, (register, name) in enumerate(
            zip(program.block.inputs, input_names(program), strict=True)
        )
    ]


def outputs(program: Program, output_names: tuple[str, ...]) -> list[Tensor]:
    """The results."""
    return [
        replace(
            tensor(program, s, output_name(output_names, i)),
            padded=program.request.demand.is_padded("output", i),
        )
        for i, s in enumerate(program.block.outputs)
    ]


def alike(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Tensors in order, each with how many there are of it: those of several layers, which have the
    same shape and type and names that differ only in numbers, are one, with a star in its name.

    Arguments:
      tensors: the tensors.
    """
    groups = grouped(tensors, lambda one: replace(one, name=without_numbers(one.name)))
    return [
        (replace(one, name=common_name([t.name for t in same])), len(same))
        for one, same in groups.items()
    ]


def annotated(program: Program) -> list[Tensor]:
    """The annotated tensors in program order, each by its source text. Copies of an annotation that
    autodiff and rematerialisation make are one where they have the same type."""
    found: dict[Tensor, None] = {}
    for node in program.graph.walk():
        if node.op == annotate_p.name and node.params["pin"] is not None and node.stack:
            span, value = annotation_span(node), node.outputs[0]
            assert span is not None
            name = shortened(annotated_text(span), SEGMENT_LIMIT) or span_text(span) or "a tensor"
            made = replace(
                tensor(program, Register(value, program.typing.values[value]), name),
                where=position_text(span.file, span.line),
                pin=node.params["pin"],
            )
            if made not in found:
                first = {(f.where, f.pin, f.name) for f in found}
                repeats = node.backward and (made.where, made.pin, made.name) in first
                found[replace(made, is_repeat=repeats)] = None
    return list(found)


# ---- regions ------------------------------------------------------------------------------------


def regions(program: Program) -> Iterator[tuple[Loop, int, Sequence[Send]]]:
    """Scans, whiles and conds in program order, each with the runs of its bodies per call and what
    they send.

    Arguments:
      program: the plan.
    """
    return _regions(program.block, 1, sends(program))


def _regions(
    block: Block, runs: int, every: Sequence[Send]
) -> Iterator[tuple[Loop, int, Sequence[Send]]]:
    for loop in block.instructions:
        if isinstance(loop, Loop):
            own = [send for send in every if loop.node in send.regions]
            yield loop, runs * loop.trips, own
            for inner in loop.blocks:
                yield from _regions(inner, runs * loop.trips, own)


def instructions(block: Block) -> int:
    """The number of local operations in a block and its regions."""
    return sum(isinstance(instruction, Apply) for instruction, *_ in walk(block))


# ---- collectives --------------------------------------------------------------------------------


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
    origins = Origins(program)
    groups = defaultdict[Hashable, list[Collective]](list)
    for send in sends(program):
        if send.planned is None or send.step is None:
            one = _of_operation(program, send)
            groups[one.kind, one.mesh_axes, one.line].append(one)
        else:
            reason = origins.reason(send.planned, AtomChange.of_step(send.step))
            one = _of_conversion(program, send, reason, output_names)
            needed = one.needed if reason.need.is_read else ()
            groups[one.kind, one.mesh_axes, one.changes, one.made, needed].append(one)
    return _merged(groups)


def _collective(program: Program, send: Send, values: Iterable[int], **told: Any) -> Collective:
    return Collective(
        kind=send.kind,
        mesh_axes=send.axes,
        changes=(send.change,),
        runs=send.runs,
        bytes_per_device=send.bytes,
        tensors=tuple(shape_text(program.graph.avals[v]) for v in values),
        **told,
    )


def _of_operation(program: Program, send: Send) -> Collective:
    """A collective inside a kernel or a region written by hand."""
    node = send.maker
    assert node is not None
    made, needed = f"a region written by hand {place_text(SourcePlace.of(node))}", "it stands there"
    if send.kernel:
        kernel = kernel_named(send.kernel)
        made, needed = node_text(node), f"its kernel {kernel.name!r}: {kernel.summary}"
    return _collective(
        program,
        send,
        node.outputs,
        line=place(node.span) if node.span else "",
        made=(made,),
        needed=(needed,),
    )


def _of_conversion(
    program: Program, send: Send, reason: ConversionReason, output_names: tuple[str, ...]
) -> Collective:
    """A collective of a conversion."""
    assert send.planned is not None
    returned = reason.need.is_returned
    results = [output_name(output_names, n.number) for n in reason.needs if n.is_returned]
    return _collective(
        program,
        send,
        (send.planned.box.target.value,),
        line=_line(reason),
        made=(maker_text(reason),),
        needed=() if returned else (need_text(reason),),
        returned=(listed(results, 1),) if returned else (),
    )


def by_line(found: Iterable[Collective]) -> list[Collective]:
    """Groups of collectives merged by kind, mesh axes and source line."""
    return _merged(grouped(found, lambda one: (one.kind, one.mesh_axes, one.line)))


def _merged(groups: Mapping[Any, Sequence[Collective]]) -> list[Collective]:
    """One collective for each group, most bytes first."""
    merged = (
        replace(
            group[0],
            changes=tuple(dict.fromkeys(change for c in group for change in c.changes)),
            runs=sum(c.runs for c in group),
            bytes_per_device=sum(c.bytes_per_device for c in group),
            tensors=tuple(t for c in group for t in c.tensors),
            made=tuple(dict.fromkeys(m for c in group for m in c.made)),
            needed=tuple(dict.fromkeys(n for c in group for n in c.needed)),
            returned=tuple(dict.fromkeys(n for c in group for n in c.returned)),
        )
        for group in groups.values()
    )
    return sorted(merged, key=lambda c: -c.bytes_per_device)


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
    for node in (reason.maker, reason.need.node if reason.need.is_read else None):
        if node is not None and node.span is not None:
            annotates = node.op == annotate_p.name
            span = (annotation_span(node) if annotates else None) or node.span
            gradient = "the gradient of " if node.backward else ""
            return f"{gradient}{place(span)}"
    return str(reason.value)
