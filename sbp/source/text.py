"""The text of source files, their syntax trees, and positions in them.

This is the only module that reads source files. It uses `linecache`, which has files, notebook
cells, and texts that exist only in memory.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field

from sbp.errors import Span

Targets = tuple[tuple[str, ...], ...]
"""The names on the left of an assignment: a tuple of names for each element of a tuple target, one
element for a single name."""

Position = tuple[int, int, int, int]
"""First line, first column, last line, last column as `ast` counts them: lines from 1, columns from
0 in UTF-8 bytes."""


@dataclass(frozen=True, slots=True)
class ParsedSource:
    """A source text as a syntax tree.

    Arguments:
      tree: the module; None for a text that does not parse, such as a notebook cell with magics.
      expressions: the outermost expression at each position, without names and constants.
      assigned: the names that the expression or statement at a position is assigned to.
      parents: for each node of the tree, the node that contains it.
    """

    tree: ast.Module | None
    expressions: dict[Position, ast.expr] = field(default_factory=dict)
    assigned: dict[Position, Targets] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes of the tree that contain a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node


def file_text(file: str) -> str:
    """The text of a file; empty when there is none."""
    return "".join(linecache.getlines(file))


def line_text(file: str, line: int) -> str | None:
    """A line of source (counted from 1) without its newline; None when there is no source."""
    text = linecache.getline(file, line)
    return text.rstrip("\r\n") if text else None


def parsed_file(file: str) -> ParsedSource:
    """A file as a syntax tree."""
    return _parsed(file_text(file))


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ParsedSource:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ParsedSource(None)
    found = ParsedSource(tree)
    for node in ast.walk(tree):
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, ast.expr_context | ast.operator):  # shared between nodes
                found.parents[part] = node
        if isinstance(node, ast.expr) and not isinstance(node, ast.Name | ast.Constant):
            found.expressions.setdefault(position_of(node), node)
        match node:
            case (
                ast.Assign(targets=[target], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
                | ast.NamedExpr(target=target, value=value)
            ):
                found.assigned.update(_assigned(target, value))
            case ast.AugAssign(target=target):
                found.assigned.update(_assigned(target, node))
            case _:
                pass
    return found


def _assigned(target: ast.expr, at: ast.expr | ast.stmt) -> Iterator[tuple[Position, Targets]]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    if isinstance(at, ast.Tuple) and len(at.elts) == len(parts) > 1:
        for part, value in zip(parts, at.elts, strict=True):
            yield from _assigned(part, value)
        return
    names = tuple(
        tuple(map(_name, p.elts if isinstance(p, ast.Tuple | ast.List) else [p])) for p in parts
    )
    if all(name for group in names for name in group):
        yield position_of(at), names


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""


# ---- positions ----------------------------------------------------------------------------------


def position_of(part: ast.expr | ast.stmt) -> Position:
    """The position of a node of a syntax tree."""
    return part.lineno, part.col_offset, part.end_lineno or 0, part.end_col_offset or 0


def position_at(span: Span) -> Position:
    """A span as a position."""
    return span.line, span.column - 1, span.end_line or span.line, span.end_column - 1


def span_of(part: ast.expr | ast.stmt, file: str) -> Span:
    """The span of a node of a file's syntax tree."""
    return Span(
        file=file,
        line=part.lineno,
        column=part.col_offset + 1,
        end_column=(part.end_col_offset or 0) + 1,
        end_line=part.end_lineno or part.lineno,
    )


def start_of(span: Span) -> Span:
    """The place before a span."""
    return point(span.file, span.line, span.column)


def point(file: str, line: int, column: int) -> Span:
    """A place between two characters."""
    return Span(file=file, line=line, column=column, end_column=column, end_line=line)


def contains(outer: Span, inner: Span) -> bool:
    """Whether `inner` lies in `outer`, or equals it."""
    first, last = position_at(outer), position_at(inner)
    return outer.file == inner.file and first[:2] <= last[:2] and last[2:] <= first[2:]


def within(inner: Span, outer: Span) -> bool:
    """Whether one expression is a part of another."""
    return inner != outer and contains(outer, inner)


def exact_text(span: Span) -> str:
    """The source text at a span as it stands, newlines and comments included."""
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
    return b"".join(lines).decode(errors="replace")
