"""The rules that keep the shape of the package, each a function from syntax trees to violations.

A violation is a sentence that names the file with its line, and what to change there.
`tests/test_house.py` runs the rules on `sbp/`.
"""

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import grimp

from sbp.signatures import REFUSED, known_primitives
from sbp.signatures.rule import FALLBACK, names

ROOT = Path(__file__).parents[1]

MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
MAX_MODULE_LINES = 700


@dataclass(frozen=True, slots=True)
class Module:
    """A source file, read and parsed.

    Arguments:
      path: relative to the checkout, with forward slashes.
      source: its text.
      tree: its syntax tree.
    """

    path: str
    source: str
    tree: ast.Module


def module(path: str, source: str) -> Module:
    """A module from its text."""
    return Module(path, source, ast.parse(source))


def package(folder: Path = ROOT / "sbp") -> tuple[Module, ...]:
    """All modules below a folder, sorted by path."""
    return tuple(
        module(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
        for path in sorted(folder.rglob("*.py"))
    )


Rule = Callable[[tuple[Module, ...]], Iterator[str]]


def of_each(rule: Callable[[Module], Iterator[str]]) -> Rule:
    """A rule of all modules that looks at each of them by itself."""
    return wraps(rule)(lambda modules: itertools.chain.from_iterable(map(rule, modules)))


# ---- size ---------------------------------------------------------------------------------------

LONG: Mapping[str, str] = {
    "sbp/api/jit.py: jit": "documents the parameters of `sbp.jit`",
    "sbp/signatures/custom.py: register": "documents the parameters of `register`",
}
"""Functions that may have more lines, each with its reason: public signatures."""

WIDE: Mapping[str, str] = {
    "sbp/api/jit.py: jit": "the public signature of `sbp.jit`",
}
"""Functions that may have more than six parameters, each with its reason."""


@of_each
def functions_are_short(m: Module) -> Iterator[str]:
    """Functions have at most `MAX_FUNCTION_LINES` lines, their docstrings included."""
    for name, node in _functions(m.tree):
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES and f"{m.path}: {name}" not in LONG:
            yield (
                f"{m.path}:{node.lineno}: `{name}` has {lines} lines, at most"
                f" {MAX_FUNCTION_LINES}: split it into functions with names"
            )


@of_each
def parameters_are_few(m: Module) -> Iterator[str]:
    """Functions have at most six parameters, `self` and `cls` not counted."""
    for name, node in _functions(m.tree):
        a = node.args
        every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        count = sum(p is not None and p.arg not in ("self", "cls") for p in every)
        if count > MAX_PARAMETERS and f"{m.path}: {name}" not in WIDE:
            yield (
                f"{m.path}:{node.lineno}: `{name}` has {count} parameters, at most"
                f" {MAX_PARAMETERS}: put related parameters into a frozen dataclass"
            )


@of_each
def modules_are_short(m: Module) -> Iterator[str]:
    """Modules have at most `MAX_MODULE_LINES` lines."""
    lines = m.source.count("\n")
    if lines > MAX_MODULE_LINES:
        yield f"{m.path}: {lines} lines, at most {MAX_MODULE_LINES}: split the module"


def _functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions(node, f"{prefix}{node.name}." if named else prefix)


def counts_equal_limits(
    counts: Mapping[str, int], limits: Mapping[str, tuple[int, str]]
) -> Iterator[str]:
    """Folders have as many statements as `tests/statements.txt` says."""
    for folder in sorted(counts.keys() | limits.keys()):
        more = counts.get(folder, 0) - limits.get(folder, (0, ""))[0]
        if more > 0:
            yield (
                f"{folder}: {more} statements too many: delete as many, or raise it in"
                " tests/statements.txt and say why in the line's reason"
            )
        elif more < 0:
            yield f"{folder}: {-more} statements fewer: run python -m benchmarks.size --write"


# ---- names --------------------------------------------------------------------------------------


def class_names_are_unique(modules: tuple[Module, ...]) -> Iterator[str]:
    """No two classes of the package have one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for m in modules:
        for node in ast.walk(m.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{m.path}:{node.lineno}")
    for name, where in places.items():
        if len(where) > 1:
            yield f"class `{name}` is defined at {' and '.join(where)}: rename all but one"


# ---- tuning constants ---------------------------------------------------------------------------


@of_each
def constants_are_in_the_table(m: Module) -> Iterator[str]:
    """The table in `docs/constants.md` has every tuning constant with its value, and no other
    row."""
    for name, here, there in differing(m.path, m.tree):
        yield (
            f"{m.path}: `{name}` is {here} here and {there} in docs/constants.md: change its"
            " row, with the test or benchmark that shows the limit"
        )


# ---- imports of examples -------------------------------------------------------------------------
# The contracts in pyproject.toml say what modules of the package may import.

PUBLIC = ("sbp", "sbp.errors", "sbp.moe")
"""What examples import of sbp: the first two, and the modules of the third."""


@of_each
def examples_import_public_names(m: Module) -> Iterator[str]:
    """Examples import of the package only what is `PUBLIC`."""
    if not m.path.startswith("examples/") or "/tests/" in m.path:
        return
    for name, line in _imported(m.tree):
        public = name in PUBLIC or name.startswith(f"{PUBLIC[-1]}.")
        if name.split(".")[0] == "sbp" and ("._" in name or not public):
            yield (
                f"{m.path}:{line}: imports `{name}`: an example uses public names: `sbp`,"
                " `sbp.errors` and the modules of `sbp.moe`"
            )


def _imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The modules that a module imports, and private names, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            private = (a.name for a in node.names if a.name.startswith("_"))
            yield from ((f"{node.module}.{name}", node.lineno) for name in private)


# ---- shown text ---------------------------------------------------------------------------------

SHOWN = frozenset(
    names("because claim detail message note notes reason said shown text title where words")
)
"""Names of attributes whose text a reader sees."""

READS = frozenset(
    names(
        "count endswith find index partition removeprefix removesuffix rfind rpartition rsplit"
        " split splitlines startswith strip lstrip rstrip isidentifier isdigit"
    )
)
"""Methods of `str` that look into a text."""


@of_each
def shown_text_is_not_read(m: Module) -> Iterator[str]:
    """No code looks into a text that is shown: into an attribute named as in `SHOWN`."""
    for node in ast.walk(m.tree):
        attribute = _reads_shown(node)
        if attribute is not None:
            code = " ".join(ast.unparse(node).split())[:60]
            yield (
                f"{m.path}:{getattr(node, 'lineno', 0)}: `{code}` looks into `.{attribute}`,"
                " which is shown: make the fact a field where the text is made, and read that"
            )


def _reads_shown(node: ast.AST) -> str | None:
    """The attribute whose text an expression looks into, or None."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=args):
            return next(filter(None, map(_shown, args)), None)
        case ast.Call(func=ast.Attribute(value=receiver, attr=method)) if method in READS:
            return _shown(receiver)
        case ast.Subscript(value=value, slice=ast.Slice()):
            return _shown(value)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for op, right in zip(ops, comparators, strict=True):
                if isinstance(op, ast.In | ast.NotIn) and _shown(right):
                    return _shown(right)
                if isinstance(op, ast.Eq | ast.NotEq) and isinstance(right, ast.Constant):
                    return _shown(left) if right.value else None
        case _:
            pass
    return None


def _shown(node: ast.expr) -> str | None:
    """The name of the attribute in `SHOWN` that an expression is, or is made from."""
    match node:
        case ast.Attribute(attr=attr) if attr in SHOWN:
            return attr
        case ast.Call(func=ast.Attribute(value=receiver, attr=attr)):
            return attr if attr in SHOWN else _shown(receiver)
        case ast.Subscript(value=value):
            return _shown(value)
        case _:
            return None


# ---- JAX's names --------------------------------------------------------------------------------

REGION_PARAMETERS = frozenset(
    names("num_carry num_consts cond_nconsts body_nconsts cond_jaxpr body_jaxpr branches")
)
REGION_READERS = (
    "sbp/_jax.py",
    "sbp/trace/",
    "sbp/plan/verify.py",
)  # the last one: on purpose, so that it does not share a mistake


@of_each
def regions_are_read_in_trace(m: Module) -> Iterator[str]:
    """The parameters of `scan`, `while` and `cond` are read in `_jax`, `trace/` and the plan's
    verifier only."""
    if m.path.startswith(REGION_READERS):
        return
    for node in ast.walk(m.tree):
        if isinstance(node, ast.Constant) and node.value in REGION_PARAMETERS:
            yield (
                f"{m.path}:{node.lineno}: reads `{node.value}`: ask `sbp.trace.graph` what"
                " enters and leaves the region"
            )


PRIMITIVES = frozenset({*known_primitives(), *FALLBACK, *REFUSED})
PRIMITIVE_PLACES = (
    "sbp/_jax.py",
    "sbp/signatures/",
    "sbp/trace/",
    "sbp/plan/verify.py",  # reads the program on its own, on purpose
    "sbp/moe/",
)
OTHER_MEANINGS: Mapping[str, str] = {
    **dict.fromkeys(("max", "min", "and", "or"), "a monoid"),
    **dict.fromkeys(("all_gather", "all_to_all", "reduce_scatter", "slice"), "a boxing step"),
    "reduce": "a boxing policy",
    "pin": "the parameter of an annotation",
    "remat": "an option of `sbp.jit`",
    **dict.fromkeys(("name", "empty", "complex", "split", "check", "mul"), "an English word"),
}
"""Names of primitives that also mean something else: counted only beside an attribute `op`."""


@of_each
def primitives_are_named_in_signatures(m: Module) -> Iterator[str]:
    """Names of primitives are literals only in `signatures/`, `trace/` (with the table of
    collectives) and `_jax`."""
    if m.path.startswith(PRIMITIVE_PLACES):
        return
    beside = {
        id(constant)
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(x, ast.Attribute) and x.attr == "op" for x in ast.walk(node))
        for constant in ast.walk(node)
    }
    defined = {
        id(argument)
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Call) and "Primitive" in ast.unparse(node.func)
        for argument in node.args
    }
    for node in ast.walk(m.tree):
        if isinstance(node, ast.Constant) and id(node) not in defined:
            for name in _primitives(node, id(node) in beside):
                yield (
                    f"{m.path}:{node.lineno}: names the primitive `{name}`: give its rule in"
                    " sbp/signatures/ a trait and ask for that"
                )


