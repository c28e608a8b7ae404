"""Edits of the user's source that change, remove or add an annotation, or change arguments of
a call."""

import ast
import keyword
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from sbp.errors import Correction, SourceEdit, Span
from sbp.source.reader import (
    ANNOTATIONS,
    ParsedSource,
    SbpNames,
    SourceRead,
    binding_of,
    contains,
    end_of,
    exact_text,
    expression_at,
    function_of,
    innermost,
    is_local,
    keyword_of,
    line_text,
    names_of_sbp,
    owner_of,
    parsed_file,
    point,
    span_of,
    start_of,
    statement_at,
    statement_of,
)
from sbp.types import Atom, Broadcast, NdSbp, Split, Unreduced

Edits = tuple[SourceEdit, ...]

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


def repin(
    span: Span | None,
    atoms: Mapping[str, Atom],
    part: Part = "whole",
    *,
    free: tuple[str, ...] = (),
    reduce_dtype: str | None = None,
    is_constraint: bool = False,
) -> Edits:
    """Edits that make an annotation pin other atoms.

    Arguments:
      span: the annotation's call.
      atoms: the new atoms by mesh axis; empty removes the part.
      part: the part of the annotation that changes. The rest of the call stays.
      free: mesh axes that a cotangent's type leaves free.
      reduce_dtype: the annotation's `reduce_dtype`.
      is_constraint: whether the call is JAX's, such as `with_sharding_constraint`.

    Returns:
      The edits; none where the source shows no annotation at the span, or where the name of sbp
      is a local variable there.
    """
    call, _ = expression_at(span)
    if span is None or not isinstance(call, ast.Call):
        return ()
    source, names = parsed_file(span.file), names_of_sbp(span.file)
    argument, module = _annotated_argument(call, names, not atoms, is_constraint), names.module
    if argument is None or (atoms and is_local(source, call, module)):
        return ()

    def text(node: ast.expr) -> str:
        return exact_text(span_of(node, span.file))

    kept = [(f"{k.arg}=" if k.arg else "**") + text(k.value) for k in call.keywords]
    cotangent = [t for k, t in zip(call.keywords, kept, strict=True) if k.arg == "cotangent"]
    rest, new = cotangent if part == "result" else [], ""
    wide = [] if reduce_dtype is None else [f'reduce_dtype="{reduce_dtype}"']
    if part == "cotangent":
        asked = [f'cotangent="{NdSbp(dict(atoms), free)!r}"'] if atoms else []
        left = [*(t for t in kept if t not in cotangent), *asked]
        others = [k for k in call.keywords if k.arg not in ("cotangent", "reduce_dtype")]
        if len(call.args) > 1 or others or asked:
            new = f"{text(call.func)}({', '.join([*map(text, call.args), *left])})"
    elif atoms and not rest and not wide:
        new = _call(text(argument), atoms, module)
    elif atoms or rest:
        new = _annotate(text(argument), atoms, module, *rest, *wide)
    if not new:
        return (SourceEdit(span=span, replacement=_unwrap(argument, call, text(argument), source)),)
    return (SourceEdit(span=span, replacement=new, imports=names.imports),)


def _annotated_argument(
    call: ast.Call, names: SbpNames, taken_out: bool, is_constraint: bool
) -> ast.expr | None:
    """The argument that an annotating call pins; for a map over a tree, the tree. A constraint of
    JAX may take a tree, which an annotation of sbp does not."""
    arguments = call.args
    if is_constraint:
        trees = () if taken_out else (ast.Tuple, ast.List, ast.Dict)
        return arguments[0] if arguments and not isinstance(arguments[0], trees) else None
    if _of_library(call.func, names):
        maps = isinstance(call.func, ast.Attribute) and call.func.attr in ("map", "tree_map")
        known = bool(arguments) and names.function(arguments[0]) in ANNOTATIONS
        return arguments[1] if taken_out and maps and known and len(arguments) == 2 else None
    return arguments[0] if arguments and not isinstance(arguments[0], ast.Starred) else None


LIBRARIES = frozenset({"jax", "functools", "equinox", "flax", "optax", "chex", "haiku", "builtins"})
"""Modules with functions that call their arguments, such as `jax.tree.map`."""


