"""Program -> plan text: each local operation, each collective and each region has its own line.

`sbp.plan.parse.parse_listing` reads the text back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from sbp import _jax
from sbp.errors import Span, position_text
from sbp.infer.accumulation import WideSum
from sbp.infer.cost import step_stages
from sbp.infer.space import Codes, Step, decode, local_shape, to_type
from sbp.plan.ir import Apply, Block, Box, ConstantRegister, Loop, Register, Source
from sbp.trace.graph import Constant, Node
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedValue:
    """A register where it is defined.

    Arguments:
      name: of the register, `%3`.
      shape: dtype and global shape, `f32[8,16]`; empty for the result of a conversion.
      type: its type.
      argument: the user's name of an argument; empty for other registers.
    """

    name: str
    shape: str
    type: NdSbp
    argument: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.shape} {self.type!r}"
            if self.shape
            else f"{self.name}: {self.type!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedOperation:
    """An operation.

    Arguments:
      results: the registers it defines.
      op: the primitive.
      kernels: `axis=kernel` for each mesh axis whose kernel is not the primitive itself.
      operands: registers and constants.
      bytes_sent: bytes that one device sends inside those kernels each time the operation runs.
      comment: the source line.
    """

    results: tuple[ListedValue, ...]
    op: str
    kernels: tuple[str, ...] = ()
    operands: tuple[str, ...]
    bytes_sent: float = 0.0
    comment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedConversion:
    """One step of a conversion: a collective, or a local slice, mask or pad.

    Arguments:
      result: the register it defines.
      kind: `all_reduce`, `slice`, ..
      mesh_axes: names of the mesh axes it runs over.
      operand: the register it converts.
      bytes_sent: bytes that one device sends each time it runs.
      wide: how it sums where the user chose a wider dtype; None for the platform's own sum.
      stages: the sizes of the groups of a reduce-scatter that runs in several stages.
      comment: the node that needs the result.
    """

    result: ListedValue
    kind: str
    mesh_axes: tuple[str, ...]
    operand: str
    bytes_sent: float
    wide: WideSum | None = None
    stages: tuple[int, ...] = ()
    comment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRegion:
    """A `scan`, `while` or `cond`. Each of its bodies runs `trips` times when it runs once."""

    results: tuple[ListedValue, ...]
    op: str
    operands: tuple[str, ...]
    trips: int
    bodies: tuple[ListedBody, ...]
    comment: str = ""


ListedLine = ListedOperation | ListedConversion | ListedRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBody:
    """The lines of a program or of the body of a region, in order."""

    inputs: tuple[ListedValue, ...]
    lines: tuple[ListedLine, ...]
    returned: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A plan as lines: `parse_listing(str(listing)) == listing`.

    Arguments:
      mesh: names and sizes of the mesh axes, outer first.
      boxing: the boxing policy.
      bytes_per_device: bytes that one device sends per call.
      body: the lines.
    """

    mesh: tuple[tuple[str, int], ...]
    boxing: str
    bytes_per_device: float
    body: ListedBody

    def __str__(self) -> str:
        axes = "".join(f"{name}={size} " for name, size in self.mesh)
        head = f"plan {axes}boxing={self.boxing} {_figure(self.bytes_per_device)} B per device {{"
        return "\n".join([head, *_body_lines(self.body, "  "), "}"])