def _primitives(node: ast.Constant, beside_op: bool) -> Iterator[str]:
    """The names of primitives in a literal: one name, or several with blanks between them."""
    if not isinstance(node.value, str):
        return
    words = node.value.split()
    if not words or not all(w in PRIMITIVES for w in words):
        return
    if len(words) == 1 and node.value != words[0]:
        return
    for word in words:
        if beside_op or len(words) > 1 or word not in OTHER_MEANINGS:
            yield word


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        class_names_are_unique,
        constants_are_in_the_table,
        functions_are_short,
        parameters_are_few,
        modules_are_short,
        examples_import_public_names,
        shown_text_is_not_read,
        regions_are_read_in_trace,
        primitives_are_named_in_signatures,
    )
}


# ---- constants -----------------------------------------------------------------------------------
# The tuning constants of modules, and the rows of their table in `docs/constants.md`.


PAGE = ROOT / "docs" / "constants.md"

NOT_TUNED: Mapping[str, str] = {
    "sbp/machine/": "figures of hardware, each with its source beside it",
    "sbp/plan/certificate.py: FORMAT": "the version of a file's form",
    "sbp/plan/saved.py: FORMAT": "the version of a file's form",
    **dict.fromkeys(
        (f"sbp/moe/config.py: {name}" for name in ("PAD", "BOS", "EOS", "UNK")),
        "the number of a token",
    ),
}
"""Numbers without a row in the table, each with the reason: files or folders, or `file: NAME`."""

