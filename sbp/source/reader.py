"""The names and expressions of the user, read from the source text at a span."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass

from jax import lax

from sbp.errors import Span
from sbp.limits import policies_in
from sbp.source.imports import ANNOTATIONS, names_of_sbp
from sbp.source.text import (
    ParsedSource,
    Position,
    Targets,
    exact_text,
    parsed_file,
    position_at,
    span_of,
)
from sbp.trace.graph import Node
from sbp.trace.scopes import scope_names


def _at(span: Span) -> tuple[ParsedSource, Position]:
    """The source text of a span, and the span as a position in it."""
    return parsed_file(span.file), position_at(span)


def names_at(span: Span | None) -> Targets:
    """The names that the expression at a span is assigned to; empty when it is not."""
    if span is None:
        return ()
    source, position = _at(span)
    return source.assigned.get(position, ())


def expression_at(span: Span | None) -> tuple[ast.expr | None, str]:
    """The expression at a span and the name it is assigned to."""
    if span is None:
        return None, ""
    source, position = _at(span)
    match source.assigned.get(position):
        case ((name,),):
            return source.expressions.get(position), name
        case _:
            return source.expressions.get(position), ""


def called_name(span: Span | None) -> str:
    """The name of the function that the expression at a span calls, without its module; empty when
    it is no call."""
    match expression_at(span)[0]:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return ""


def source_text(span: Span | None, limit: int = 60) -> str:
    """The source text at a span on one line; empty when there is none."""
    if span is None:
        return ""
    return shortened(" ".join(exact_text(span).split()), limit)


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters; dots stand for the rest.

    >>> shortened("x" * 50, 44) == "x" * 41 + " .."
    True
    """
    return text if len(text) <= limit else text[: limit - 3].rstrip() + " .."


def character_index(text: str, column: int) -> int:
    """The index of a character in a line, from its 1-based column in UTF-8 bytes.

    >>> character_index("é = x", 4)
    2
    """
    return len(text.encode()[: column - 1].decode(errors="ignore"))


def expression_text(span: Span) -> str:
    """The user's expression at a span, joined to one line; empty where there is no source."""
    text = source_text(span, limit=sys.maxsize)
    return text.replace("( ", "(").replace(", )", ")").replace(" )", ")")


def in_library(file: str) -> bool:
    """Whether a file belongs to an installed library, which a user does not edit.

    >>> path = "/env/lib/python3.11/site-packages/optax/_src/clipping.py"
    >>> in_library(path), in_library("train.py")
    (True, False)
    """
    return _INSTALLED.search(file) is not None


_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


def users_span(node: Node) -> Span | None:
    """The innermost line of a node outside of installed libraries: for the work of a library, the
    user's line that calls it."""
    return next((s for s in node.stack if not in_library(s.file)), node.span)


@dataclass(frozen=True, slots=True)
class SourceRead:
    """A value as a line of the user reads it.

    Arguments:
      code: its source text on one line.
      span: the place of an expression; None for a name, which is the same value in all places.
    """

    code: str
    span: Span | None = None

    @property
    def variable(self) -> bool:
        """Whether it is a variable, which a statement can assign."""
        return self.span is None and self.code.isidentifier()


def operand_expressions(node: Node) -> list[ast.expr]:
    """The expressions of a node's operands; empty where the line does not show one for each."""
    match expression_at(node.span)[0]:
        case ast.BinOp(left=left, right=right):
            parts: list[ast.expr] = [left, right]
        case ast.Compare(left=left, comparators=[right]):
            parts = [left, right]
        case ast.UnaryOp(operand=operand):
            parts = [operand]
        case ast.Call(func=ast.Attribute(value=base), args=args):
            module = isinstance(base, ast.Name) and base.id in ("jnp", "jax", "lax", "np", "sbp")
            parts = [*args] if module or isinstance(base, ast.Attribute) else [base, *args]
        case ast.Call(args=args):
            parts = [*args]
        case _:
            parts = []
    if node.op == lax.concatenate_p.name and len(parts) != len(node.inputs):
        parts = [p for part in parts if isinstance(part, ast.List | ast.Tuple) for p in part.elts]
    return parts if node.span and len(parts) == len(node.inputs) else []


def read_of(part: ast.expr, file: str) -> SourceRead:
    """The value that an expression reads; for an annotation, the annotated value."""
    names = names_of_sbp(file)
    while isinstance(part, ast.Call) and part.args and names.function(part.func) in ANNOTATIONS:
        part = part.args[0]
    span = span_of(part, file)
    return SourceRead(source_text(span), None if isinstance(part, ast.Name) else span)


def called_text(part: ast.expr, file: str) -> str:
    """The source text of an expression; for an annotation, of the annotated value."""
    return read_of(part, file).code


def first_argument(node: Node) -> SourceRead | None:
    """The first argument of the call at a node; None when its line is no call."""
    expression = expression_at(users_span(node))[0]
    span = users_span(node)
    return (
        read_of(expression.args[0], span.file)
        if isinstance(expression, ast.Call) and expression.args and span
        else None
    )


def scope_of(node: Node) -> str:
    """The scope of a node, such as `ffn/expert_mlp, forward`, as words that follow "in"."""
    span = users_span(node)
    if node.backward and span:
        return f"the gradient of line {span.line}"
    parts = scope_names(node.scope)
    named = [p for p in parts if "->" not in p and not policies_in(p)]
    called = [
        s.function for s in reversed(node.stack) if s.function and not s.function.startswith("<")
    ]
    return f"{'/'.join(named or called)}, forward" if named or called else "forward"