def _figure(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _comment(text: str) -> str:
    return f"  # {text}" if text else ""


def _body_lines(body: ListedBody, indent: str) -> Iterator[str]:
    for given in body.inputs:
        yield f"{indent}input {given}{_comment(given.argument)}"
    for line in body.lines:
        match line:
            case ListedOperation():
                kernels = f"<{', '.join(line.kernels)}>" if line.kernels else ""
                call = f"{line.op}{kernels}({', '.join(line.operands)})"
                sent = f"  {_figure(line.bytes_sent)} B" if line.bytes_sent else ""
                yield f"{indent}{_results(line.results)}{call}{sent}{_comment(line.comment)}"
            case ListedConversion():
                how = f"; {wide_text(line.wide)}" if line.wide else ""
                how += f"; {stages_text(line.stages)}" if line.stages else ""
                call = f"{line.kind}[{', '.join(line.mesh_axes)}{how}]({line.operand})"
                yield (
                    f"{indent}{line.result} = {call}  {_figure(line.bytes_sent)}"
                    f" B{_comment(line.comment)}"
                )
            case ListedRegion():
                trips = "1 trip" if line.trips == 1 else f"{line.trips} trips"
                call = f"{line.op}({', '.join(line.operands)})"
                yield f"{indent}{_results(line.results)}{call}  {trips}{_comment(line.comment)}"
                for inner in line.bodies:
                    yield indent + "{"
                    yield from _body_lines(inner, indent + "  ")
                    yield indent + "}"
            case _:
                assert_never(line)
    yield f"{indent}return {', '.join(body.returned)}".rstrip()


def _results(results: tuple[ListedValue, ...]) -> str:
    return ", ".join(map(str, results)) + " = " if results else ""


# ---- words -------------------------------------------------------------------------------------


def wide_text(how: WideSum) -> str:
    """How a sum for which the user chose a wider dtype is taken.

    >>> wide_text(WideSum("float32", 0)), wide_text(WideSum("float32", None))
    ('float32 along dim 0', 'native: no dim for float32')
    """
    dim = f"along dim {how.dim}"
    return f"native: no dim for {how.dtype}" if how.dim is None else f"{how.dtype} {dim}"


def stages_text(stages: Sequence[int]) -> str:
    """How a reduce-scatter runs in several stages.

    >>> stages_text((2, 4))
    'in stages of 2 and 4'
    """
    return f"in stages of {' and '.join(map(str, stages))}"


def change_text(step: Step, stages: Sequence[int] = ()) -> str:
    """The atoms before and after a step of a conversion, such as `P(sum) -> S(0)`, and how it sums
    where the user chose a wider dtype or where it runs in several stages.

    Arguments:
      step: the step.
      stages: sizes of the groups of its stages; empty where it has none, or they are not shown.
    """
    before, after = (
        ", ".join(dict.fromkeys(repr(decode(codes[i])) for i in step.mesh_axes))
        for codes in (step.source, step.target)
    )
    how = f" ({wide_text(step.wide)})" if step.wide else ""
    how += f" ({stages_text(stages)})" if stages else ""
    return f"{before} -> {after}{how}"


def place(span: Span) -> str:
    """A source position as `file:line`."""
    return position_text(span.file, span.line)


def node_place(node: Node) -> str:
    """The source line of a node as a phrase: `at file:line`; `in the gradient of file:line` for a
    node of a backward pass."""
    if node.span is None:
        return "in generated code"
    return f"in the gradient of {place(node.span)}" if node.backward else f"at {place(node.span)}"


def shape_text(aval: Any, codes: Codes | None = None, sizes: Sequence[int] = ()) -> str:
    """Dtype and shape in short form, such as `f32[8,16]`; `f32<host>[8,16]` in host memory.

    Arguments:
      aval: shape and dtype.
      codes: a type; with it, the shape is that of one device's shard.
      sizes: sizes of the mesh axes, needed with `codes`.

    >>> shape_text(_jax.empty_aval((8, 16), np.dtype("float32")))
    'f32[8,16]'
    """
    name = str(aval.dtype)
    for long, short in (
        ("bfloat", "bf"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "i"),
        ("complex", "c"),
    ):
        if name.startswith(long):
            name = short + name[len(long) :]
            break
    shape = aval.shape if codes is None else local_shape(aval.shape, codes, sizes)
    name += "<host>" if _jax.in_host(aval) else ""
    return f"{name}[{','.join(map(str, shape))}]"


def constant_text(constant: Constant) -> str:
    """A constant as an operand: the value of a scalar, the shape of an array."""
    shape = shape_text(constant.aval)
    if not constant.aval.shape and not _jax.is_extended(constant.aval.dtype):
        value = np.asarray(constant.value).item()
        if isinstance(value, bool | int | float):
            return f"{value!r}:{shape[:-2]}"
    return f"const:{shape}"


# ---- plan -> listing ----------------------------------------------------------------------------


def listing(program: Any) -> Listing:
    """Program -> Listing.

    Registers are numbered in the order of their definition. A converted value keeps its number and
    gets one prime for each conversion: `%3'`.

    Arguments:
      program: a `sbp.plan.program.Program`.
    """
    body = _Writer(program.mesh, program.graph).body(program.block, program.graph.input_names)
    sent = float(program.cost.bytes_per_device)
    return Listing(
        mesh=program.mesh.axes, boxing=program.request.boxing, bytes_per_device=sent, body=body
    )


class _Writer:
    def __init__(self, mesh: Any, graph: Any) -> None:
        self.mesh, self.graph = mesh, graph
        self.numbers: dict[int, int] = {}
        self.primes: dict[int, int] = {}
        self.names: dict[Register, str] = {}

    def fresh(self, value: int) -> str:
        number = self.numbers.setdefault(value, len(self.numbers))
        count = self.primes.get(value, -1) + 1
        self.primes[value] = count
        return f"%{number}{chr(39) * count}"

    def define(self, register: Register, *, shape: bool = True, argument: str = "") -> ListedValue:
        name = self.names[register] = self.fresh(register.value)
        text = shape_text(self.graph.avals[register.value]) if shape else ""
        return ListedValue(
            name=name, shape=text, type=to_type(register.codes, self.mesh), argument=argument
        )

    def operand(self, source: Source) -> str:
        if isinstance(source, ConstantRegister):
            t = to_type(source.codes, self.mesh)
            return constant_text(source.constant) + (f"{{{t!r}}}" if any(source.codes) else "")
        return self.names[source]

    def body(self, block: Block, input_names: Sequence[str] = ()) -> ListedBody:
        names = [*input_names, *[""] * (len(block.inputs) - len(input_names))]
        inputs = tuple(self.define(r, argument=n) for r, n in zip(block.inputs, names, strict=True))
        lines: list[ListedLine] = []
        for instruction in block.instructions:
            match instruction:
                case Apply(node=node):
                    ins = tuple(map(self.operand, instruction.ins))
                    kernels = tuple(
                        f"{axis}={kernel}"
                        for axis, kernel in zip(
                            self.mesh.names, instruction.row.kernels, strict=False
                        )
                        if kernel not in ("", "local")
                    )
                    outs = tuple(map(self.define, instruction.outs))
                    sent, where = instruction.bytes_sent, node_place(node)
                    where = f"{node.title} {where}" if node.title else where
                    lines.append(
                        ListedOperation(
                            results=outs,
                            op=node.op,
                            kernels=kernels,
                            operands=ins,
                            bytes_sent=sent,
                            comment=where,
                        )
                    )
                case Box():
                    lines += self.conversions(instruction)
                case Loop(node=node):
                    ins = tuple(map(self.operand, instruction.ins))
                    outs = tuple(map(self.define, instruction.outs))
                    bodies = tuple(self.body(b) for b in instruction.blocks)
                    lines.append(
                        ListedRegion(
                            results=outs,
                            op=node.op,
                            operands=ins,
                            trips=instruction.trips,
                            bodies=bodies,
                            comment=node_place(node),
                        )
                    )
                case _:
                    assert_never(instruction)
        return ListedBody(
            inputs=inputs, lines=tuple(lines), returned=tuple(map(self.operand, block.outputs))
        )

    def conversions(self, box: Box) -> Iterator[ListedConversion]:
        reader = box.reader
        comment = (
            "needed at the end"
            if reader is None
            else f"needed by {reader.name} {node_place(reader)}"
        )
        operand = self.operand(box.source)
        for step in box.steps:
            result = self.define(Register(box.target.value, step.target), shape=False)
            axes = tuple(self.mesh.names[i] for i in step.mesh_axes)
            yield ListedConversion(
                result=result,
                kind=step.kind,
                mesh_axes=axes,
                operand=operand,
                bytes_sent=float(step.bytes_sent),
                wide=step.wide,
                stages=step_stages(step, self.graph.avals[box.target.value], self.mesh),
                comment=comment,
            )
            operand = result.name
