"""What the user calls things: names, expressions and places, read from the source text under a
span."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sbp.errors import Span
from sbp.trace.graph import Node

Targets = tuple[tuple[str, ...], ...]
"""The names on the left of an assignment, flat: those of each element of a tuple on its own; one
element for a single name."""

_Position = tuple[int, int, int, int]


def _position(at: ast.expr | ast.stmt) -> _Position:
    return at.lineno, at.col_offset, at.end_lineno or 0, at.end_col_offset or 0


@dataclass(frozen=True, slots=True)
class _Source:
    """What a source text has at each position: the expression, and the names that it is assigned
    to."""

    expressions: dict[_Position, ast.expr]
    assigned: dict[_Position, Targets]


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> _Source:
    """A source text; empty for one that does not parse, such as a notebook cell with magics."""
    found = _Source({}, {})
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant):
            found.expressions.setdefault(_position(node), node)
        match node:
            case ast.Assign(targets=[target], value=value):
                found.assigned.update(_assigned(target, value))
            case (
                ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
            ):
                found.assigned.update(_assigned(target, value))
            case ast.AugAssign(target=target):
                found.assigned.update(_assigned(target, node))
            case _:
                pass
    return found


def _assigned(target: ast.expr, at: ast.expr | ast.stmt) -> Iterator[tuple[_Position, Targets]]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    if isinstance(at, ast.Tuple) and len(at.elts) == len(parts) > 1:
        for part, value in zip(parts, at.elts, strict=True):
            yield from _assigned(part, value)
        return
    names = tuple(
        tuple(map(_name, p.elts if isinstance(p, ast.Tuple | ast.List) else [p])) for p in parts
    )
    if all(name for group in names for name in group):
        yield _position(at), names


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""


def _at(span: Span) -> tuple[_Source, _Position]:
    """The source text of a span, and the span as a position in it."""
    source = _parsed("".join(linecache.getlines(span.file)))
    return source, (span.line, span.column - 1, span.end_line or span.line, span.end_column - 1)


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


def source_text(span: Span | None, limit: int = 60) -> str:
    """The source text at a span on one line; empty when there is none."""
    if span is None:
        return ""
    lines = [
        line.encode()
        for line in linecache.getlines(span.file)[span.line - 1 : span.end_line or span.line]
    ]
    if not lines:
        return ""
    if len(lines) == 1:
        lines[0] = lines[0][span.column - 1 : span.end_column - 1]
    else:
        lines[0], lines[-1] = lines[0][span.column - 1 :], lines[-1][: span.end_column - 1]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    return text if len(text) <= limit else text[: limit - 3].rstrip() + " .."


def in_library(file: str) -> bool:
    """Whether a file belongs to an installed library, which a user does not edit.

    >>> path = "/env/lib/python3.11/site-packages/optax/_src/clipping.py"
    >>> in_library(path), in_library("train.py")
    (True, False)
    """
    return _INSTALLED.search(file) is not None


_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


def users_span(node: Node) -> Span | None:
    """The innermost line of a node that is the user's own: the call, where an installed library
    does the work."""
    return next((s for s in node.stack if not in_library(s.file)), node.span)


def operand_texts(node: Node) -> list[str]:
    """The source texts of a node's operands, when its line shows one for each."""
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
    if node.op == "concatenate" and len(parts) != len(node.inputs):
        parts = [p for part in parts if isinstance(part, ast.List | ast.Tuple) for p in part.elts]
    return (
        [called_text(p, node.span.file) for p in parts]
        if node.span and len(parts) == len(node.inputs)
        else []
    )


def within(inner: Span, outer: Span) -> bool:
    """Whether one expression is a part of another."""
    first, last = (outer.line, outer.column), (outer.end_line or outer.line, outer.end_column)
    starts, ends = (inner.line, inner.column), (inner.end_line or inner.line, inner.end_column)
    return inner.file == outer.file and inner != outer and first <= starts and ends <= last


def called_text(part: ast.expr, file: str) -> str:
    """The source text of an expression; of an annotation, that of what it annotates."""
    while (
        isinstance(part, ast.Call)
        and part.args
        and re.fullmatch(
            r"(sbp\.)?(annotate|split|replicate|shard|partial)", ast.unparse(part.func)
        )
    ):
        part = part.args[0]
    column, end = part.col_offset + 1, (part.end_col_offset or 0) + 1
    return source_text(
        Span(
            file=file,
            line=part.lineno,
            column=column,
            end_column=end,
            end_line=part.end_lineno or part.lineno,
        )
    )


def first_argument(node: Node) -> str:
    """The source text of the first argument of the call at a node; empty when its line is no
    call."""
    expression = expression_at(users_span(node))[0]
    span = users_span(node)
    return (
        called_text(expression.args[0], span.file)
        if isinstance(expression, ast.Call) and expression.args and span
        else ""
    )
