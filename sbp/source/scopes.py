"""The functions and statements of a source text, and which of them binds a name."""

from __future__ import annotations

import ast

from sbp.errors import Span
from sbp.source.text import ParsedSource, contains, span_of

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def innermost(source: ParsedSource, span: Span) -> ast.AST | None:
    """The innermost part of a source that holds a span."""
    found: ast.AST | None = None
    for node in ast.walk(source.tree) if source.tree else ():  # outer parts come first
        if isinstance(node, ast.expr | ast.stmt) and contains(span_of(node, span.file), span):
            found = node
    return found


def statement_of(source: ParsedSource, part: ast.AST) -> ast.stmt | None:
    """The innermost statement that a part stands in."""
    if isinstance(part, ast.stmt):
        return part
    return next((p for p in source.around(part) if isinstance(p, ast.stmt)), None)


def function_of(source: ParsedSource, part: ast.AST) -> ast.AST | None:
    """The function, or the module, that a statement stands in."""
    scopes = FUNCTIONS | ast.Module
    return next((p for p in source.around(part) if isinstance(p, scopes)), None)


def owner_of(source: ParsedSource, part: ast.AST, name: str) -> ast.AST | None:
    """What binds a name that a part reads: its function, or a lambda or comprehension in it; None
    for what lies further out."""
    for scope in source.around(part):
        if isinstance(scope, ast.Lambda | COMPREHENSIONS) and name in _bound_in(scope):
            return scope
        if isinstance(scope, FUNCTIONS | ast.Module):
            return scope if name in _bound_in(scope) else None
    return None


def is_free(source: ParsedSource, span: Span, name: str) -> bool:
    """Whether the function or lambda around a span reads a name of a function further out."""
    part = innermost(source, span)
    for scope in source.around(part) if part is not None else ():
        if isinstance(scope, FUNCTIONS | ast.Lambda | COMPREHENSIONS) and name in _bound_in(scope):
            return False
        if isinstance(scope, FUNCTIONS | ast.Lambda):
            return True
    return False


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
            return parameters_of(scope.args)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return parameters_of(scope.args) | stored_in(scope)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return {n for g in scope.generators for n in stored_in(g.target)}
        case _:
            return stored_in(scope)


def parameters_of(arguments: ast.arguments) -> set[str]:
    extra = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra)}


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