KNOWN = {"__builtins__": {}, "tuple": tuple, "range": range}
"""The names that the value of a constant may use."""

ROW = re.compile(r"^\| `([\w.]+)` \| `(sbp/[\w/]+\.py)` \| `([^`]*)` \|", re.MULTILINE)
"""A row of the table: name, module, value."""


def constants(tree: ast.Module) -> dict[str, Any]:
    """The tuning constants of a module with their values.

    These are module-level names in upper case, and fields of classes that are named `..Limits`,
    whose value is a number, or a tuple or dict of numbers, written without other names.

    >>> constants(ast.parse("A, B = 2**20, 'b'\\nclass XLimits:\\n    most: int = 3\\nC = A + 1"))
    {'A': 1048576, 'XLimits.most': 3}
    """
    found: dict[str, Any] = {}
    for statement in tree.body:
        for name, value in _assigned(statement):
            if name == name.upper():
                found |= _numbers(name, value)
        if isinstance(statement, ast.ClassDef) and statement.name.endswith("Limits"):
            for field in statement.body:
                for name, value in _assigned(field):
                    found |= _numbers(f"{statement.name}.{name}", value)
    return found


def listed(page: str) -> dict[str, dict[str, Any]]:
    """The rows of the table: for each module, the values of its constants."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, path, value in ROW.findall(page):
        assert name not in found[path], f"docs/constants.md has two rows of {name} in {path}"
        found[path] |= _numbers(name, ast.parse(value, mode="eval").body)
    return found


def witnesses(page: str) -> Iterator[tuple[str, str]]:
    """The tests that the last column names, each with its file.

    >>> list(witnesses("| x | `tests/a.py`: `test_b`, `test_c`; not measured |"))
    [('tests/a.py', 'test_b'), ('tests/a.py', 'test_c')]
    """
    named = re.compile(r"`((?:examples/gshard/)?tests/[\w/]+\.py|test_\w+)`")
    for row in page.splitlines():
        file = ""
        for name in named.findall(row.rpartition(" | ")[2] or row):
            if name.startswith("test_"):
                yield file, name
            else:
                file = name


def has_test(named: str) -> bool:
    """Whether a test is there that `file::test` names, or one of its cases."""
    file, _, test = named.partition("::")
    path = ROOT / file
    return path.is_file() and f"def {test.split('[')[0]}(" in path.read_text("utf-8")


@cache
def table() -> dict[str, dict[str, Any]]:
    """The rows of the page."""
    return listed(PAGE.read_text("utf-8"))


def differing(path: str, tree: ast.Module) -> Iterator[tuple[str, Any, Any]]:
    """The constants of a module whose value and row differ: name, value and value in the row."""
    here, there = constants(tree), table().get(path, {})
    for name in sorted(here.keys() | there.keys()):
        if not f"{path}: {name}".startswith(tuple(NOT_TUNED)) and here.get(name) != there.get(name):
            yield name, here.get(name, "missing"), there.get(name, "missing")


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement assigns to, each with its expression."""
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            for target, value in zip(names, values, strict=True):
                if isinstance(target, ast.Name):
                    yield target.id, value
        case _:
            pass


