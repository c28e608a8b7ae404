"""The tuning constants of modules, and the rows of their table in `docs/constants.md`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "constants.md"

NOT_TUNED: Mapping[str, str] = {
    "sbp/machine/": "figures of hardware, each with its source beside it",
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
    for row in page.splitlines():
        file = ""
        for name in re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", row.rpartition(" | ")[2] or row):
            if name.startswith("test_"):
                yield file, name
            else:
                file = name


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
    match value:
        case bool():
            return False
        case int() | float():
            return True
        case tuple() | dict() if value:
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            return all(map(_is_numeric, inner))
        case _:
            return False
