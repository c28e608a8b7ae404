"""Edits of the user's source that change, remove or add an annotation."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sbp.errors import SourceEdit, Span
from sbp.source.imports import ANNOTATIONS, SbpNames, names_of_sbp
from sbp.source.reader import SourceRead, expression_at
from sbp.source.scopes import function_of, innermost, is_local, owner_of, statement_of
from sbp.source.text import ParsedSource, contains, exact_text, line_text, parsed_file, span_of
from sbp.types import Atom, Broadcast, NdSbp, Split, Unreduced

Part = Literal["result", "cotangent", "whole"]
"""The part of an annotation that an edit changes: the type of its result, that of the cotangent, or
both."""

_OPERATORS = (
    ast.Attribute | ast.Await | ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp | ast.Starred
) | (ast.Subscript | ast.UnaryOp)
_CLOSED = (
    ast.Attribute | ast.Call | ast.Constant | ast.Dict | ast.List | ast.ListComp | ast.Name
) | (ast.Set | ast.Subscript)
_SIMPLE = (
    ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return | ast.Assert | ast.Raise
) | ast.Delete


# ---- what stands in the source ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPart:
    """The atoms that an annotation pins after an edit.

    Arguments:
      atoms: the new atoms by mesh axis; empty removes the part.
      part: the part of the annotation that changes. The rest of the call stays.
      free: mesh axes that a cotangent's type leaves free.
      reduce_dtype: the annotation's `reduce_dtype`.
      is_constraint: whether the call is JAX's, such as `with_sharding_constraint`.
    """

    atoms: Mapping[str, Atom]
    part: Part = "whole"
    free: tuple[str, ...] = ()
    reduce_dtype: str | None = None
    is_constraint: bool = False


def repinned(span: Span | None, pinned: PinnedPart) -> tuple[SourceEdit, ...]:
    """Edits that make an annotation pin other atoms.

    Arguments:
      span: the annotation's call.
      pinned: the part of the annotation that changes, and its new atoms.

    Returns:
      The edits; none where the source shows no annotation at the span, or where the name of sbp
      is a local variable there.
    """
    call, _ = expression_at(span)
    if span is None or not isinstance(call, ast.Call):
        return ()
    source, names = parsed_file(span.file), names_of_sbp(span.file)
    argument = _annotated(call, names, pinned)
    if argument is None or (pinned.atoms and is_local(source, call, names.module or "sbp")):
        return ()
    text = exact_text(span_of(argument, span.file))
    new = _repinned_call(call, text, pinned, names.module or "sbp", span.file)
    if not new:
        return (SourceEdit(span=span, replacement=_alone(argument, call, text, source)),)
    imports = () if names.module else ("import sbp",)
    return (SourceEdit(span=span, replacement=new, imports=imports),)


def _repinned_call(
    call: ast.Call, argument: str, pinned: PinnedPart, module: str, file: str
) -> str:
    """The source text of an annotation that pins other atoms; empty where it pins nothing.

    Arguments:
      call: the annotation.
      argument: the source text of its argument.
      pinned: the part of the annotation that changes, and its new atoms.
      module: the name of sbp in the file.
      file: the file.
    """
    atoms, part = pinned.atoms, pinned.part

    def keywords(*, cotangent: bool) -> list[str]:
        """The keywords of the call that are `cotangent`, or those that are not."""
        kept = [k for k in call.keywords if (k.arg == "cotangent") == cotangent]
        texts = [exact_text(span_of(k.value, file)) for k in kept]
        return [f"{k.arg}={t}" if k.arg else f"**{t}" for k, t in zip(kept, texts, strict=True)]

    if part == "cotangent":
        arguments = [exact_text(span_of(a, file)) for a in call.args]
        rest = keywords(cotangent=False)
        asked = [f'cotangent="{NdSbp(dict(atoms), pinned.free)!r}"'] if atoms else []
        others = [k for k in call.keywords if k.arg not in ("cotangent", "reduce_dtype")]
        if len(arguments) == 1 and not others and not asked:
            return ""
        func = exact_text(span_of(call.func, file))
        return f"{func}({', '.join([*arguments, *rest, *asked])})"
    rest = keywords(cotangent=True) if part == "result" else []
    if not rest and not atoms:
        return ""
    if not rest and pinned.reduce_dtype is None:
        return _call(argument, atoms, module)
    wide = [] if pinned.reduce_dtype is None else [f'reduce_dtype="{pinned.reduce_dtype}"']
    return f"{module}.annotate({', '.join([argument, *_keywords(atoms, module), *rest, *wide])})"


def _annotated(call: ast.Call, names: SbpNames, pinned: PinnedPart) -> ast.expr | None:
    """The argument that an annotating call pins; for a map over a tree, the tree. A constraint of
    JAX may take a tree, which an annotation of sbp does not."""
    arguments, taken_out = call.args, not pinned.atoms
    if pinned.is_constraint:
        trees = () if taken_out else (ast.Tuple, ast.List, ast.Dict)
        return arguments[0] if arguments and not isinstance(arguments[0], trees) else None
    if names.of_library(call.func):
        maps = isinstance(call.func, ast.Attribute) and call.func.attr in ("map", "tree_map")
        known = bool(arguments) and names.function(arguments[0]) in ANNOTATIONS
        return arguments[1] if taken_out and maps and known and len(arguments) == 2 else None
    return arguments[0] if arguments and not isinstance(arguments[0], ast.Starred) else None


def _alone(argument: ast.expr, call: ast.Call, text: str, source: ParsedSource) -> str:
    """The source text of an argument that replaces its call, in parentheses where it needs them."""
    parent = source.parents.get(call)
    called = isinstance(parent, ast.Call) and parent.func is call
    bare = isinstance(argument, _CLOSED) or (isinstance(argument, ast.Tuple) and text[:1] == "(")
    open_ = called or isinstance(parent, _OPERATORS) or "\n" in text
    return f"({text})" if open_ and not bare else text


def _call(argument: str, atoms: Mapping[str, Atom], module: str) -> str:
    """The source text of an annotation: split, replicate or partial where all axes have one atom,
    else annotate."""
    axes = "".join(f', "{axis}"' for axis in atoms)
    first = next(iter(atoms.values()))
    if any(atom != first for atom in atoms.values()):
        return f"{module}.annotate({', '.join([argument, *_keywords(atoms, module)])})"
    match first:
        case Split(dim=dim):
            return f"{module}.split({argument}, {dim}{axes})"
        case Broadcast():
            return f"{module}.replicate({argument}{axes})"
        case Unreduced(monoid=op):
            monoid = "" if op == "sum" else f', op="{op}"'
            return f"{module}.partial({argument}{axes}{monoid})"


def _keywords(atoms: Mapping[str, Atom], module: str) -> list[str]:
    """Atoms as the keywords of `annotate`."""

    def written(atom: Atom) -> str:
        match atom:
            case Split(dim=dim):
                return f"{module}.S({dim})"
            case Broadcast():
                return f"{module}.B"
            case Unreduced(monoid=op):
                return f'{module}.P("{op}")'

    named = [f"{axis}={written(a)}" for axis, a in atoms.items() if axis.isidentifier()]
    rest = [f'"{axis}": {written(a)}' for axis, a in atoms.items() if not axis.isidentifier()]
    return [*named, f"**{{{', '.join(rest)}}}"] if rest else named


# ---- new annotations ----------------------------------------------------------------------------


def converted(line: Span, read: SourceRead, atoms: Mapping[str, Atom]) -> tuple[SourceEdit, ...]:
    """Edits that annotate a value for the line that reads it, and for later lines.

    A local variable gets a new statement before the line. An expression, a variable of an outer
    function or the parameter of a lambda is annotated where it is read.

    Arguments:
      line: the expression that reads the value.
      read: the value.
      atoms: the atoms to pin, by mesh axis.

    Returns:
      The edits; none where the source does not show the value, or where the name of sbp is a
      local variable.
    """
    source, names = parsed_file(line.file), names_of_sbp(line.file)
    here, module = innermost(source, line), names.module or "sbp"
    imports = () if names.module else ("import sbp",)
    if here is None or is_local(source, here, module):
        return ()
    if read.span is not None:
        text = _call(exact_text(read.span), atoms, module)
        return (SourceEdit(span=read.span, replacement=text, imports=imports),)
    owner = owner_of(source, here, read.code)
    statement = statement_of(source, here)
    if statement is not None and owner is function_of(source, here):
        before = _before(statement, line.file)
        if before is not None:
            start = span_of(statement, line.file)
            made = f"{read.code} = {_call(read.code, atoms, module)}{before}"
            place = Span(
                file=line.file,
                line=start.line,
                column=start.column,
                end_column=start.column,
                end_line=start.line,
            )
            return (SourceEdit(span=place, replacement=made, imports=imports),)
    scope = owner if owner is not None else function_of(source, here)
    return tuple(
        SourceEdit(span=span, replacement=_call(exact_text(span), atoms, module), imports=imports)
        for span in sorted(span_of(part, line.file) for part in _reads(scope, read.code))
        if (span.line, span.column) >= (line.line, line.column)
    )


def statement_span(line: Span) -> Span | None:
    """The statement that an expression stands in, a compound one up to its body; None where the
    source does not show it."""
    source = parsed_file(line.file)
    here = innermost(source, line)
    statement = statement_of(source, here) if here is not None else None
    if statement is None:
        return None
    span, body = span_of(statement, line.file), getattr(statement, "body", None)
    if not isinstance(body, list) or not body:
        return span
    first = span_of(body[0], line.file)
    return replace(span, end_line=first.line, end_column=first.column)


def reads(line: Span | None, name: str) -> bool:
    """Whether an expression reads a value by its name."""
    if line is None:
        return False
    source = parsed_file(line.file)
    return source.tree is not None and any(
        contains(line, span_of(part, line.file)) for part in _reads(source.tree, name)
    )


def _reads(scope: ast.AST | None, name: str) -> Iterator[ast.expr]:
    """The expressions of a scope that read a name, or an item of it such as `params["w"]`."""
    try:
        wanted = ast.parse(name, mode="eval").body
    except SyntaxError:
        return
    text = ast.dump(wanted)
    for part in ast.walk(scope) if scope is not None else ():
        if type(part) is type(wanted) and ast.dump(part) == text:
            yield part


def _before(statement: ast.stmt, file: str) -> str | None:
    """The text between a new statement and the one after it: a semicolon, or a newline with the
    indent; None where no statement can be inserted."""
    line = (line_text(file, statement.lineno) or "").encode()
    head, tail = line[: statement.col_offset], line[statement.col_offset :]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return None  # the value is read by a default or a decorator
    if not head.strip():
        return None if tail.startswith(b"elif") else "\n" + head.decode()
    return "; " if isinstance(statement, _SIMPLE) else None
