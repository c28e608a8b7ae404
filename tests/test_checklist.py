"""docs/checklist.md names tests that are there, and every mechanism once."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "checklist.md"

SIZES = {"G": 17, "A": 4, "S": 4, "P": 9, "T": 7, "R": 4, "M": 12, "E": 6, "C": 7}
"""Rows of each part: 70."""


def rows() -> list[list[str]]:
    """The cells of each row of the tables: id, mechanism, source, tests, weaker."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "id"]


@cache
def functions_of(path: str) -> frozenset[str]:
    """The test functions of a module."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_mechanism_has_one_row():
    wanted = [f"{part}{n}" for part, count in SIZES.items() for n in range(1, count + 1)]
    assert len(wanted) == 70
    assert [row[0] for row in rows()] == wanted
    assert all(len(row) == 5 and row[1] and row[2] and row[3] for row in rows())


def test_the_tests_that_are_named_exist():
    gone = []
    for row in rows():
        if row[3] == "not built":
            assert row[4], f"{row[0]} does not say what is missing"
            continue
        for named in row[3].split(", "):
            path, _, name = named.strip("`").partition("::")
            if not (ROOT / path).is_file() or name not in functions_of(path):
                gone.append(f"{row[0]}: {named}")
    assert not gone, "\n".join(gone)