def _of_library(func: ast.expr, names: SbpNames) -> bool:
    """Whether an expression names a function of `LIBRARIES`."""
    while isinstance(func, ast.Attribute | ast.Call):
        func = func.value if isinstance(func, ast.Attribute) else func.func
    name = func.id if isinstance(func, ast.Name) else ""
    home = names.others.get(name, {"map": "builtins"}.get(name, name))
    return home.partition(".")[0] in LIBRARIES


def _unwrap(argument: ast.expr, call: ast.Call, text: str, source: ParsedSource) -> str:
    """The source text of an argument that replaces its call, in parentheses where it needs them."""
    parent = source.parents.get(call)
    bare = isinstance(argument, _CLOSED) and ("\n" not in text or _is_closed(argument))
    bare |= isinstance(argument, ast.Tuple) and text[:1] == "("
    open_ = (
        (isinstance(parent, ast.Call) and parent.func is call)
        or isinstance(parent, _OPERATORS)
        or isinstance(argument, ast.NamedExpr)
        or "\n" in text
    )
    return f"({text})" if open_ and not bare else text


def _is_closed(part: ast.expr) -> bool:
    """Whether all line breaks in an expression of several lines are in its brackets."""
    match part:
        case ast.Call(func=before) | ast.Subscript(value=before):
            return before.end_lineno == part.lineno
        case _:
            return isinstance(part, ast.Dict | ast.List | ast.ListComp | ast.Set)


def _call(argument: str, atoms: Mapping[str, Atom], module: str) -> str:
    """The source text of an annotation: split, replicate or partial where all axes have one atom,
    else annotate."""
    axes = "".join(f', "{axis}"' for axis in atoms)
    first = next(iter(atoms.values()))
    if any(atom != first for atom in atoms.values()):
        return _annotate(argument, atoms, module)
    match first:
        case Split(dim=dim):
            return f"{module}.split({argument}, {dim}{axes})"
        case Broadcast():
            return f"{module}.replicate({argument}{axes})"
        case Unreduced(monoid=op):
            monoid = "" if op == "sum" else f', op="{op}"'
            return f"{module}.partial({argument}{axes}{monoid})"


def _annotate(argument: str, atoms: Mapping[str, Atom], module: str, *others: str) -> str:
    """The source text of a call of annotate."""
    left = dict(atoms)  # a call inside pins axes that have the names of its parameters
    for axis in ("type", "cotangent", "reduce_dtype"):
        if axis in left:
            argument = _call(argument, {axis: left.pop(axis)}, module)
    return f"{module}.annotate({', '.join([argument, *_keywords(left, module), *others])})"


def _keywords(atoms: Mapping[str, Atom], module: str) -> list[str]:
    """Atoms as the keywords of `annotate`."""

    def written(atom: Atom) -> str:
        text = f'P("{atom.monoid}")' if isinstance(atom, Unreduced) else repr(atom)
        return f"{module}.{text}"

    fits = {axis: axis.isidentifier() and not keyword.iskeyword(axis) for axis in atoms}
    named = [f"{axis}={written(a)}" for axis, a in atoms.items() if fits[axis]]
    rest = [f'"{axis}": {written(a)}' for axis, a in atoms.items() if not fits[axis]]
    return [*named, f"**{{{', '.join(rest)}}}"] if rest else named


# ---- new annotations ----------------------------------------------------------------------------


def convert_value(line: Span, read: SourceRead, atoms: Mapping[str, Atom]) -> Edits:
    """Edits that annotate a value for the line that reads it, and for later lines.

    A local variable gets a new statement before the line. An expression, a variable of an outer
    function, the parameter of a lambda, or a variable that the line itself assigns with `:=` is
    annotated where it is read.

    Arguments:
      line: the expression that reads the value.
      read: the value.
      atoms: the atoms to pin, by mesh axis.

    Returns:
      The edits; none where the source does not show the value, or where the name of sbp is a
      local variable.
    """
    source, names = parsed_file(line.file), names_of_sbp(line.file)
    here, module = innermost(source, line), names.module
    if here is None or is_local(source, here, module):
        return ()
    if read.span is not None:
        return (
            SourceEdit(
                span=read.span,
                replacement=_call(exact_text(read.span), atoms, module),
                imports=names.imports,
            ),
        )
    owner = owner_of(source, here, read.code)
    statement = statement_of(source, here)
    if (
        statement is not None
        and owner is function_of(source, here)
        and not _stored_inside(statement, read.code)
        and (before := _before(statement, line.file)) is not None
    ):
        made = f"{read.code} = {_call(read.code, atoms, module)}{before}"
        return (
            SourceEdit(
                span=start_of(span_of(statement, line.file)),
                replacement=made,
                imports=names.imports,
            ),
        )
    scope = owner if owner is not None else function_of(source, here)
    return tuple(
        SourceEdit(
            span=span, replacement=_call(exact_text(span), atoms, module), imports=names.imports
        )
        for span in sorted(span_of(part, line.file) for part in _reads(scope, read.code))
        if (span.line, span.column) >= (line.line, line.column)
    )


