"""The lock: cases that the gate does not repeat, because nothing that they depend on has changed.

`tests/lock.txt` has a hash for each primitive and for each locked test module, from the last deep
run in which their cases passed. The hash of a primitive covers the modules of its rule with all
that they import (kernels, oracle, theorems), and the tests of laws. The hash of a test module
covers its imports and the files of its folder except other tests. Docstrings and comments of the
package do not count. Both hashes cover the versions of Python, JAX, NumPy, Z3, Flax and Optax.
`make deep` ignores the lock, and its stage `locked` writes it.
"""

import ast
import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("lock.txt")
LAWS = tuple(
    ROOT / "tests" / "signatures" / f"test_{name}.py" for name in ("laws", "complete", "proofs")
)
"""Modules with laws."""
OF_PRIMITIVES = ("test_rows_hold", "test_no_row_is_missing", "test_no_theorem_of_a_row_is_refuted")
"""Their tests that have a case for each primitive."""
MODULES = (
    "tests/gallery/test_gallery.py",
    "tests/handwritten/test_manual.py",
    "tests/shardmap/test_alone.py",
    "tests/shardmap/test_practice.py",
    "tests/shardmap/test_wrong.py",
)
"""Tests that are locked as a whole: the gallery, and programs written by hand."""
TESTS = (*(path.relative_to(ROOT).as_posix() for path in LAWS), *MODULES)
"""All that is locked."""
REGISTRY = ("sbp.signatures", "sbp.signatures.families")
"""They import all rules; a test that asks them for a rule by its name needs that rule only."""


def key(node: str) -> str | None:
    """What a case is locked by: a primitive or its test module; None where it always runs."""
    file, _, test = node.partition("::")
    if file in MODULES:
        return file
    name, _, case = test.partition("[")
    primitive = case.removesuffix("]")
    return primitive if name in OF_PRIMITIVES and primitive in primitives() else None


def current() -> dict[str, str]:
    """The hashes of this checkout."""
    return {name: of_primitive(name) for name in primitives()} | {m: of_tests(m) for m in MODULES}


def read() -> dict[str, str]:
    """The hashes of the file."""
    return dict(line.rsplit(" ", 1) for line in FILE.read_text("utf-8").splitlines())


def write() -> None:
    """Writes the hashes of this checkout to the file."""
    FILE.write_text("".join(f"{name} {found}\n" for name, found in sorted(current().items())))


def unchanged(case: str) -> bool:
    """Whether the lock has the verdict of a case."""
    name = key(case)
    return name is not None and locked().get(name) == found(name)


@cache
def locked() -> dict[str, str]:
    return read()


@cache
def found(name: str) -> str:
    return of_tests(name) if name in MODULES else of_primitive(name)


@cache
def primitives() -> frozenset[str]:
    from sbp.signatures import known_primitives

    return frozenset(known_primitives())


def of_primitive(name: str) -> str:
    """The hash of a primitive."""
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    rules = [m for m in families() if word.search(_text(_file(m)))]
    return _hash({*closure(rules, without=REGISTRY), *_laws()})


@cache
def _laws() -> frozenset[Path]:
    return frozenset().union(*(imported(path, without=REGISTRY) for path in LAWS))


def of_tests(module: str) -> str:
    """The hash of a test module."""
    return _hash(files_of(module))


def files_of(module: str) -> set[Path]:
    """What the verdict of a test module depends on: its imports, and its folder's other files."""
    path = ROOT / module
    others = (p for p in path.parent.rglob("*") if p.is_file() and p.suffix != ".pyc")
    return {*imported(path), *(p for p in others if not p.match("test_*.py"))}


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("sbp")


@cache
def families() -> tuple[str, ...]:
    """The modules with rules, and the modules of signatures that these import."""
    package = "sbp.signatures.families"
    found = graph().find_descendants(package) | graph().find_upstream_modules(package, True)
    return tuple(sorted(m for m in found if m.startswith("sbp.signatures.")))


def closure(modules: Iterable[str], without: Collection[str] = ()) -> set[Path]:
    """The files of modules and of all that they import, without some modules."""
    found = set(without)
    todo = list(modules)
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += _direct(name)
    # A package's own module runs when one of its modules is imported.
    packages = {m.rpartition(".")[0] for m in found} - {"", "sbp"}
    return {_file(module) for module in packages | found.difference(without)}


@cache
def _direct(module: str) -> frozenset[str]:
    return frozenset(graph().find_modules_directly_imported_by(module))


@cache
def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(path: Path, without: Collection[str] = ()) -> frozenset[Path]:
    """The files that a file of the tests imports, itself and the package's included."""
    found: set[Path] = set()
    names: set[str] = set()
    todo = [path, path.parent / "conftest.py", ROOT / "tests" / "conftest.py"]
    while todo:
        file = todo.pop()
        if file in found or not file.exists():
            continue
        found.add(file)
        for name in _imports(file):
            if name.split(".")[0] == "sbp":
                names.add(name if name in graph().modules else name.rpartition(".")[0])
            else:
                outer = name.rpartition(".")[0] or name
                todo += [_file(name), _file(outer), file.parent / f"{outer}.py"]
    return frozenset(found | closure(names, without))


@cache
def _imports(file: Path) -> frozenset[str]:
    """The names that a file imports, of modules and of what is in them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(_text(file))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


@cache
def _text(path: Path) -> str:
    return path.read_text("utf-8")


def _hash(files: set[Path]) -> str:
    whole = hashlib.sha256(" ".join(versions()).encode())
    for path in sorted(files):
        whole.update(digest(path))
    return whole.hexdigest()[:16]


@cache
def digest(path: Path) -> bytes:
    name, content = str(path.relative_to(ROOT)), path.read_bytes()
    if name.startswith("sbp/") and path.suffix == ".py":
        content = code(content)
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def code(source: bytes) -> bytes:
    """A module without docstrings, comments and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [
                one
                for one in body
                if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
    return ast.dump(tree).encode()


@cache
def versions() -> tuple[str, ...]:
    """Of what the verdicts depend on outside of the checkout."""
    packages = {"jax", "jaxlib", "numpy", "z3-solver", "ml_dtypes", "flax", "optax"}
    found = {d.name: d.version for d in importlib.metadata.distributions() if d.name in packages}
    return platform.python_version(), *(f"{name} {found[name]}" for name in sorted(found))
