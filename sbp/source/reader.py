"""The names and expressions of the user, read from the source text at a span: also the names that a
file has for `sbp` and its functions, and the tensors that annotations name."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from dataclasses import dataclass

from jax import lax

from sbp.errors import Span
from sbp.limits import policies_in
from sbp.source.text import (
    Targets,
    exact_text,
    file_text,
    parsed_file,
    position_at,
    span_of,
)
from sbp.trace.graph import Node
from sbp.trace.scopes import scope_names


def names_at(span: Span | None) -> Targets:
    """The names that the expression at a span is assigned to; empty when it is not."""
    return () if span is None else parsed_file(span.file).assigned.get(position_at(span), ())


def expression_at(span: Span | None) -> tuple[ast.expr | None, str]:
    """The expression at a span and the name it is assigned to."""
    if span is None:
        return None, ""
    found = parsed_file(span.file).expressions.get(position_at(span))
    match names_at(span):
        case ((name,),):
            return found, name
        case _:
            return found, ""


def name_called(part: ast.expr | None) -> str:
    """The name of the function that an expression calls, without its module; empty when it is no
    call."""
    match part:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return ""


def source_text(span: Span | None, limit: int = 60) -> str:
    """The source text at a span on one line; empty when there is none."""
    if span is None:
        return ""
    return shorten(" ".join(exact_text(span).split()), limit)


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters; dots stand for the rest.

    >>> shorten("x" * 50, 44) == "x" * 41 + " .."
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


def first_argument(node: Node) -> SourceRead | None:
    """The first argument of the call at a node; None when its line is no call."""
    span = users_span(node)
    match expression_at(span)[0]:
        case ast.Call(args=[first, *_]) if span is not None:
            return read_of(first, span.file)
        case _:
            return None


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


# ---- names of sbp --------------------------------------------------------------------------------


ANNOTATIONS = frozenset({"annotate", "split", "replicate", "shard", "partial"})
"""Functions of sbp that pin their first argument."""


LIBRARIES = frozenset({"jax", "functools", "equinox", "flax", "optax", "chex", "haiku", "builtins"})
"""Modules with functions that call their arguments, such as `jax.tree.map`."""


@dataclass(frozen=True, slots=True)
class SbpNames:
    """The names that a file has for `sbp` and its functions.

    Arguments:
      module: the name of the package, `sbp` or an alias.
      functions: by name in the file, the function of sbp that it imports.
      others: by name in the file, the module that the name is imported from; empty for a name that
          the file defines.
      imports: the statements that an edit needs which names the package.
    """

    module: str
    functions: dict[str, str]
    others: dict[str, str]
    imports: tuple[str, ...]

    def function(self, func: ast.expr) -> str:
        """The function of sbp that an expression names; empty when it names another one.

        A notebook cell may use names that another cell imports. In a cell, `sbp.split` and `split`
        count as sbp's, unless the cell defines these names.
        """
        match func:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                return name if module in (self.module, "sbp") else ""
            case ast.Name(id=name) if name in self.functions:
                return self.functions[name]
            case ast.Name(id=name) if name in ANNOTATIONS and name not in self.others:
                return name
            case _:
                return ""

    def of_library(self, func: ast.expr) -> bool:
        """Whether an expression names a function of `LIBRARIES`."""
        root = func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        name = root.id if isinstance(root, ast.Name) else ""
        home = self.others.get(name, {"map": "builtins"}.get(name, name))
        return home.partition(".")[0] in LIBRARIES


def names_of_sbp(file: str) -> SbpNames:
    """The names that a file has for `sbp` and its functions."""
    return _names(file_text(file), file)


@functools.lru_cache(maxsize=64)
def _names(text: str, file: str) -> SbpNames:  # the text is part of the key: files change
    module, functions, others = "", dict[str, str](), dict[str, str]()
    source = parsed_file(file)
    for node in ast.walk(source.tree) if source.tree else ():
        outside = not any(
            isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for p in source.around(node)
        )
        match node:
            case ast.Import(names=names):
                for alias in names:
                    name = alias.asname or alias.name.split(".")[0]
                    if alias.name == "sbp" and outside:
                        module = name
                    elif alias.name != "sbp":
                        others[name] = alias.name
            case ast.ImportFrom(module=whence, names=names):
                for alias in names:
                    if whence == "sbp" or (whence or "").startswith("sbp."):
                        functions[alias.asname or alias.name] = alias.name
                    else:
                        others[alias.asname or alias.name] = whence or ""
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if outside:
                    others[name] = ""
            case _:
                pass
    return SbpNames(module or "sbp", functions, others, () if module else ("import sbp",))


# ---- annotations --------------------------------------------------------------------------------


def annotation_span(node: Node) -> Span | None:
    """The user's line that annotates. Where a function of the user only annotates its argument, it
    is the line that calls this function."""
    for span, caller in itertools.pairwise(node.stack):
        parameters = _wrappers(file_text(span.file), span.file).get(
            (span.line, span.column - 1), ()
        )
        if not (annotated_text(span) in parameters and _calls(caller, span.function)):
            return span
    return node.stack[-1] if node.stack else node.span


@functools.cache
def _wrappers(text: str, file: str) -> dict[tuple[int, int], frozenset[str]]:
    """The functions of a source text whose body is one `return`: by the position (line, column) of
    the returned expression, the parameters of the function."""
    found: dict[tuple[int, int], frozenset[str]] = {}
    tree = parsed_file(file).tree if text else None
    for node in ast.walk(tree) if tree is not None else ():
        match node:
            case (
                ast.FunctionDef(
                    args=arguments,
                    body=[ast.Return(value=ast.expr() as value)]
                    | [ast.Expr(), ast.Return(value=ast.expr() as value)],
                )
                | ast.Lambda(args=arguments, body=value)
            ):
                names = frozenset(a.arg for a in (*arguments.posonlyargs, *arguments.args))
                found[value.lineno, value.col_offset] = names
            case _:
                pass
    return found


def _calls(caller: Span, function: str) -> bool:
    """Whether the caller's expression is a call of a function of this name; a lambda may have any
    name."""
    call, name = _call_at(caller), function.rsplit(".", 1)[-1]
    if call is not None and isinstance(call.func, ast.Name) and name == "<lambda>":
        return True
    return name_called(call) == name


def annotated_text(span: Span) -> str:
    """The source of a call's first argument, such as `x` of `sbp.split(x, 0, "data")`; empty when
    the span is no call."""
    call = _call_at(span)
    return ast.unparse(call.args[0]) if call is not None and call.args else ""


def _call_at(span: Span) -> ast.Call | None:
    """The call at a span, also of a text that does not parse as a whole."""
    try:
        found = ast.parse(expression_text(span), mode="eval").body
    except SyntaxError:
        return None
    return found if isinstance(found, ast.Call) else None
