"""The text form of a plan: every local operation, every collective and every region on its own
line; it parses back.

>>> head = "plan x=2 boxing=auto 0 B per device {"
>>> text = [head, "  input %0: f32[4] x:S(0)  # a", "  return %0", "}"]
>>> str(parse_listing("\\n".join(text))).splitlines() == text
True
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np

from sbp import _jax
from sbp.errors import SbpError, Span, file_name
from sbp.infer.space import Codes, local_shape, to_type
from sbp.plan.ir import Apply, Block, Box, ConstantRegister, Loop, Register, Source
from sbp.trace.graph import Constant, Node
from sbp.types import NdSbp, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A register where it is defined: its name, dtype and shape (empty for a conversion), type; for
    an argument the user's name."""

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
class Operation:
    """An operation; `kernels`: on which mesh axes it runs another kernel than the primitive itself,
    `bytes_sent`: what those send."""

    results: tuple[Value, ...]
    op: str
    kernels: tuple[str, ...] = ()
    operands: tuple[str, ...]
    bytes_sent: float = 0.0
    comment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One boxing step with the bytes one device sends each time it runs."""

    result: Value
    kind: str
    mesh_axes: tuple[str, ...]
    operand: str
    bytes_sent: float
    comment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A scan, while or cond: its bodies run `trips` times each time it runs."""

    results: tuple[Value, ...]
    op: str
    operands: tuple[str, ...]
    trips: int
    bodies: tuple[Body, ...]
    comment: str = ""


Line = Operation | Conversion | Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Lines in order, from inputs to what is returned."""

    inputs: tuple[Value, ...]
    lines: tuple[Line, ...]
    returned: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A plan as text: `parse_listing(str(listing)) == listing`.

    `mesh` has names and sizes of the mesh axes, outer first; `bytes_per_device` is what one device
    sends per call.
    """

    mesh: tuple[tuple[str, int], ...]
    boxing: str
    bytes_per_device: float
    body: Body

    def __str__(self) -> str:
        axes = "".join(f"{name}={size} " for name, size in self.mesh)
        head = f"plan {axes}boxing={self.boxing} {_figure(self.bytes_per_device)} B per device {{"
        return "\n".join([head, *_body_lines(self.body, "  "), "}"])


