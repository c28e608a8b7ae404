"""Writes a program in another way: the same equations from another source text.

`respelled` takes the text of a module and returns that of a module whose functions trace alike.
`load` runs a text as a module whose lines Python's `linecache` knows, so that equations have the
positions that they would have in a file.
"""

import ast
import copy
import io
import itertools
import linecache
import sys
import tokenize
import types
from collections.abc import Callable, Iterator

Statements = list[ast.stmt]


def respelled(source: str, style: str) -> str:
    """The text of a module in another style, one of `STYLES`."""
    return STYLES[style](ast.parse(source))


def load(name: str, source: str) -> types.ModuleType:
    """Runs a text as the module `name`."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    exec(compile(source, file, "exec"), module.__dict__)
    return module


# ---- a name for each subexpression --------------------------------------------------------------


class _Namer:
    """Names subexpressions in the order in which Python computes them.

    Arguments:
      wanted: whether an expression gets a name.
    """

    def __init__(self, wanted: Callable[[ast.expr], bool]) -> None:
        self.wanted = wanted
        self.fresh = (f"t{i}" for i in itertools.count())
        self.before: Statements = []

    def body(self, statements: Statements) -> Statements:
        found: Statements = []
        for statement in statements:
            outer, self.before = self.before, []
            made = self.statement(statement)
            found += [*self.before, made]
            self.before = outer
        return found

    def statement(self, s: ast.stmt) -> ast.stmt:
        match s:
            case ast.FunctionDef():
                s.body = self.body(s.body)
            case ast.Return(value=ast.expr() as value) | ast.Assign(value=value):
                s.value = self.parts(value)
            case ast.Expr(value=ast.Call()):
                s.value = self.parts(s.value)
            case ast.For():
                s.iter, s.body = self.parts(s.iter), self.body(s.body)
            case ast.If():
                s.test, s.body, s.orelse = (
                    self.parts(s.test),
                    self.body(s.body),
                    self.body(s.orelse),
                )
            case _:
                pass
        return s

    def name(self, e: ast.expr) -> ast.expr:
        """An expression by its name, where it gets one; its parts first."""
        made = self.parts(e)
        if not self.wanted(made) or isinstance(made, ast.Name | ast.Starred):
            return made
        name = next(self.fresh)
        self.before.append(ast.Assign([ast.Name(name, ast.Store())], made))
        return ast.Name(name, ast.Load())

    def parts(self, e: ast.expr) -> ast.expr:
        """An expression with names for its parts."""
        match e:
            case ast.BinOp():
                e.left, e.right = self.name(e.left), self.name(e.right)
            case ast.UnaryOp():
                e.operand = self.name(e.operand)
            case ast.Compare(comparators=[right]):
                e.left, e.comparators = self.name(e.left), [self.name(right)]
            case ast.Call():
                e.func = self.function(e.func)
                e.args = [self.name(a) for a in e.args]
                for keyword in e.keywords:
                    keyword.value = self.name(keyword.value)
            case ast.Attribute():
                e.value = self.name(e.value) if not _is_path(e.value) else e.value
            case ast.Subscript():
                e.value = self.name(e.value)
            case ast.Tuple() | ast.List():
                e.elts = [self.name(x) for x in e.elts]
            case ast.Dict():
                e.values = [self.name(x) for x in e.values]
            case ast.Starred():
                e.value = self.name(e.value)
            case ast.Lambda():
                return self.function_of(e)
            case _:
                pass
        return e

    def function(self, func: ast.expr) -> ast.expr:
        if isinstance(func, ast.Attribute) and not _is_path(func.value):
            func.value = self.name(func.value)
        return self.parts(func) if isinstance(func, ast.Call | ast.Lambda) else func

    def function_of(self, e: ast.Lambda) -> ast.expr:
        """A lambda as a function with a name."""
        name = f"of_{next(self.fresh)}"
        made = ast.FunctionDef(name, e.args, self.body([ast.Return(e.body)]), [])
        self.before.append(made)
        return ast.Name(name, ast.Load())


def _is_path(e: ast.expr) -> bool:
    """Whether an expression is a name with dots, such as `jax.nn`."""
    return isinstance(e, ast.Name) or (isinstance(e, ast.Attribute) and _is_path(e.value))


def _is_count(e: ast.expr) -> bool:
    """Whether an expression is a number as it is written, a size, or a number of devices."""
    match e:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.Call(func=ast.Attribute(attr="axis_size")) | ast.Attribute(attr="size"):
            return True
        case ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
        case _:
            return False


def named(tree: ast.Module) -> str:
    """A name for each subexpression."""
    tree.body = _Namer(lambda e: not isinstance(e, ast.Constant)).body(tree.body)
    return ast.unparse(ast.fix_missing_locations(tree))


def counts_named(tree: ast.Module) -> str:
    """Numbers, sizes and numbers of devices get a name on the line before."""
    tree.body = _Namer(_is_count).body(tree.body)
    return ast.unparse(ast.fix_missing_locations(tree))


# ---- code in helpers ----------------------------------------------------------------------------


class _Moved(ast.NodeTransformer):
    """Each function calls an inner one that has its body."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if any(isinstance(n, ast.Yield | ast.Nonlocal) for n in ast.walk(node)):
            return node
        inner = ast.FunctionDef("moved", copy.deepcopy(node.args), node.body, [])
        inner.args.defaults, inner.args.kw_defaults = [], [None] * len(node.args.kwonlyargs)
        given = [ast.Name(a.arg, ast.Load()) for a in (*node.args.posonlyargs, *node.args.args)]
        starred = node.args.vararg
        rest = [ast.Starred(ast.Name(starred.arg, ast.Load()), ast.Load())] if starred else []
        keywords = [ast.keyword(a.arg, ast.Name(a.arg, ast.Load())) for a in node.args.kwonlyargs]
        call = ast.Call(ast.Name("moved", ast.Load()), [*given, *rest], keywords)
        node.body = [inner, ast.Return(call)]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node


