"""How figures, types and source lines are worded in every report."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
from collections.abc import Iterable

from sbp.errors import Span
from sbp.errors import bytes_text as bytes_text
from sbp.infer.space import Step, decode
from sbp.machine.mesh import MeshSpec
from sbp.plan.text import float32_text, place
from sbp.trace.graph import Node

SEGMENT_LIMIT = 44
"""Longest piece of source, in characters, that a sentence quotes."""


def seconds_text(seconds: float) -> str:
    """A modelled time with three significant digits.

    >>> seconds_text(0.00123), seconds_text(2.5)
    ('1.23 ms', '2.5 s')
    """
    for unit in ("s", "ms", "us"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1e3
    return f"{seconds:.3g} ns"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "input"), counted(3, "input")
    ('1 input', '3 inputs')
    """
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listed(names: Iterable[str], limit: int = 3) -> str:
    """Names with commas; those past the limit are counted.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = list(dict.fromkeys(names))
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {rest} more" if rest > 0 else "")


def change_text(step: Step) -> str:
    """What a boxing step makes of the atoms on its mesh axes, `P(sum) -> S(0)`, and how it sums
    where the user chose float32."""
    before = dict.fromkeys(repr(decode(step.source[i])) for i in step.mesh_axes)
    after = dict.fromkeys(repr(decode(step.target[i])) for i in step.mesh_axes)
    how = f" ({float32_text(step.float32)})" if step.float32 else ""
    return f"{', '.join(before)} -> {', '.join(after)}{how}"


def axes_text(step: Step, mesh: MeshSpec) -> str:
    """The names of a step's mesh axes."""
    return ", ".join(mesh.names[i] for i in step.mesh_axes)


def source_line(file: str, line: int) -> str | None:
    """A line of source without its newline; None where there is no source. Notebook cells are known
    to linecache too."""
    text = linecache.getline(file, line)
    return text.rstrip("\r\n") if text else None


def cut(text: str, column: int) -> int:
    """The index in a line of a 1-based column as Python counts them: in UTF-8 bytes.

    >>> cut("é = x", 4)
    2
    """
    return len(text.encode()[: column - 1].decode(errors="ignore"))


def segment(span: Span) -> str:
    """The user's expression at a span, on one line; empty where there is no source."""
    first, last = span.line, max(span.line, span.end_line)
    lines = [source_line(span.file, number) for number in range(first, last + 1)]
    if any(line is None for line in lines):
        return ""
    texts = [line for line in lines if line is not None]
    texts[-1] = texts[-1][: cut(texts[-1], span.end_column)]
    texts[0] = texts[0][cut(texts[0], span.column) :]
    return (
        re.sub(r"\s+", " ", " ".join(texts))
        .replace("( ", "(")
        .replace(", )", ")")
        .replace(" )", ")")
        .strip()
    )


def shortened(text: str) -> str:
    """At most `SEGMENT_LIMIT` characters; dots stand for the rest.

    >>> shortened("x" * 50) == "x" * 41 + " .."
    True
    """
    return text if len(text) <= SEGMENT_LIMIT else text[: SEGMENT_LIMIT - 3].rstrip() + " .."


def quoted(span: Span) -> str:
    """The expression at a span in backticks with a leading blank, shortened; empty where there is
    none."""
    text = shortened(segment(span).replace("`", "'"))
    return f" `{text}`" if text else ""


def first_argument(span: Span) -> str:
    """The source of a call's first argument; empty when the span is no call.

    The name of an annotated tensor: `x` of `sbp.split(x, 0, "data")`.
    """
    try:
        tree = ast.parse(segment(span), mode="eval").body
    except SyntaxError:
        return ""
    return ast.unparse(tree.args[0]) if isinstance(tree, ast.Call) and tree.args else ""


def annotation_span(node: Node) -> Span | None:
    """The line that annotates; a helper that does nothing but annotate its argument stands for the
    call of it."""
    for span, caller in itertools.pairwise(node.stack):
        parameters = _helpers("".join(linecache.getlines(span.file))).get(
            (span.line, span.column - 1), ()
        )
        if not (first_argument(span) in parameters and _calls(caller, span.function)):
            return span
    return node.stack[-1] if node.stack else node.span


@functools.cache
def _helpers(source: str) -> dict[tuple[int, int], frozenset[str]]:
    """For each function of a file that does nothing but return an expression: where that stands,
    and the function's parameters."""
    found: dict[tuple[int, int], frozenset[str]] = {}
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a notebook's cell with magics
        return found
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(
                body=[ast.Return(value=ast.expr() as value)]
                | [ast.Expr(), ast.Return(value=ast.expr() as value)]
            ):
                arguments = node.args
            case ast.Lambda(body=value):
                arguments = node.args
            case _:
                continue
        found[value.lineno, value.col_offset] = frozenset(
            a.arg for a in (*arguments.posonlyargs, *arguments.args)
        )
    return found


def _calls(caller: Span, function: str) -> bool:
    """Whether the caller's expression is a call of a function of this name; a lambda may have any
    name."""
    try:
        call = ast.parse(segment(caller), mode="eval").body
    except SyntaxError:
        return False
    if not isinstance(call, ast.Call):
        return False
    name = function.rsplit(".", 1)[-1]
    match call.func:
        case ast.Name(id=called):
            return name in ("<lambda>", called)
        case ast.Attribute(attr=called):
            return called == name
        case _:
            return False


def node_text(node: Node, beside: Node | None = None) -> str:
    """A node in a sentence: its operation, the user's expression and line; for a gradient the
    forward line.

    Arguments:
      node: the node.
      beside: a node that the sentence has named already; of the same expression it is not said
          twice.
    """
    if node.op == "sbp_annotate":
        span = annotation_span(node)
        return "an annotation" if span is None else f"the annotation{quoted(span)} at {place(span)}"
    if node.span is None:
        return f"{node.op} in generated code"
    if beside is not None and (node.span, node.backward) == (beside.span, beside.backward):
        return f"{node.op} there"
    where = "in the gradient of" if node.backward else "at"
    return f"{node.op}{quoted(node.span)} {where} {place(node.span)}"
