"""The examples in docstrings run as written and print what they show."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import sbp

ROOT = Path(__file__).parents[1]
PLAIN = ("benchmarks.gshard", "examples.gshard")
"""Folders of modules outside the package."""

MODULES = sorted(
    m.name
    for m in (
        *pkgutil.walk_packages(sbp.__path__, "sbp."),
        *(m for f in PLAIN for m in pkgutil.iter_modules([ROOT / f.replace(".", "/")], f"{f}.")),
    )
    if not m.name.endswith("__main__")
)
EXAMPLES = [
    pytest.param(example, id=example.name)
    for name in MODULES
    for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    if example.examples
]


def test_there_are_examples():
    assert len(EXAMPLES) >= 70


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: doctest.DocTest):
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert tried
    assert not failed, "".join(said)
