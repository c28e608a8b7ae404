"""The text of source files, their syntax trees, positions in them, and the scopes of names.

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
    return _parse(file_text(file))


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ParsedSource:
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
                found.assigned.update(_targets(target, value))
            case ast.AugAssign(target=target):
                found.assigned.update(_targets(target, node))
            case _:
                pass
    return found


def _targets(target: ast.expr, at: ast.expr | ast.stmt) -> Iterator[tuple[Position, Targets]]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    if isinstance(at, ast.Tuple) and len(at.elts) == len(parts) > 1:
        for part, value in zip(parts, at.elts, strict=True):
            yield from _targets(part, value)
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


def end_of(span: Span) -> Span:
    """The place after a span."""
    return point(span.file, span.end_line or span.line, span.end_column)


def point(file: str, line: int, column: int) -> Span:
    """A place between two characters."""
    return Span(file=file, line=line, column=column, end_column=column, end_line=line)


def contains(outer: Span, inner: Span) -> bool:
    """Whether `inner` lies in `outer`, or equals it."""
    first, last = position_at(outer), position_at(inner)
    return outer.file == inner.file and first[:2] <= last[:2] and last[2:] <= first[2:]


def exact_text(span: Span) -> str:
    """The source text at a span as it stands, newlines and comments included."""
    lines = [
        line.encode()
        for line in linecache.getlines(span.file)[span.line - 1 : span.end_line or span.line]
    ]
    if lines:  # the end first: both may be in one line
        lines[-1] = lines[-1][: span.end_column - 1]
        lines[0] = lines[0][span.column - 1 :]
    return b"".join(lines).decode(errors="replace")


# ---- scopes -------------------------------------------------------------------------------------
# The functions and statements of a source text, which of them binds a name, and the expression or
# parameter that a variable names at a line. The answer follows from the source text. There is none
# where the text does not decide, as for a variable that a loop or one branch assigns.


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def innermost(source: ParsedSource, span: Span) -> ast.AST | None:
    """The innermost part of a source that holds a span."""
    holding = [  # outer parts come first
        node
        for node in (ast.walk(source.tree) if source.tree else ())
        if isinstance(node, ast.expr | ast.stmt) and contains(span_of(node, span.file), span)
    ]
    return holding[-1] if holding else None


def statement_of(source: ParsedSource, part: ast.AST) -> ast.stmt | None:
    """The innermost statement that a part stands in."""
    if isinstance(part, ast.stmt):
        return part
    return next((p for p in source.around(part) if isinstance(p, ast.stmt)), None)


def statement_at(source: ParsedSource, span: Span) -> ast.stmt | None:
    """The innermost statement that a span stands in."""
    here = innermost(source, span)
    return None if here is None else statement_of(source, here)


def function_of(source: ParsedSource, part: ast.AST) -> ast.AST | None:
    """The function, or the module, that a statement stands in."""
    return next((p for p in source.around(part) if isinstance(p, FUNCTIONS | ast.Module)), None)


def owner_of(source: ParsedSource, part: ast.AST, name: str) -> ast.AST | None:
    """What binds a name that a part reads: its function, or a lambda or comprehension in it; None
    for what lies further out."""
    for scope in source.around(part):
        if isinstance(scope, ast.Lambda | COMPREHENSIONS) and name in _bound_in(scope):
            return scope
        if isinstance(scope, FUNCTIONS | ast.Module):
            return scope if name in _bound_in(scope) else None
    return None


def is_local(source: ParsedSource, part: ast.AST, name: str) -> bool:
    """Whether a function around a part binds a name, so that the module of that name cannot be used
    there. An import of it inside the function counts where it follows the part."""
    line = getattr(part, "lineno", 0)
    scopes = [
        scope
        for scope in source.around(part)
        if isinstance(scope, FUNCTIONS | ast.Lambda | COMPREHENSIONS)
    ]
    late = [
        alias.asname or alias.name.split(".")[0]
        for scope in scopes
        for node in ast.walk(scope)
        if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno >= line
        for alias in node.names
    ]
    return name in late or any(name in _bound_in(scope) for scope in scopes)


def _bound_in(scope: ast.AST) -> set[str]:
    """The names that a scope binds, without those of functions inside it and without imports."""
    match scope:
        case ast.Lambda():
            return _parameter_names(scope.args)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _parameter_names(scope.args) | stored_in(scope)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return {n for g in scope.generators for n in stored_in(g.target)}
        case _:
            return stored_in(scope)


def _parameter_names(arguments: ast.arguments) -> set[str]:
    return {a.arg for a in ast.iter_child_nodes(arguments) if isinstance(a, ast.arg)}


def stored_in(scope: ast.AST) -> set[str]:
    """The names that a scope assigns, without those of functions inside it."""
    found, shared, open_ = set[str](), set[str](), [scope]
    while open_:
        node = open_.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                shared |= set(names)
            case _:
                pass
        inner = (FUNCTIONS | ast.Lambda | ast.ClassDef) | COMPREHENSIONS
        if node is scope or not isinstance(node, inner):
            open_ += ast.iter_child_nodes(node)
    return found - shared


# ---- variables ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableBinding:
    """The expression or parameter that a variable names.

    Arguments:
      span: the expression that was assigned to it; None for a parameter.
      name: the expression's text, if it is a name; empty for others and for a parameter.
      whole: whether the variable is the whole expression; False for an element of it.
      function: for a parameter, the name of its function.
      position: for a parameter, its position; -1 for a keyword-only parameter.
    """

    span: Span | None = None
    name: str = ""
    whole: bool = True
    function: str = ""
    position: int = -1


def binding_of(name: str, at: Span) -> VariableBinding | None:
    """The expression or parameter that a variable names where an expression reads it; None where
    the text does not decide.

    Arguments:
      name: the variable.
      at: the expression that reads it.
    """
    return _binding(file_text(at.file), name, at)


@functools.lru_cache(maxsize=4096)
def _binding(text: str, name: str, at: Span) -> VariableBinding | None:
    source = parsed_file(at.file)
    here = source.expressions.get(position_at(at)) or innermost(source, at)
    if here is None or not text:
        return None
    owner = owner_of(source, here, name)
    if not isinstance(owner, FUNCTIONS | ast.Module):
        return None
    around = set(source.around(here)) | {here}
    stores = _stores(source, owner, name)
    before = [s for s in stores if _is_before(source, s, at)]
    loops = [p for p in around if isinstance(p, ast.For | ast.AsyncFor | ast.While)]
    if any(loop in source.around(s) for s in stores if s not in before for loop in loops):
        return None  # the trip before may have assigned it
    if before:
        last = max(before, key=lambda s: (s.end_lineno or 0, s.end_col_offset or 0))
        return (
            _assigned_expression(source, last, at.file)
            if _is_passed(source, last, around)
            else None
        )
    return _parameter(owner, name) if isinstance(owner, FUNCTIONS) else None


def _stores(source: ParsedSource, owner: ast.AST, name: str) -> list[ast.Name]:
    """Where a function or a module assigns a name, functions inside it left out."""
    return [
        part
        for part in ast.walk(owner)
        if isinstance(part, ast.Name)
        and part.id == name
        and isinstance(part.ctx, ast.Store)
        and next((p for p in source.around(part) if p is owner or name in _own(p)), None) is owner
    ]


def _own(part: ast.AST) -> set[str]:
    """The names that a function inside another one assigns."""
    return stored_in(part) if isinstance(part, FUNCTIONS | ast.Lambda) else set()


def _is_before(source: ParsedSource, store: ast.Name, at: Span) -> bool:
    """Whether a store comes before an expression. An assignment stores at its end."""
    assigning = (
        part
        for part in source.around(store)
        if isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
    )
    end = next(assigning, store)
    return (end.end_lineno or 0, end.end_col_offset or 0) <= (at.line, at.column - 1)


def _is_passed(source: ParsedSource, store: ast.Name, around: set[ast.AST]) -> bool:
    """Whether the statement of a store runs before the line whenever the line does."""
    part = statement_of(source, store)
    while part is not None and (parent := source.parents.get(part)) is not None:
        if parent in around:
            blocks = [getattr(parent, block, []) for block in ("body", "orelse", "finalbody")]
            return any(part in block and not around.isdisjoint(block) for block in blocks)
        part = parent if isinstance(parent, ast.With) else None
    return False


def _assigned_expression(
    source: ParsedSource, store: ast.Name, file: str
) -> VariableBinding | None:
    """The expression that a store assigns."""
    target: ast.expr = store
    elements: list[int] = []
    for part in source.around(store):
        match part:
            case ast.Tuple(elts=elts) | ast.List(elts=elts):
                elements.insert(0, elts.index(target))
                target = part
            case (
                ast.Assign(value=value)
                | ast.AnnAssign(value=ast.expr() as value)
                | ast.NamedExpr(value=value)
            ):
                return _element(value, elements, file)
            case _:
                return None
    return None


def _element(value: ast.expr, elements: list[int], file: str) -> VariableBinding:
    """The element of an assigned expression that a variable of its target stands for."""
    left = list(elements)
    while left and isinstance(value, ast.Tuple | ast.List) and left[0] < len(value.elts):
        if any(isinstance(e, ast.Starred) for e in value.elts):
            break
        value = value.elts[left.pop(0)]
    name = value.id if isinstance(value, ast.Name) and not left else ""
    return VariableBinding(span=span_of(value, file), name=name, whole=not left)


def _parameter(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> VariableBinding:
    """A parameter of a function."""
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    position = positional.index(name) if name in positional else -1
    return VariableBinding(function=function.name, position=position)