def _numbers(name: str, value: ast.expr) -> dict[str, Any]:
    """A constant with its value; nothing where the expression is not made of numbers."""
    try:
        found = eval(compile(ast.Expression(value), "<constant>", "eval"), dict(KNOWN))
    except (NameError, TypeError):
        return {}
    return {name: found} if _is_numeric(found) else {}


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple | dict):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return bool(inner) and all(map(_is_numeric, inner))
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- picture -------------------------------------------------------------------------------------
# The picture of the house in docs/how-it-works.md, and the import graph that it shows.


def imports_by_folder() -> dict[str, frozenset[str]]:
    """For each folder or module at the top of `sbp`, the others that it imports; `sbp` itself
    stands for the public names."""
    graph = grimp.build_graph("sbp", cache_dir=None)
    found: dict[str, set[str]] = defaultdict(set)
    for name in graph.modules:
        importer = _top(name)
        found[importer] |= set(map(_top, graph.find_modules_directly_imported_by(name)))
        found[importer] -= {importer}
    return {importer: frozenset(imported) for importer, imported in found.items()}


def _top(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def arrows(imports: Mapping[str, frozenset[str]]) -> set[tuple[str, str]]:
    """The imports that no path of other imports implies (the transitive reduction)."""

    def below(name: str) -> frozenset[str]:
        return imports[name].union(*(below(n) for n in imports[name]))

    return {
        (importer, imported)
        for importer in imports
        for imported in imports[importer]
        if not any(imported in below(other) for other in imports[importer] - {imported})
    }


def pictured(page: str) -> set[tuple[str, str]]:
    """The arrows of the picture in a page."""
    picture = page.split("```mermaid\n", 1)[1].split("```", 1)[0]
    lines = [line.split(" --> ") for line in picture.splitlines() if "-->" in line]
    return {(importer.strip(), imported.strip()) for importer, imported in lines}
