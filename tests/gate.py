"""Which cases the gate runs.

`pytest --gate` runs all cases except those that `tests/gate.txt` leaves to `make deep`. Each line
of that file names a test and the number of its cases to run, or one case that always runs:

    tests/run/test_boxing.py::test_two_axes 2
    tests/run/test_boxing.py::test_two_axes[S(0)-B]

A hash of their names decides which cases of a test are taken, so a new case changes no other. Tests
that are not listed run with all their cases. Cases whose verdict is in the lock do not run again
(`tests/lock.py`).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_name("gate.txt")


@dataclass(frozen=True, slots=True)
class Gate:
    """What the gate runs of the listed tests.

    Arguments:
      counts: how many cases of a test.
      cases: cases that run beside these.
    """

    counts: dict[str, int]
    cases: frozenset[str]

    @classmethod
    def read(cls, path: Path = LIST) -> Gate:
        """The list of a file."""
        counts: dict[str, int] = {}
        cases: set[str] = set()
        for line in path.read_text("utf-8").splitlines():
            name, _, count = line.rpartition(" ")
            if name and count.isdigit() and not name.endswith("]"):
                counts[name] = int(count)
            else:
                cases.add(line)
        return cls(counts, frozenset(cases))

    def taken(self, names: Iterable[str]) -> set[str]:
        """The cases that the gate runs, of all those with these names."""
        tests: dict[str, list[str]] = defaultdict(list)
        for name in names:
            tests[name.split("[")[0]].append(name)
        taken: set[str] = set()
        for test, cases in tests.items():
            count = self.counts.get(test, len(cases))
            taken.update(sorted(cases, key=drawn)[:count])
            taken.update(case for case in cases if case in self.cases)
        return taken


def drawn(name: str) -> tuple[int, str]:
    """The key by which the cases of a test are in order."""
    return zlib.crc32(name.encode()), name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gate", action="store_true", help="leave out the cases of tests/gate.txt")


LEFT = pytest.StashKey[tuple[int, int]]()
"""How many cases are left to the deep run, and how many are locked."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gate"):
        from tests import lock

        taken = Gate.read().taken(item.nodeid for item in items)
        locked = {name for name in taken if lock.unchanged(name)}
        out = [item for item in items if item.nodeid not in taken - locked]
        items[:] = [item for item in items if item.nodeid in taken - locked]
        config.hook.pytest_deselected(items=out)
        config.stash[LEFT] = (len(out) - len(locked), len(locked))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist sends the counts to the process that shows them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None and LEFT in session.config.stash:
        output["left"] = session.config.stash[LEFT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "left" in getattr(node, "workeroutput", {}):
        node.config.stash[LEFT] = tuple(node.workeroutput["left"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left = terminalreporter.config.stash.get(LEFT, None)
    if left is not None:
        terminalreporter.line(
            f"gate: {left[0]} cases are left to `make deep`, {left[1]} are in the lock"
        )