def statement_span(line: Span) -> Span | None:
    """The statement that an expression stands in, a compound one up to its body; None where the
    source does not show it."""
    if (statement := statement_at(parsed_file(line.file), line)) is None:
        return None
    span, body = span_of(statement, line.file), getattr(statement, "body", None)
    if not isinstance(body, list) or not body:
        return span
    first = span_of(body[0], line.file)
    return replace(span, end_line=first.line, end_column=first.column)


def reads(line: Span | None, name: str) -> bool:
    """Whether an expression reads a value by its name."""
    return line is not None and any(
        contains(line, span_of(part, line.file))
        for part in _reads(parsed_file(line.file).tree, name)
    )


def _reads(scope: ast.AST | None, name: str) -> Iterator[ast.expr]:
    """The expressions of a scope that read a name, or an item of it such as `params["w"]`."""
    try:
        wanted = ast.parse(name, mode="eval").body
    except SyntaxError:
        return
    text = ast.dump(wanted)
    parts = ast.walk(scope) if scope is not None else ()
    yield from (p for p in parts if type(p) is type(wanted) and ast.dump(p) == text)


def _stored_inside(statement: ast.stmt, name: str) -> bool:
    """Whether an expression or a `with` of a statement assigns the variable of a value."""
    variable = name.partition(".")[0].partition("[")[0]
    return any(
        isinstance(part, ast.Name) and part.id == variable and isinstance(part.ctx, ast.Store)
        for inside in ast.walk(statement)
        if isinstance(inside, ast.NamedExpr | ast.withitem)
        for part in ast.walk(inside)
    )


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


# ---- arguments of calls -------------------------------------------------------------------------


def argument_span(call: Span | None, name: str) -> Span | None:
    """The place of a keyword argument: the expression in the call, and where that is a variable,
    the expression that was assigned to it. None where the source does not show it.

    Arguments:
      call: the call.
      name: the keyword.
    """
    part = keyword_of(expression_at(call)[0], name)
    if part is None or call is None:
        return None
    span = span_of(part, call.file)
    variable = part.id if isinstance(part, ast.Name) else ""
    while variable:
        binding = binding_of(variable, span)
        if binding is None or binding.span is None or not binding.whole:
            return None
        span, variable = binding.span, binding.name
    return span


def items_of(call: Span | None, name: str, count: int) -> list[tuple[Span, str]]:
    """The places and texts of the items of a keyword argument that is written as a tuple or list;
    empty where the source does not show so many.

    Arguments:
      call: the call.
      name: the keyword.
      count: the number of items.
    """
    at = argument_span(call, name)
    part = expression_at(at)[0]
    if at is None or not isinstance(part, ast.Tuple | ast.List) or len(part.elts) != count:
        return []
    return [(span, exact_text(span)) for span in (span_of(item, at.file) for item in part.elts)]


def constants_in(at: Span, old: Any, new: Any, *, of_call: bool = False) -> Edits:
    """Edits that replace a constant in an expression. A name of a keyword argument, and a name in
    the text of a type, count as constants.

    Arguments:
      at: the expression.
      old: the constant.
      new: the constant in its place.
      of_call: whether the expression is a call of sbp, whose arguments are replaced. Those of other
        calls inside stay.
    """
    found: dict[Span, SourceEdit] = {}
    source, (call, _) = parsed_file(at.file), expression_at(at)
    names = names_of_sbp(at.file)
    parts = _arguments(call, names) if of_call and isinstance(call, ast.Call) else None
    for part in ast.walk(source.tree) if parts is None else parts:
        if isinstance(source.parents.get(part), ast.UnaryOp):
            continue  # the 2 in -2
        if isinstance(part, ast.keyword) and part.arg and part.arg == old and type(new) is str:
            begin = point(at.file, part.lineno, part.col_offset + 1)
            span = replace(begin, end_column=begin.column + len(part.arg.encode()))
            if contains(at, span):
                found[span] = SourceEdit(span=span, replacement=new)
        elif isinstance(part, ast.Constant | ast.UnaryOp) and contains(at, span_of(part, at.file)):
            span, text = span_of(part, at.file), _constant(part, at, old, new)
            if text:
                found[span] = SourceEdit(span=span, replacement=text)
    return tuple(found[span] for span in sorted(found))


