"""Program -> facts: tensors with types, annotated tensors, regions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sbp import _jax
from sbp.annotations import Pin, annotate_p
from sbp.explain.places import SourcePlace
from sbp.infer.space import Codes, local_shape, to_type
from sbp.plan.ir import Block, Loop, Register, Source
from sbp.plan.program import Program
from sbp.plan.text import shape_text
from sbp.plan.traffic import Send, sends
from sbp.report.reasons import output_name
from sbp.report.wording import SEGMENT_LIMIT, common_name, span_text, without_numbers
from sbp.source.annotations import annotated_text, annotation_span
from sbp.source.reader import shortened
from sbp.trace.graph import Node
from sbp.trace.regions import trips_are_assumed
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An argument or result.

    Arguments:
      name: the user's name.
      shape, local_shape: dtype and shape of the tensor and of one device's shard.
      type: its type.
      bytes_per_device: bytes of one device's shard.
      donated: whether it is a donated argument.
      padded: whether it is held as `sbp.Padded`.
      kind, where: of what is in memory: its class, and the line that makes it.
    """

    name: str
    shape: str
    type: NdSbp
    local_shape: str
    bytes_per_device: float
    donated: bool = False
    padded: bool = False
    kind: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedTensor:
    """An annotated tensor.

    Arguments:
      name: the source text of the tensor.
      file, line: file and line of the annotation.
      pin: the type that the annotation asks for.
      tensor: the tensor with its inferred type.
      global_shape: its global shape.
      is_repeat: whether it is a copy in a backward pass, with another type than the first.
    """

    name: str
    file: str
    line: int
    pin: Pin
    tensor: Tensor
    global_shape: tuple[int, ...]
    is_repeat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFact:
    """A loop or branch.

    Arguments:
      op: scan, while or cond.
      place: its line.
      trips: runs of a body each time the region runs.
      trips_assumed: whether `trips` is assumed, because it is known only when the region runs.
      runs: runs of a body per call.
      collectives: the number of conversions and kernels in its bodies that send something.
      bytes_per_device: bytes that one device sends in its bodies per call.
    """

    op: str
    place: SourcePlace
    trips: int
    trips_assumed: bool
    runs: int
    collectives: int
    bytes_per_device: float


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
    groups = defaultdict[Tensor, list[str]](list)
    for one in tensors:
        groups[replace(one, name=without_numbers(one.name))].append(one.name)
    return [(replace(t, name=common_name(names)), len(names)) for t, names in groups.items()]


def annotated(program: Program) -> list[AnnotatedTensor]:
    """The annotated tensors in program order. Copies of an annotation that autodiff and
    rematerialisation make are one where they have the same type."""
    found: dict[AnnotatedTensor, None] = {}
    for node in program.graph.walk():
        if node.op == annotate_p.name and node.params["pin"] is not None and node.stack:
            fact = _annotated(program, node, program.typing.values[node.outputs[0]])
            if fact not in found:
                repeats = node.backward and any(
                    (f.file, f.line, f.pin, f.name) == (fact.file, fact.line, fact.pin, fact.name)
                    for f in found
                )
                found[replace(fact, is_repeat=repeats)] = None
    return list(found)


def _annotated(program: Program, node: Node, codes: Codes) -> AnnotatedTensor:
    span = annotation_span(node)
    assert span is not None
    value = node.outputs[0]
    name = shortened(annotated_text(span), SEGMENT_LIMIT) or span_text(span) or "a tensor"
    return AnnotatedTensor(
        name=name,
        file=span.file,
        line=span.line,
        pin=node.params["pin"],
        tensor=tensor(program, Register(value, codes), name),
        global_shape=tuple(program.graph.avals[value].shape),
    )


def regions(program: Program) -> list[RegionFact]:
    """Scans, whiles and conds in program order."""
    return list(_regions(program.block, 1, sends(program)))


def _regions(block: Block, runs: int, every: Sequence[Send]) -> Iterator[RegionFact]:
    for loop in block.instructions:
        if isinstance(loop, Loop):
            own = [send for send in every if loop.node in send.regions]
            yield RegionFact(
                op=loop.node.name,
                place=SourcePlace.of(loop.node),
                trips=loop.trips,
                trips_assumed=trips_are_assumed(loop.node),
                runs=runs * loop.trips,
                collectives=len({send.planned or send.node for send in own}),
                bytes_per_device=sum(send.bytes for send in own),
            )
            for inner in loop.blocks:
                yield from _regions(inner, runs * loop.trips, own)
