"""The user's source files: their text and syntax trees, positions in them, the scopes of names, the
expression at a span, and the names that a file has for `sbp` and its functions.

This is the only module that reads source files. It uses `linecache`, which has files, notebook
cells, and texts that exist only in memory.
"""

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jax import lax

from sbp.errors import Span
from sbp.limits import policies_in
from sbp.trace.graph import Node, reached
from sbp.trace.scopes import scope_names

Targets = tuple[tuple[str, ...], ...]
"""The names on the left of an assignment: a tuple of names for each element of a tuple target, one
element for a single name."""

Position = tuple[int, int, int, int]
"""First line, first column, last line, last column as `ast` counts them: lines from 1, columns from
0 in UTF-8 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ParsedSource:
    """A source text as a syntax tree.

    Arguments:
      tree: the module, empty for a text that does not parse, such as a notebook cell with magics.
      expressions: the outermost expression at each position, without names and constants.
      assigned: the names that the expression or statement at a position is assigned to.
      parents: for each node of the tree, the node that contains it.
    """

    tree: ast.Module
    expressions: dict[Position, ast.expr] = field(default_factory=dict)
    assigned: dict[Position, Targets] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes of the tree that contain a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node


def line_text(file: str, line: int) -> str | None:
    """A line of source (counted from 1) without its newline; None when there is no source."""
    text = linecache.getline(file, line)
    return text.rstrip("\r\n") if text else None


def parsed_file(file: str) -> ParsedSource:
    """A file as a syntax tree."""
    return _parse("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ParsedSource:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ParsedSource(ast.Module([], []))
    found = ParsedSource(tree)
    for node in ast.walk(tree):
        shared = ast.expr_context | ast.operator  # one object serves many nodes
        parts = (part for part in ast.iter_child_nodes(node) if not isinstance(part, shared))
        found.parents.update(dict.fromkeys(parts, node))
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
        for node in ast.walk(source.tree)
        if isinstance(node, ast.expr | ast.stmt) and contains(span_of(node, span.file), span)
    ]
    return holding[-1] if holding else None


def statement_of(source: ParsedSource, part: ast.AST) -> ast.stmt | None:
    """The innermost statement that a part stands in."""
    return next((p for p in (part, *source.around(part)) if isinstance(p, ast.stmt)), None)


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
    """The names that a scope binds, except by imports. Functions inside it are not read."""
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
    """The names that a scope assigns. Functions inside it are not read."""

    def parts(node: ast.AST) -> Iterable[ast.AST]:
        is_scope = isinstance(node, FUNCTIONS | ast.Lambda | ast.ClassDef | COMPREHENSIONS)
        return () if is_scope and node is not scope else ast.iter_child_nodes(node)

    nodes = list(reached([scope], parts))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored.difference(*(n.names for n in nodes if isinstance(n, ast.Global | ast.Nonlocal)))


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
    return _binding(parsed_file(at.file), name, at)


@functools.lru_cache(maxsize=4096)
def _binding(source: ParsedSource, name: str, at: Span) -> VariableBinding | None:
    here = source.expressions.get(position_at(at)) or innermost(source, at)
    if here is None:
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
    if not isinstance(owner, FUNCTIONS):
        return None
    positional = [a.arg for a in (*owner.args.posonlyargs, *owner.args.args)]
    return VariableBinding(
        function=owner.name, position=positional.index(name) if name in positional else -1
    )


def _stores(source: ParsedSource, owner: ast.AST, name: str) -> list[ast.Name]:
    """Where a function or a module assigns a name, functions inside it left out."""
    return [
        part
        for part in ast.walk(owner)
        if isinstance(part, ast.Name)
        and part.id == name
        and isinstance(part.ctx, ast.Store)
        and owner
        is next(
            p
            for p in source.around(part)
            if p is owner or (isinstance(p, FUNCTIONS | ast.Lambda) and name in stored_in(p))
        )
    ]


def _is_before(source: ParsedSource, store: ast.Name, at: Span) -> bool:
    """Whether a store comes before an expression. An assignment stores at its end."""
    end = next(
        (
            part
            for part in source.around(store)
            if isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
        ),
        store,
    )
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
                if any(isinstance(e, ast.Starred) for e in elts[: elements[0]]):
                    return None  # its place depends on the length
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
    while (
        elements
        and isinstance(value, ast.Tuple | ast.List)
        and elements[0] < len(value.elts)
        and not any(isinstance(e, ast.Starred) for e in value.elts)
    ):
        value = value.elts[elements.pop(0)]
    name = value.id if isinstance(value, ast.Name) and not elements else ""
    return VariableBinding(span=span_of(value, file), name=name, whole=not elements)


# ---- expressions --------------------------------------------------------------------------------


def names_at(span: Span | None) -> Targets:
    """The names that the expression at a span is assigned to; empty when it is not."""
    return () if span is None else parsed_file(span.file).assigned.get(position_at(span), ())


def expression_at(span: Span | None) -> tuple[ast.expr | None, str]:
    """The expression at a span and the name it is assigned to."""
    if span is None:
        return None, ""
    targets = names_at(span)
    name = targets[0][0] if len(targets) == 1 == len(targets[0]) else ""
    return parsed_file(span.file).expressions.get(position_at(span)), name


def name_called(part: ast.expr | None) -> str:
    """The name of the function that an expression calls, without its module; empty when it is no
    call."""
    match part:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return ""


def keyword_of(call: ast.AST | None, name: str) -> ast.expr | None:
    """The argument that a call gives by keyword; None where it gives none, and for what is no
    call."""
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return next((k.value for k in keywords if k.arg == name), None)


def source_text(span: Span | None, limit: int = 60) -> str:
    """The source text at a span on one line; empty when there is none."""
    return "" if span is None else shorten(" ".join(exact_text(span).split()), limit)


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
    text = " ".join(exact_text(span).split())
    return text.replace("( ", "(").replace(", )", ")").replace(" )", ")")


def in_library(file: str) -> bool:
    """Whether a file belongs to an installed library, which a user does not edit.

    >>> path = "/env/lib/python3.11/site-packages/optax/_src/clipping.py"
    >>> in_library(path), in_library("train.py")
    (True, False)
    """
    path = file.replace("\\", "/")
    return "/site-packages/" in path or "/dist-packages/" in path


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
    if node.in_gradient and span:
        return f"the gradient of line {span.line}"
    phase = "backward" if node.backward else "forward"
    named = [p for p in scope_names(node.scope) if "->" not in p and not policies_in(p)]
    called = [
        s.function for s in reversed(node.stack) if s.function and not s.function.startswith("<")
    ]
    return ", ".join(filter(None, ("/".join(named or called), phase)))


# ---- names of sbp --------------------------------------------------------------------------------


ANNOTATIONS = frozenset({"annotate", "split", "replicate", "shard", "partial"})
"""Functions of sbp that pin their first argument."""


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


def names_of_sbp(file: str) -> SbpNames:
    """The names that a file has for `sbp` and its functions."""
    return _names(parsed_file(file))


@functools.lru_cache(maxsize=64)
def _names(source: ParsedSource) -> SbpNames:
    module, functions, others = "", dict[str, str](), dict[str, str]()
    for node in ast.walk(source.tree):
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
                if (whence or "").partition(".")[0] == "sbp":
                    functions.update((a.asname or a.name, a.name) for a in names)
                else:
                    others.update((a.asname or a.name, whence or "") for a in names)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if outside:
                others[name] = ""
            case _:
                pass
    return SbpNames(module or "sbp", functions, others, () if module else ("import sbp",))


# ---- annotations --------------------------------------------------------------------------------


def annotated_text(span: Span) -> str:
    """The source of a call's first argument, such as `x` of `sbp.split(x, 0, "data")`; empty when
    the span is no call."""
    call = expression_at(span)[0]
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and call.args else ""
