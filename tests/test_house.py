"""The package keeps its shape: names, sizes, and who may read what.

`tests/house.py` has the rules.
"""

import ast
import subprocess
from collections import defaultdict
from functools import cache

import pytest

from benchmarks import size
from tests import house
from tests.definitions import TEST_FILES
from tests.house import (
    NOT_TUNED,
    RULES,
    Module,
    arrows,
    imports_by_folder,
    listed,
    module,
    pictured,
    table,
)


@cache
def modules() -> tuple[Module, ...]:
    return house.package()


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str):
    found = list(RULES[rule](modules()))
    assert not found, "\n".join([f"{rule}:", *found])


def test_statements_only_become_fewer():
    found = list(house.counts_equal_limits(size.counted(), size.limits()))
    assert not found, "\n".join(found)


def test_the_top_level_has_only_what_belongs_there():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=house.ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("git is absent, or this is no checkout")
    found = {name.split("/")[0] for name in listed.stdout.splitlines() if name[0] != "."}
    folders = {"sbp", "tests", "notebooks", "examples", "benchmarks", "tools", "docs"}
    files = {
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "conftest.py",
    }
    assert found == folders | files


def test_statements_say_no():
    more, fewer, new = house.counts_equal_limits(
        {"sbp/a": 3, "sbp/b": 1, "sbp/c": 1}, {"sbp/a": (1, ""), "sbp/b": (2, "")}
    )
    assert "sbp/a: 2 statements too many" in more and "sbp/c: 1 " in new
    assert "sbp/b: 1 statements fewer" in fewer


def test_statements_are_counted_without_docstrings():
    assert size.statements(ast.parse('"""A."""\ndef f():\n    """B."""\n    return "c"\n')) == 2


@pytest.mark.parametrize(
    ("folder", "rule"),
    [("examples", "examples_import_public_names"), ("tests", "modules_are_short")],
)
def test_rule_of_another_folder(folder: str, rule: str):
    """Examples use public names; test modules are short."""
    ours = tuple(m for m in house.package(house.ROOT / folder) if "/jax_tests/" not in m.path)
    found = list(RULES[rule](ours))
    assert ours and not found, "\n".join(found)


def test_tests_of_which_a_part_runs_are_marked():
    """`make laws` runs the marked ones alone."""
    texts = {str(path.relative_to(house.ROOT)): path.read_text("utf-8") for path in TEST_FILES}
    taken = [name for name, text in texts.items() if "tests.slices import" in text]
    unmarked = [name for name in taken if "pytest.mark.laws" not in texts[name]]
    assert taken
    assert not unmarked, f"{unmarked}: mark the tests that take slices with pytest.mark.laws"


def test_names_of_test_modules_are_unique():
    """pytest imports them by their names alone."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in TEST_FILES:
        found[path.name].append(str(path.relative_to(house.ROOT)))
    twice = [f"{', '.join(paths)}: rename all but one" for paths in found.values() if paths[1:]]
    assert not twice, "\n".join(twice)


def test_the_picture_shows_the_imports():
    page = (house.ROOT / "docs" / "how-it-works.md").read_text("utf-8")
    true, drawn = arrows(imports_by_folder()), pictured(page)
    missing = [f"    {a} --> {b}" for a, b in sorted(true - drawn)]
    wrong = [f"    {a} --> {b}" for a, b in sorted(drawn - true)]
    assert not missing and not wrong, "\n".join(
        ["docs/how-it-works.md: add to the picture:", *missing, "delete from it:", *wrong]
    )


LONG = "def f():\n" + "    pass\n" * house.MAX_FUNCTION_LINES

BROKEN = [
    ("class_names_are_unique", "sbp/a.py", "class C: ...\nclass D:\n    class C: ...\n", "`C`"),
    *(
        ("constants_are_in_the_table", path, code, f"`{name}`")
        for path, code, name in (
            ("sbp/a.py", "A, MOST = 'a', 2**20\n", "MOST"),
            ("sbp/a.py", "class ALimits:\n    most: int = 3\n", "ALimits.most"),
            ("sbp/solve/search.py", "STALE = 7\n", "STALE"),
            ("sbp/solve/search.py", "", "STALE"),
        )
    ),
    ("functions_are_short", "sbp/a.py", LONG, "`f`"),
    (
        "parameters_are_few",
        "sbp/a.py",
        "class C:\n    def f(self, a, b, /, c, *d, e, f, g): ...\n",
        "`C.f`",
    ),
    ("modules_are_short", "sbp/a.py", "a = 1\n" * (house.MAX_MODULE_LINES + 1), "split"),
    *(
        ("examples_import_public_names", "examples/a.py", f"{code}\n", f"`{name}`")
        for code, name in (
            ("from sbp.plan.ir import Loop", "sbp.plan.ir"),
            ("def f():\n    from sbp.moe.step import _wide", "sbp.moe.step._wide"),
        )
    ),
    *(
        ("shown_text_is_not_read", "sbp/a.py", f"{code}\n", f"`{code}`")
        for code in (
            "because.text.startswith('carry')",
            "re.match(pattern, because.text.upper())",
            "fault.detail[2:-1]",
            "'predicate' in c.because.text",
            "label.title == 'x'",
            "d.text(80).splitlines()",
            "d.notes[0].split()",
        )
    ),
    (
        "regions_are_read_in_trace",
        "sbp/infer/a.py",
        "n = node.params['num_carry']\n",
        "`num_carry`",
    ),
    *(
        ("primitives_are_named_in_signatures", "sbp/infer/a.py", code, f"`{name}`")
        for code, name in (
            ("a = node.op == 'scan'\n", "scan"),
            ("a = node.op in ('max', x)\n", "max"),
            ("A = frozenset(('broadcast_in_dim',))\n", "broadcast_in_dim"),
            ("A = names('max min')\n", "max"),
        )
    ),
]


@pytest.mark.parametrize(("rule", "path", "source", "said"), BROKEN)
def test_a_rule_says_no(rule: str, path: str, source: str, said: str):
    assert any(path in v and said in v for v in RULES[rule]((module(path, source),)))


SOUND = """
from dataclasses import dataclass

@dataclass
class C:
    text: str = ""

    def f(self, a, b, c, d, e, f):
        return self.text + a.because.kind.partition("x") + (a.title or "") + a.monoid["max"]

x_p = Primitive("sbp_annotate")
"""


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_yes(rule: str):
    assert not list(RULES[rule]((module("sbp/infer/a.py", SOUND),)))


def test_every_exemption_is_needed():
    """The tables of exemptions name what exists."""
    paths = {m.path for m in modules()}
    assert {key.split(": ")[0] for key in (*house.WIDE, *house.LONG)} <= paths
    assert not [
        key for key in NOT_TUNED if not any(path.startswith(key.split(": ")[0]) for path in paths)
    ]


def test_the_table_of_constants_names_modules():
    assert table().keys() <= {m.path for m in modules()}
    with pytest.raises(AssertionError, match="two rows of A"):
        listed("| `A` | `sbp/a.py` | `1` | x |\n| `A` | `sbp/a.py` | `1` | y |\n")