def _arguments(part: ast.AST, names: SbpNames) -> Iterator[ast.AST]:
    """The arguments of a call, with the items of collections and the arguments of sbp's calls."""
    for inner in ast.iter_child_nodes(part):
        yield inner
        if isinstance(inner, ast.keyword | ast.Starred | ast.Tuple | ast.List | ast.Dict) or (
            isinstance(inner, ast.Call) and names.function(inner.func)
        ):
            yield from _arguments(inner, names)


def _constant(part: ast.expr, at: Span, old: Any, new: Any) -> str:
    """The source text of a constant after the replacement; empty where it stays."""
    try:
        value = ast.literal_eval(part)
    except (ValueError, TypeError):
        return ""
    changed = Correction(at=at, wrong=old, right=new).of(value)
    if isinstance(value, str) and isinstance(old, int) and isinstance(new, int):
        changed = value.replace(f"S({old})", f"S({new})")
    if changed is value or changed == value:
        return ""
    text = repr(changed)
    return text if '"' in text or not isinstance(changed, str) else f'"{changed}"'


# ---- collectives --------------------------------------------------------------------------------
# Edits of programs that call `jax.lax` themselves.


def lax_in(file: str) -> tuple[str, tuple[str, ...]]:
    """The name of `jax.lax` in a file, and the import statements that the file needs for it."""
    for node in parsed_file(file).tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            name, module = alias.asname or alias.name, getattr(node, "module", "")
            if (module, alias.name) == ("jax", "lax"):
                return name, ()
            if (module, alias.name) == ("", "jax"):
                return f"{name}.lax", ()
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
        SourceEdit(span=start_of(span), replacement=f"{lax}.{function}(", imports=imports),
        SourceEdit(span=end_of(span), replacement=f", {arguments})"),
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
    if (statement := statement_at(parsed_file(span.file), span)) is None:
        return ()
    lax, imports = lax_in(span.file)
    before = (line_text(span.file, statement.lineno) or "").encode()[: statement.col_offset]
    between = "; " if before.strip() else "\n" + before.decode()
    return (
        SourceEdit(
            span=end_of(span_of(statement, span.file)),
            replacement=f"{between}{name} = {lax}.{function}({name}, {arguments})",
            imports=imports,
        ),
    )


def divide_by_sizes(span: Span, axes: tuple[str, ...], tree: str = "") -> Edits:
    """The edits that divide an expression by the number of devices along some mesh axes.

    Arguments:
      span: the expression.
      axes: the mesh axes.
      tree: the source text of a pytree whose leaves are divided in place of the expression.
    """
    lax, imports = lax_in(span.file)
    sizes = sizes_text(axes, lax)
    by = sizes if len(axes) == 1 else f"({sizes})"
    if tree:
        return (
            SourceEdit(
                span=span,
                replacement=f"jax.tree.map(lambda g: g / {by}, {tree})",
                imports=(*imports, "import jax"),
            ),
        )
    return (
        SourceEdit(span=start_of(span), replacement="(", imports=imports),
        SourceEdit(span=end_of(span), replacement=f" / {by})"),
    )


def in_order(edits: Iterable[SourceEdit]) -> Edits:
    """Edits in source order, each once; an insertion comes before a deletion at the same place."""
    return tuple(
        sorted(
            dict.fromkeys(edits),
            key=lambda e: (e.span.file, start_of(e.span), e.span != start_of(e.span)),
        )
    )


def axes_text(axes: tuple[str, ...]) -> str:
    """Mesh axes as source text.

    >>> axes_text(("data",)), axes_text(("data", "model"))
    ('"data"', '("data", "model")')
    """
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def sizes_text(axes: tuple[str, ...], lax: str = "lax") -> str:
    """The number of devices along mesh axes, as source text.

    >>> sizes_text(("data", "model"))
    'lax.axis_size("data") * lax.axis_size("model")'
    """
    return " * ".join(f'{lax}.axis_size("{axis}")' for axis in axes)