class _Operators(ast.NodeTransformer):
    """Each arithmetic operation is a function of its own."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        operands = [ast.Name("left", ast.Load()), ast.Name("right", ast.Load())]
        arguments = ast.arguments([], [ast.arg("left"), ast.arg("right")], None, [], [], None, [])
        return ast.Call(
            ast.Lambda(arguments, ast.BinOp(operands[0], node.op, operands[1])),
            [node.left, node.right],
            [],
        )

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node


class _Shared(_Operators):
    """Each kind of arithmetic operation is one function of the module."""

    def __init__(self) -> None:
        self.used: dict[str, ast.operator] = {}

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = f"shared_{type(node.op).__name__.lower()}"
        self.used[name] = node.op
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])


def shared(tree: ast.Module) -> str:
    """Each kind of arithmetic operation in one helper: all divisions are on one line."""
    visitor = _Shared()
    text = ast.unparse(ast.fix_missing_locations(visitor.visit(tree)))
    operands = ast.Name("left", ast.Load()), ast.Name("right", ast.Load())
    helpers = [
        f"def {name}(left, right): return {ast.unparse(ast.BinOp(operands[0], op, operands[1]))}\n"
        for name, op in visitor.used.items()
    ]
    return "".join(helpers) + text


def moved(tree: ast.Module) -> str:
    """The body of each function in a helper."""
    return ast.unparse(ast.fix_missing_locations(_Moved().visit(tree)))


def operators(tree: ast.Module) -> str:
    """Each arithmetic operation in a helper of its own."""
    return ast.unparse(ast.fix_missing_locations(_Operators().visit(tree)))


# ---- line breaks --------------------------------------------------------------------------------


def one_line(tree: ast.Module) -> str:
    """The simple statements of a body on one line."""
    return "\n".join(_joined(tree.body, "")) + "\n"


def _joined(statements: Statements, indent: str) -> Iterator[str]:
    line: list[str] = []
    for s in statements:
        text = ast.unparse(s)
        if isinstance(s, ast.FunctionDef | ast.For | ast.If) and not getattr(s, "orelse", None):
            if line:
                yield indent + "; ".join(line)
            line = []
            yield from (indent + d for d in _head(s))
            yield from _joined(s.body, indent + "    ")
        elif "\n" in text:
            if line:
                yield indent + "; ".join(line)
            line = []
            yield from (indent + part for part in text.splitlines())
        else:
            line.append(text)
    if line:
        yield indent + "; ".join(line)


def _head(s: ast.FunctionDef | ast.For | ast.If) -> list[str]:
    """The lines of a compound statement before its body."""
    empty = copy.copy(s)
    empty.body = [ast.Pass()]
    return ast.unparse(empty).splitlines()[:-1]


def many_lines(tree: ast.Module) -> str:
    """A new line after every sign inside of brackets."""
    text = ast.unparse(_Bracketed().visit(tree)).replace(_OPEN, "(").replace(_CLOSE, ")")
    starts = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    pieces: list[str] = []
    depth, end, strings = 0, 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        start = starts[token.start[0] - 1] + token.start[1]
        pieces += [text[end:start], token.string]
        end = start + len(token.string)
        # From Python 3.12 on the parts of an f-string are tokens, between which no line may end.
        name = tokenize.tok_name[token.type]
        strings += (name == "FSTRING_START") - (name == "FSTRING_END")
        if token.type == tokenize.OP and not strings:
            depth += (token.string in "([{") - (token.string in ")]}")
            pieces.append("\n" if depth else "")
    return "".join(pieces)


_OPEN, _CLOSE = "bracketed_(", ", bracketed_)"


class _Bracketed(ast.NodeTransformer):
    """What is returned or assigned, in a call that stands for brackets."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(self.bracketed(node.value)) if node.value else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        return ast.Assign(node.targets, self.bracketed(node.value), lineno=node.lineno)

    def bracketed(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Tuple) and any(isinstance(e, ast.Starred) for e in value.elts):
            return value
        name = ast.Name("bracketed_", ast.Load())
        return ast.Call(name, [value, name], [])


STYLES: dict[str, Callable[[ast.Module], str]] = {
    style.__name__: style for style in (named, counts_named, moved, operators, one_line, many_lines)
}
"""The ways to write a program."""
