"""Edits of the user's source text that add, drop, move or rename collectives.

Each function returns `SourceEdit`s with spans of the original text. Two insertions wrap an
expression in a call, and two deletions remove a call, so the edits of one help may nest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from sbp.errors import SourceEdit, Span
from sbp.source.reader import expression_at
from sbp.source.scopes import statement_of
from sbp.source.text import line_text, parsed_file, span_of

Edits = tuple[SourceEdit, ...]


def call_at(span: Span | None) -> ast.Call | None:
    """The call at a span; None where the span is no call."""
    expression = expression_at(span)[0]
    return expression if isinstance(expression, ast.Call) else None


def called_name(call: ast.Call | None) -> str:
    """The last part of the name that a call has: `psum` of `lax.psum(x, "model")`."""
    match call:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name
        case _:
            return ""


def lax_in(file: str) -> tuple[str, tuple[str, ...]]:
    """The name of `jax.lax` in a file, and the import statements that the file needs for it."""
    tree = parsed_file(file).tree
    for node in tree.body if tree is not None else ():
        match node:
            case ast.ImportFrom(module="jax", names=names):
                for alias in names:
                    if alias.name == "lax":
                        return alias.asname or alias.name, ()
            case ast.Import(names=names):
                for alias in names:
                    if alias.name == "jax":
                        return f"{alias.asname or alias.name}.lax", ()
            case _:
                pass
    return "lax", ("from jax import lax",)


def into_call(span: Span, function: str, arguments: str) -> Edits:
    """An expression as the first argument of a function of `jax.lax`.

    Arguments:
      span: the expression.
      function: the function's name.
      arguments: the other arguments, as source text.
    """
    lax, imports = lax_in(span.file)
    return (
        SourceEdit(span=_start(span), replacement=f"{lax}.{function}(", imports=imports),
        SourceEdit(span=_end(span), replacement=f", {arguments})"),
    )


def after_statement(span: Span, name: str, function: str, arguments: str) -> Edits:
    """A variable put through a function of `jax.lax` after the statement that sets it.

    Arguments:
      span: an expression in the statement.
      name: the variable.
      function: the function's name.
      arguments: the other arguments, as source text.

    Returns:
      The edits; none where no statement stands at the span.
    """
    source = parsed_file(span.file)
    expression = expression_at(span)[0]
    statement = statement_of(source, expression) if expression is not None else None
    if statement is None:
        return ()
    lax, imports = lax_in(span.file)
    place = _end(span_of(statement, span.file))
    before = (line_text(span.file, statement.lineno) or "").encode()[: statement.col_offset]
    between = "; " if before.strip() else "\n" + before.decode()
    text = f"{between}{name} = {lax}.{function}({name}, {arguments})"
    return (SourceEdit(span=place, replacement=text, imports=imports),)


def dropped(span: Span, axes: tuple[str, ...]) -> Edits:
    """A collective without some mesh axes.

    Arguments:
      span: the call.
      axes: the remaining mesh axes; if there are none, the operand replaces the call.

    Returns:
      The edits; none where the source does not show the call and its arguments.
    """
    call = call_at(span)
    if call is None or not call.args:
        return ()
    if axes:
        return axes_replaced(span, axes)
    operand = span_of(call.args[0], span.file)
    atomic = isinstance(call.args[0], ast.Name | ast.Call | ast.Attribute | ast.Subscript)
    opening, closing = ("", "") if atomic else ("(", ")")
    return (
        SourceEdit(span=_between(_start(span), _start(operand)), replacement=opening),
        SourceEdit(span=_between(_end(operand), _end(span)), replacement=closing),
    )


def axes_replaced(span: Span, axes: tuple[str, ...]) -> Edits:
    """The edits that run a collective over other mesh axes; none where the call does not show its
    axes."""
    call = call_at(span)
    if call is None:
        return ()
    named = [k.value for k in call.keywords if k.arg == "axis_name"]
    given = [*call.args[1:2], *named]
    return tuple(SourceEdit(span=span_of(e, span.file), replacement=quoted(axes)) for e in given)


def renamed(span: Span, function: str) -> Edits:
    """The edits that call another function of `jax.lax`."""
    call = call_at(span)
    if call is None:
        return ()
    lax, imports = lax_in(span.file)
    at = span_of(call.func, span.file)
    return (SourceEdit(span=at, replacement=f"{lax}.{function}", imports=imports),)


def divided(span: Span, axes: tuple[str, ...]) -> Edits:
    """The edits that divide an expression by the number of devices along some mesh axes."""
    lax, imports = lax_in(span.file)
    sizes = " * ".join(f'{lax}.axis_size("{axis}")' for axis in axes)
    by = sizes if len(axes) == 1 else f"({sizes})"
    return (
        SourceEdit(span=_start(span), replacement="(", imports=imports),
        SourceEdit(span=_end(span), replacement=f" / {by})"),
    )


def in_order(edits: Iterable[SourceEdit]) -> Edits:
    """Edits in source order, each once; an insertion comes before a deletion at the same place."""
    return tuple(
        sorted(
            dict.fromkeys(edits),
            key=lambda e: (e.span.file, _start(e.span), e.span != _start(e.span)),
        )
    )


def quoted(axes: tuple[str, ...]) -> str:
    """Mesh axes as source text.

    >>> quoted(("data",)), quoted(("data", "model"))
    ('"data"', '("data", "model")')
    """
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def _start(span: Span) -> Span:
    return _point(span, span.line, span.column)


def _end(span: Span) -> Span:
    return _point(span, span.end_line or span.line, span.end_column)


def _point(span: Span, line: int, column: int) -> Span:
    return Span(file=span.file, line=line, column=column, end_column=column, end_line=line)


def _between(first: Span, last: Span) -> Span:
    return Span(
        file=first.file,
        line=first.line,
        column=first.column,
        end_column=last.column,
        end_line=last.line,
    )
