"""Program -> facts: tensors with types, annotated tensors, regions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from sbp import _jax
from sbp.annotations import Pin
from sbp.errors import Span
from sbp.infer.space import Codes, local_shape, to_type
from sbp.plan.ir import Block, Box, Loop, Register, Source
from sbp.plan.program import Program, sending
from sbp.plan.text import node_place, place, shape_text
from sbp.report.wording import annotation_span, first_argument, quoted, shortened
from sbp.trace.graph import Node
from sbp.types import NdSbp, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An argument or result: what it is as a whole, and what one device holds of it."""

    name: str
    shape: str
    type: NdSbp
    local_shape: str
    bytes_per_device: float
    donated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """An annotated tensor: as the user writes it, what the annotation pins, and the whole type that
    was inferred."""

    name: str
    where: str
    pinned: str
    tensor: Tensor
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFact:
    """A loop or branch: its trips each time, how often its bodies run per call, and what they
    send."""

    op: str
    where: str
    trips: int
    runs: int
    collectives: int
    bytes_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spot:
    """A box, how often it runs per call, and the regions around it, outermost first."""

    box: Box
    runs: int
    loops: tuple[Loop, ...]
    block: Block


def spots(program: Program) -> Iterator[Spot]:
    """All conversions in program order."""
    yield from _spots(program.block, 1, ())


def _spots(block: Block, runs: int, loops: tuple[Loop, ...]) -> Iterator[Spot]:
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            yield Spot(box=instruction, runs=runs, loops=loops, block=block)
        elif isinstance(instruction, Loop):
            for inner in instruction.blocks:
                yield from _spots(inner, runs * instruction.trips, (*loops, instruction))


def tensor(program: Program, source: Source, name: str, *, donated: bool = False) -> Tensor:
    """A register or constant as a fact."""
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
        donated=donated,
    )


def inputs(program: Program) -> list[Tensor]:
    """The arguments."""
    names = program.graph.input_names or tuple(
        f"args[{i}]" for i in range(len(program.block.inputs))
    )
    return [
        tensor(program, register, name, donated=number in program.request.aliased)
        for number, (register, name) in enumerate(zip(program.block.inputs, names, strict=True))
    ]


def outputs(program: Program, output_names: tuple[str, ...]) -> list[Tensor]:
    """The results."""
    return [
        tensor(program, s, output_name(output_names, i))
        for i, s in enumerate(program.block.outputs)
    ]


def output_name(output_names: tuple[str, ...], number: int) -> str:
    """The name of a result."""
    return output_names[number] if number < len(output_names) else f"result[{number}]"


def annotated(program: Program) -> list[Annotated]:
    """The annotated tensors in program order; copies that autodiff and rematerialisation make of an
    annotation are one."""
    found: dict[Annotated, None] = {}
    for node in program.graph.walk():
        if node.op == "sbp_annotate" and node.params["pin"] is not None and node.stack:
            codes = program.typing.values[node.outputs[0]]
            fact = _annotated(program, node, codes)
            if fact not in found:
                again = node.backward and any(
                    (f.where, f.pinned, f.name) == (fact.where, fact.pinned, fact.name)
                    for f in found
                )
                found[dataclasses.replace(fact, name=f"{fact.name} again") if again else fact] = (
                    None
                )
    return list(found)


def _annotated(program: Program, node: Node, codes: Codes) -> Annotated:
    span: Span | None = annotation_span(node)
    assert span is not None
    value = node.outputs[0]
    name = shortened(first_argument(span)) or quoted(span).strip(" `") or "a tensor"
    pin: Pin = node.params["pin"]
    return Annotated(
        name=name,
        where=place(span),
        pinned=_pin_text(pin),
        tensor=tensor(program, Register(value, codes), name),
        global_shape=tuple(program.graph.avals[value].shape),
    )


def _pin_text(pin: Pin) -> str:
    """What an annotation says; the axes that it pins to B included, unless it is complete."""
    if pin.complete:
        return repr(pin.type)
    return " ".join(f"{axis}:{atom!r}" for axis, atom in pin.type.items()) or "?"


def regions(program: Program) -> list[RegionFact]:
    """Scans, whiles and conds in program order."""
    return list(_regions(program.block, 1))


def _regions(block: Block, runs: int) -> Iterator[RegionFact]:
    for instruction in block.instructions:
        if isinstance(instruction, Loop):
            inside = runs * instruction.trips
            own = [s for inner in instruction.blocks for s in _spots(inner, inside, ())]
            operations = [k for inner in instruction.blocks for k in sending(inner, inside)]
            yield RegionFact(
                op=instruction.node.op,
                where=node_place(instruction.node),
                trips=instruction.trips,
                runs=inside,
                collectives=sum(any(step.bytes_sent for step in s.box.steps) for s in own)
                + len(operations),
                bytes_per_device=sum(s.box.bytes_sent * s.runs for s in own)
                + sum(o.bytes_sent * n for o, n in operations),
            )
            for inner in instruction.blocks:
                yield from _regions(inner, inside)


def slices(
    program: Program, fact: Annotated
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]] | None:
    """The mesh axes that split a tensor (one or two) and the index range of each device, outer axis
    downwards.

    Returns:
      None when no axis or more than two split it, when some axis is partial, or when there are too
      many devices to show.
    """
    sizes = dict(program.mesh.axes)
    axes = tuple(
        a for a in program.mesh.names if isinstance(fact.tensor.type.get(a), Split) and sizes[a] > 1
    )
    if not axes or len(axes) > 2 or fact.tensor.type.is_partial or any(sizes[a] > 8 for a in axes):
        return None
    rows = range(sizes[axes[0]] if len(axes) == 2 else 1)
    cells = tuple(
        tuple(
            _slice(fact, axes, sizes, (i, j)[2 - len(axes) :])
            for j in range(sizes[axes[len(axes) - 1]])
        )
        for i in rows
    )
    return axes, cells


def _slice(
    fact: Annotated, axes: tuple[str, ...], sizes: dict[str, int], index: tuple[int, ...]
) -> str:
    ranges = [(0, size) for size in fact.global_shape]
    block = list(fact.global_shape)
    for axis, i in zip(axes, index, strict=True):
        atom = fact.tensor.type.get(axis)
        assert isinstance(atom, Split)
        start, stop = ranges[atom.dim]
        block[atom.dim] = -(-block[atom.dim] // sizes[axis])
        begin = min(start + i * block[atom.dim], stop)
        ranges[atom.dim] = begin, min(begin + block[atom.dim], stop)
    shown = [
        ":" if (a, b) == (0, size) else "empty" if a == b else f"{a}:{b}"
        for (a, b), size in zip(ranges, fact.global_shape, strict=True)
    ]
    return f"[{', '.join(shown)}]"