def _figure(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _comment(text: str) -> str:
    return f"  # {text}" if text else ""


def _body_lines(body: Body, indent: str) -> Iterator[str]:
    for given in body.inputs:
        yield f"{indent}input {given}{_comment(given.argument)}"
    for line in body.lines:
        match line:
            case Operation():
                kernels = f"<{', '.join(line.kernels)}>" if line.kernels else ""
                call = f"{line.op}{kernels}({', '.join(line.operands)})"
                sent = f"  {_figure(line.bytes_sent)} B" if line.bytes_sent else ""
                yield f"{indent}{_results(line.results)}{call}{sent}{_comment(line.comment)}"
            case Conversion():
                call = f"{line.kind}[{', '.join(line.mesh_axes)}]({line.operand})"
                yield (
                    f"{indent}{line.result} = {call}  {_figure(line.bytes_sent)}"
                    f" B{_comment(line.comment)}"
                )
            case Region():
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


def _results(results: tuple[Value, ...]) -> str:
    return ", ".join(map(str, results)) + " = " if results else ""


# ---- plan -> listing ----------------------------------------------------------------------------


def place(span: Span) -> str:
    """A span as `file:line`."""
    return f"{file_name(span.file)}:{span.line}"


def node_place(node: Node) -> str:
    """Where a node comes from: its line, for a gradient the forward line."""
    if node.span is None:
        return "in generated code"
    return f"in the gradient of {place(node.span)}" if node.backward else f"at {place(node.span)}"


def shape_text(aval: Any, codes: Codes | None = None, sizes: Sequence[int] = ()) -> str:
    """Dtype and shape in short; the shape of one device's shard when codes and axis sizes are
    given.

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
    return f"{name}[{','.join(map(str, shape))}]"


def constant_text(constant: Constant) -> str:
    """A constant as an operand: a scalar by its value, an array by its shape."""
    shape = shape_text(constant.aval)
    if not constant.aval.shape and not _jax.is_extended(constant.aval.dtype):
        value = np.asarray(constant.value).item()
        if isinstance(value, bool | int | float):
            return f"{value!r}:{shape[:-2]}"
    return f"const:{shape}"


def listing(program: Any) -> Listing:
    """Program -> Listing: registers are numbered in the order of their appearance, a converted
    value gets primes.

    `program` is a `sbp.plan.program.Program`, which prints itself with this.
    """
    body = _Writer(program.mesh, program.graph).body(program.block, program.graph.input_names)
    sent = float(program.cost.bytes_per_device)
    return Listing(
        mesh=program.mesh.axes, boxing=program.typing.boxing, bytes_per_device=sent, body=body
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

    def define(self, register: Register, *, shape: bool = True, argument: str = "") -> Value:
        name = self.names[register] = self.fresh(register.value)
        text = shape_text(self.graph.avals[register.value]) if shape else ""
        return Value(
            name=name, shape=text, type=to_type(register.codes, self.mesh), argument=argument
        )

    def operand(self, source: Source) -> str:
        if isinstance(source, ConstantRegister):
            t = to_type(source.codes, self.mesh)
            return constant_text(source.constant) + (f"{{{t!r}}}" if any(source.codes) else "")
        return self.names[source]

    def body(self, block: Block, input_names: Sequence[str] = ()) -> Body:
        names = [*input_names, *[""] * (len(block.inputs) - len(input_names))]
        inputs = tuple(self.define(r, argument=n) for r, n in zip(block.inputs, names, strict=True))
        lines: list[Line] = []
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
                    lines.append(
                        Operation(
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
                        Region(
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
        return Body(
            inputs=inputs, lines=tuple(lines), returned=tuple(map(self.operand, block.outputs))
        )

    def conversions(self, box: Box) -> Iterator[Conversion]:
        reader = box.reader
        comment = (
            "needed at the end" if reader is None else f"needed by {reader.op} {node_place(reader)}"
        )
        operand = self.operand(box.source)
        for step in box.steps:
            result = self.define(Register(box.target.value, step.target), shape=False)
            axes = tuple(self.mesh.names[i] for i in step.mesh_axes)
            yield Conversion(
                result=result,
                kind=step.kind,
                mesh_axes=axes,
                operand=operand,
                bytes_sent=float(step.bytes_sent),
                comment=comment,
            )
            operand = result.name


# ---- text -> listing ----------------------------------------------------------------------------

_NAME = r"%\d+'*"
_SHAPE = r"[\w<>]+\[[\d,]*\]"
_OPERAND = rf"(?:{_NAME}|const:{_SHAPE}(?:\{{[^}}]*\}})?|[-+\w.]+:\w+(?:\{{[^}}]*\}})?)"
_COMMENT = re.compile(r"  # (.*)$")
_HEAD = re.compile(r"plan ((?:\w+=\d+ )*)boxing=(\w+) (\S+) B per device \{")
_VALUE = re.compile(rf"({_NAME}): (?:({_SHAPE}) )?(\S.*)")
_CALL = re.compile(
    rf"([\w:.-]+)(?:<([^>]*)>|\[([^\]]*)\])?\(((?:{_OPERAND}(?:, {_OPERAND})*)?)\)(?:  (\S+)"
    r" (B|trips?))?"
)
_OPERANDS = re.compile(_OPERAND)


def parse_listing(text: str) -> Listing:
    """Reads the text form of a plan.

    Raises:
      SbpError: `type-syntax` with the line number.
    """
    return _Reader(text).listing()


class _Reader:
    def __init__(self, text: str) -> None:
        self.lines = text.rstrip("\n").split("\n")
        self.at = 0
        self.axes: tuple[str, ...] = ()

    def fail(self, expected: str, at: int | None = None) -> SbpError:
        number = self.at if at is None else at
        shown = self.lines[number].strip() if number < len(self.lines) else "the end of the text"
        return SbpError(
            f"plan text does not parse at line {number + 1}: expected {expected}\n  {shown}",
            code="type-syntax",
        )

    def next(self, expected: str) -> tuple[str, str]:
        """The next line and its comment."""
        if self.at >= len(self.lines):
            raise self.fail(expected)
        line = self.lines[self.at]
        self.at += 1
        found = _COMMENT.search(line)
        return (line[: found.start()] if found else line).strip(), found.group(1) if found else ""

    def listing(self) -> Listing:
        expected = "plan AXIS=SIZE .. boxing=POLICY BYTES B per device {"
        found = _HEAD.fullmatch(self.next(expected)[0])
        if found is None:
            raise self.fail(expected, self.at - 1)
        mesh = tuple(
            (name, int(size)) for name, size in (pair.split("=") for pair in found.group(1).split())
        )
        self.axes = tuple(name for name, _ in mesh)
        sent = self.number(found.group(3))
        body = self.body()
        if self.at != len(self.lines):
            raise self.fail("nothing after the plan's closing brace")
        return Listing(mesh=mesh, boxing=found.group(2), bytes_per_device=sent, body=body)

    def number(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise self.fail(f"a number, not {text!r}", self.at - 1) from None

    def value(self, text: str, argument: str = "") -> Value:
        found = _VALUE.fullmatch(text)
        if found is None:
            raise self.fail("%NUMBER: SHAPE TYPE", self.at - 1)
        try:
            t = parse(found.group(3), mesh_axes=self.axes)
        except SbpError as error:
            raise self.fail(f"a type ({error.message.splitlines()[0]})", self.at - 1) from None
        return Value(name=found.group(1), shape=found.group(2) or "", type=t, argument=argument)

    def operands(self, text: str, known: set[str]) -> tuple[str, ...]:
        found = tuple(_OPERANDS.findall(text))
        if ", ".join(found) != text:
            raise self.fail("operands separated by commas", self.at - 1)
        for name in found:
            if name.startswith("%") and name not in known:
                raise self.fail(f"a register that is defined above, not {name}", self.at - 1)
        return found

    def body(self) -> Body:
        inputs: list[Value] = []
        lines: list[Line] = []
        known: set[str] = set()
        while True:
            text, comment = self.next("a line, or return")
            if text.startswith("input "):
                inputs.append(self.value(text.removeprefix("input "), comment))
                known.add(inputs[-1].name)
            elif text == "return" or text.startswith("return "):
                returned = self.operands(text.removeprefix("return").strip(), known)
                if self.next("}")[0] != "}":
                    raise self.fail("} after return", self.at - 1)
                return Body(inputs=tuple(inputs), lines=tuple(lines), returned=returned)
            else:
                lines.append(self.line(text, comment, known))

    def line(self, text: str, comment: str, known: set[str]) -> Line:
        left, equals, right = text.rpartition(" = ")
        found = _CALL.fullmatch(right)
        if found is None:
            raise self.fail("RESULTS = OPERATION(OPERANDS)", self.at - 1)
        results = tuple(self.value(v) for v in re.split(r", (?=%)", left)) if equals else ()
        op, kernels, axes, inner, figure, unit = found.groups()
        operands = self.operands(inner, known)
        known.update(r.name for r in results)
        if unit == "B" and not kernels:
            if axes is None or len(results) != 1 or len(operands) != 1:
                raise self.fail("%NUMBER: TYPE = COLLECTIVE[AXES](OPERAND)  BYTES B", self.at - 1)
            over, sent = tuple(axes.split(", ")), self.number(figure)
            return Conversion(
                result=results[0],
                kind=op,
                mesh_axes=over,
                operand=operands[0],
                bytes_sent=sent,
                comment=comment,
            )
        if unit and unit != "B":
            trips = int(self.number(figure))
            bodies: list[Body] = []
            while self.at < len(self.lines) and self.lines[self.at].strip() == "{":
                self.at += 1
                bodies.append(self.body())
            return Region(
                results=results,
                op=op,
                operands=operands,
                trips=trips,
                bodies=tuple(bodies),
                comment=comment,
            )
        names = tuple(kernels.split(", ")) if kernels else ()
        own = self.number(figure) if unit else 0.0
        return Operation(
            results=results,
            op=op,
            kernels=names,
            operands=operands,
            bytes_sent=own,
            comment=comment,
        )
