"""Plan text -> Listing: reads what `sbp.plan.text` writes.

>>> head = "plan x=2 boxing=auto 0 B per device {"
>>> text = [head, "  input %0: f32[4] x:S(0)  # a", "  return %0", "}"]
>>> str(parse_listing("\\n".join(text))).splitlines() == text
True
"""

from __future__ import annotations

import re

from sbp.errors import SbpError
from sbp.infer.accumulation import WideSum
from sbp.kinds import REDUCE_DTYPES
from sbp.plan.text import (
    ListedBody,
    ListedConversion,
    ListedLine,
    ListedOperation,
    ListedRegion,
    ListedValue,
    Listing,
    wide_text,
)
from sbp.types import AXIS_NAME, parse

_NAME = r"%\d+'*"
_SHAPE = r"[\w<>]+\[[\d,]*\]"
_OPERAND = rf"(?:{_NAME}|const:{_SHAPE}(?:\{{[^}}]*\}})?|[-+\w.]+:\w+(?:\{{[^}}]*\}})?)"
_COMMENT = re.compile(r"  # (.*)$")
_HEAD = re.compile(rf"plan ((?:{AXIS_NAME}=\d+ )*)boxing=(\w+) (\S+) B per device \{{")
_VALUE = re.compile(rf"({_NAME}): (?:({_SHAPE}) )?(\S.*)")
_CALL = re.compile(
    rf"([\w:.-]+)(?:<([^>]*)>|\[([^\]]*)\])?\(((?:{_OPERAND}(?:, {_OPERAND})*)?)\)(?:  (\S+)"
    r" (B|trips?))?"
)
_OPERANDS = re.compile(_OPERAND)
_STAGES = re.compile(r"in stages of (\d+(?: and \d+)+)")
_WIDE = re.compile(r"(\w+) along dim (\d+)|native: no dim for (\w+)")


def parse_listing(text: str) -> Listing:
    """Reads a plan text.

    Raises:
      SbpError: `type-syntax`, with the number of the line that does not parse and the text that is
        expected there.
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
            f"plan text does not parse at line {number + 1}: expected {expected}",
            code="type-syntax",
            details=(shown,),
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

    def value(self, text: str, argument: str = "") -> ListedValue:
        found = _VALUE.fullmatch(text)
        if found is None:
            raise self.fail("%NUMBER: SHAPE TYPE", self.at - 1)
        try:
            t = parse(found.group(3), mesh_axes=self.axes)
        except SbpError as error:
            raise self.fail(f"a type ({error.title})", self.at - 1) from None
        return ListedValue(
            name=found.group(1), shape=found.group(2) or "", type=t, argument=argument
        )

    def wide(self, text: str) -> WideSum:
        found = _WIDE.fullmatch(text)
        dtype, dim, without = found.groups() if found is not None else ("", None, "")
        if (dtype or without) not in REDUCE_DTYPES:
            raise self.fail(f"{wide_text(WideSum('float32', 0))!r}, not {text!r}", self.at - 1)
        return WideSum(dtype or without, int(dim) if dim else None)

    def operands(self, text: str, known: set[str]) -> tuple[str, ...]:
        found = tuple(_OPERANDS.findall(text))
        if ", ".join(found) != text:
            raise self.fail("operands separated by commas", self.at - 1)
        for name in found:
            if name.startswith("%") and name not in known:
                raise self.fail(f"a register that is defined above, not {name}", self.at - 1)
        return found

    def body(self) -> ListedBody:
        inputs: list[ListedValue] = []
        lines: list[ListedLine] = []
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
                return ListedBody(inputs=tuple(inputs), lines=tuple(lines), returned=returned)
            else:
                lines.append(self.line(text, comment, known))

    def line(self, text: str, comment: str, known: set[str]) -> ListedLine:
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
            over, _, how = axes.partition("; ")
            sent, stages = self.number(figure), _STAGES.fullmatch(how)
            return ListedConversion(
                result=results[0],
                kind=op,
                mesh_axes=tuple(over.split(", ")) if over else (),
                operand=operands[0],
                bytes_sent=sent,
                wide=self.wide(how) if how and stages is None else None,
                stages=() if stages is None else tuple(map(int, stages.group(1).split(" and "))),
                comment=comment,
            )
        if unit and unit != "B":
            trips = int(self.number(figure))
            bodies: list[ListedBody] = []
            while self.at < len(self.lines) and self.lines[self.at].strip() == "{":
                self.at += 1
                bodies.append(self.body())
            return ListedRegion(
                results=results,
                op=op,
                operands=operands,
                trips=trips,
                bodies=tuple(bodies),
                comment=comment,
            )
        names = tuple(kernels.split(", ")) if kernels else ()
        own = self.number(figure) if unit else 0.0
        return ListedOperation(
            results=results,
            op=op,
            kernels=names,
            operands=operands,
            bytes_sent=own,
            comment=comment,
        )
