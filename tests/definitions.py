"""Fingerprints of functions: what a function of the package says, and the definitions it refers to.

The *fingerprint* of a function covers its code, the constants, classes and imports that the code
names, and everything that these name in turn. It does not cover the functions that it calls: each
function that runs has a fingerprint of its own. The fingerprint of a module covers the statements
that act when it is imported, such as the registration of a rule. Docstrings, comments, annotations
of types and the order of definitions do not count.
"""

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST_FILES = sorted(p for f in ("tests", "examples") for p in (ROOT / f).rglob("test_*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = tuple[str, str]
"""The file of a module and a name that it defines."""


class Module:
    """The definitions of one source file.

    Arguments:
      path: relative to the checkout.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.functions: dict[str, list[ast.AST]] = defaultdict(list)
        """By qualified name; a property and its setter share one."""
        self.names: dict[str, list[ast.AST]] = defaultdict(list)
        """The statements that define each name of the module."""
        self.imports: dict[str, tuple[str, str]] = {}
        """For each imported name, its module and its name there."""
        self.effects: list[ast.AST] = []
        """What acts when the module is imported."""
        body = tree(path).body
        for name, node in functions(body):
            self.functions[name].append(node)
            self.effects += [d for d in node.decorator_list if isinstance(d, ast.Call)]
        for node in statements(body):
            if isinstance(node, ast.ClassDef):
                self.names[node.name].append(_outline(node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports |= _imported(node)
            elif targets := _targets(node):
                for target in targets:
                    self.names[target].append(node)
            elif not isinstance(node, Function):
                self.effects.append(_outline(node))

    def find(self, name: str) -> Definition | None:
        """Where a name of the module is defined: a file of the package, or another module."""
        if name in self.names:
            return self.path, name
        if name not in self.imports:
            return None
        place, original = self.imports[name]
        return _file(place) or place, original


@cache
def tree(path: str) -> ast.Module:
    """The syntax tree of a file, without docstrings."""
    found = ast.parse((ROOT / path).read_text("utf-8"))
    for node in ast.walk(found):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [each for each in body if not is_docstring(each)] or [ast.Pass()]
    return found


def functions(body: list[ast.stmt], outer: str = "") -> Iterator[tuple[str, Function]]:
    """The functions of a module and of its classes, by qualified name."""
    for node in statements(body):
        if isinstance(node, Function):
            yield outer + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{outer}{node.name}.")


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those inside of `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            handlers = [each for h in getattr(node, "handlers", []) for each in h.body]
            yield from statements([*node.body, *handlers, *getattr(node, "orelse", [])])


def fingerprint(path: str, function: str) -> bytes:
    """Of a function, by the file of its module and its qualified name; of the module itself where
    the name is empty."""
    module = parsed(path)
    nodes = module.functions.get(function, []) if function else module.effects
    own = [ast.dump(node) for node in nodes] if nodes or not function else ["absent"]
    found = _found(module, nodes)
    if "." in function and (place := module.find(function.split(".")[0])):
        found.add(place)
    return _hash([*own, *_texts(found)])


def references(path: str) -> bytes:
    """The fingerprint of everything of the package that a file refers to."""
    return _hash(_texts(_found(parsed(path), [tree(path)])))


@cache
def parsed(path: str) -> Module:
    return Module(path)


def _texts(todo: set[Definition]) -> list[str]:
    """The definitions and all that they refer to."""
    done: set[Definition] = set()
    todo = set(todo)
    while todo:
        place = todo.pop()
        if place not in done:
            done.add(place)
            todo |= _definition(*place)[1]
    return sorted(f"{path}:{name} {_definition(path, name)[0]}" for path, name in done)


@cache
def _definition(path: str, name: str) -> tuple[str, frozenset[Definition]]:
    """The text of a definition, and the definitions to which it refers."""
    if not path.endswith(".py"):  # a module outside of the package
        return "", frozenset()
    module = parsed(path)
    if name not in module.names:
        place = module.find(name)
        return "", frozenset([place] if place and place != (path, name) else [])
    nodes = module.names[name]
    return " ".join(map(ast.dump, nodes)), frozenset(_found(module, nodes))


def _found(module: Module, nodes: list[ast.AST]) -> set[Definition]:
    """The definitions of the package to which nodes of a module refer."""
    found: set[Definition | None] = set()
    for node in (each for root in nodes for each in _walk(root)):
        if isinstance(node, ast.Name):
            found.add(module.find(node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            place, name = module.imports.get(node.value.id, ("", ""))
            for outer in (place, f"{place}.{name}"):
                if file := _file(outer):
                    found.add((file, node.attr))
        elif isinstance(node, ast.ImportFrom):
            found |= {
                (file, name) for place, name in _imported(node).values() if (file := _file(place))
            }
    return {place for place in found if place is not None}


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree without annotations of types."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _walk(each)


def _outline(node: ast.stmt) -> ast.stmt:
    """A statement without the bodies of the functions in it."""
    copy = ast.parse(ast.unparse(node)).body[0]
    for each in ast.walk(copy):
        if isinstance(each, Function):
            each.body = [ast.Pass()]
    return copy


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str]]:
    place = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    return {alias.asname or alias.name: (place or alias.name, alias.name) for alias in node.names}


def _targets(node: ast.stmt) -> list[str]:
    """The names that an assignment defines; none for other statements."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    every = [t for target in targets for t in getattr(target, "elts", [target])]
    return [t.id for t in every if isinstance(t, ast.Name)]


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is only a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def _file(module: str) -> str | None:
    """The file of a module of the package."""
    if module.split(".")[0] != "sbp":
        return None
    path = module.replace(".", "/")
    names = (f"{path}.py", f"{path}/__init__.py")
    return next((name for name in names if (ROOT / name).exists()), None)


def _hash(texts: list[str]) -> bytes:
    return hashlib.sha256("\n".join(texts).encode()).digest()[:8]
