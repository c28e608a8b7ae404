"""The source text of annotations: the line that annotates, and the tensor it names."""

from __future__ import annotations

import ast
import functools
import itertools

from sbp.errors import Span
from sbp.source.reader import expression_text
from sbp.source.text import file_text
from sbp.trace.graph import Node


def annotation_span(node: Node) -> Span | None:
    """The user's line that annotates. Where a function of the user only annotates its argument, it
    is the line that calls this function."""
    for span, caller in itertools.pairwise(node.stack):
        parameters = _wrappers(file_text(span.file)).get((span.line, span.column - 1), ())
        if not (annotated_text(span) in parameters and _calls(caller, span.function)):
            return span
    return node.stack[-1] if node.stack else node.span


@functools.cache
def _wrappers(source: str) -> dict[tuple[int, int], frozenset[str]]:
    """The functions of a source text whose body is one `return`: by the position (line, column) of
    the returned expression, the parameters of the function."""
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
        call = ast.parse(expression_text(caller), mode="eval").body
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


def annotated_text(span: Span) -> str:
    """The source of a call's first argument, such as `x` of `sbp.split(x, 0, "data")`; empty when
    the span is no call."""
    try:
        tree = ast.parse(expression_text(span), mode="eval").body
    except SyntaxError:
        return ""
    return ast.unparse(tree.args[0]) if isinstance(tree, ast.Call) and tree.args else ""
