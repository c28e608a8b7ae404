"""The size of the package by folder, beside that of other libraries for JAX.

    python -m benchmarks.size                       # the table
    python -m benchmarks.size --write               # lowers the limits of tests/statements.txt
    python -m benchmarks.size --write --reason R    # raises them, too; R says why

A statement is one of Python's syntax tree; docstrings are not counted. `one importer` counts the
modules that exactly one other module of the package imports, `judgement` the constants of
docs/constants.md that no measurement chose, and `comments` is the share of lines with a comment.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tests" / "statements.txt"
OUTSIDE = ("examples", "tests")
OTHERS = ("equinox", "optax", "flax")


def statements(tree: ast.AST) -> int:
    """The statements of a syntax tree, strings that stand alone (docstrings) not counted."""
    texts = (
        isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
        for n in ast.walk(tree)
        if isinstance(n, ast.Expr)
    )
    return sum(isinstance(n, ast.stmt) for n in ast.walk(tree)) - sum(texts)


def folders() -> dict[str, list[Path]]:
    """The source files of each folder of `sbp/`, of `sbp` itself, of examples and of all tests."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((ROOT / "sbp").rglob("*.py")):
        found["/".join(path.relative_to(ROOT).parts[:-1][:2])].append(path)
    outside = {name: sorted((ROOT / name).rglob("*.py")) for name in OUTSIDE}
    outside["tests"] = [p for p in outside["tests"] if "jax_tests" not in p.parts]
    return dict(sorted(found.items())) | outside


def counted() -> dict[str, int]:
    """The statements of each folder."""
    return {
        folder: sum(statements(ast.parse(path.read_text("utf-8"))) for path in paths)
        for folder, paths in folders().items()
    }


def limits() -> dict[str, tuple[int, str]]:
    """The lines of `tests/statements.txt`, `folder | statements | reason of the last raise`."""
    lines = (line.split(" | ") for line in LIMITS.read_text("utf-8").splitlines())
    return {folder: (int(number), reason) for folder, number, reason in lines}


def write(reason: str = "") -> None:
    """Writes `tests/statements.txt`; refuses to raise a limit without a reason."""
    old, lines = limits(), list[str]()
    for folder, number in counted().items():
        limit, why = old.get(folder, (0, ""))
        if number > limit and not reason:
            raise SystemExit(f"{folder}: {number} statements, at most {limit}: give --reason")
        lines.append(f"{folder} | {number} | {reason if number > limit else why}\n")
    LIMITS.write_text("".join(lines), encoding="utf-8")


def _imports(tree: ast.Module, package: list[str]) -> Iterator[str]:
    """The names that a module of `package` imports, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def importers(paths: list[Path], top: Path) -> Counter[Path]:
    """How many modules import each module, packages not counted."""
    named = {".".join(p.relative_to(top).with_suffix("").parts): p for p in paths}
    counts: Counter[Path] = Counter()
    for path in paths:
        package = list(path.relative_to(top).parts[:-1])
        found = {named.get(name) for name in _imports(ast.parse(path.read_text("utf-8")), package)}
        counts.update(p for p in found - {None, path} if p and p.name != "__init__.py")
    return counts


def row(paths: list[Path], counts: Counter[Path], judgement: str) -> list[str]:
    """The columns of a folder."""
    texts = [path.read_text("utf-8") for path in paths]
    trees = [ast.parse(text) for text in texts]
    tokens = (t for text in texts for t in generate_tokens(StringIO(text).readline))
    comments = sum(t.type == COMMENT for t in tokens)
    classes = sum(isinstance(n, ast.ClassDef) for tree in trees for n in ast.walk(tree))
    share = comments / sum(text.count("\n") for text in texts)
    once = sum(counts[path] == 1 for path in paths)
    numbers = (sum(map(statements, trees)), len(paths), classes, once)
    return [*(f"{n:,}" for n in numbers), judgement, f"{share:.1%}"]


def table() -> Iterator[list[str]]:
    """The rows: folders of `sbp`, their sum, tests, and other libraries."""
    yield ["", "statements", "files", "classes", "one importer", "judgement", "comments"]
    page = (ROOT / "docs" / "constants.md").read_text("utf-8").splitlines()
    judged = [line.split("`")[3] for line in page if "chosen by judgement" in line and "`" in line]
    found = folders()
    outside = {name: found.pop(name) for name in OUTSIDE}
    package = [path for paths in found.values() for path in paths]
    counts = importers(package, ROOT)
    for name, paths in found.items():
        here = {str(path.relative_to(ROOT)) for path in paths}
        yield [name, *row(paths, counts, str(sum(path in here for path in judged)))]
    yield ["all of sbp", *row(package, counts, str(len(judged)))]
    for name, paths in outside.items():
        yield [name, *row(paths, importers(paths, ROOT), "")]
    for name in OTHERS:
        spec = find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            paths = sorted(Path(folder).rglob("*.py"))
            yield [name, *row(paths, importers(paths, Path(folder).parent), "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="lower the limits of statements")
    parser.add_argument("--reason", default="", help="why limits are raised")
    args = parser.parse_args()
    if args.write:
        write(args.reason)
    for name, *columns in table():
        print(f"{name:<18}" + "".join(f"{column:>14}" for column in columns))


if __name__ == "__main__":
    main()
