"""Which cases the gate runs.

`pytest --gate` runs all cases except those that `tests/gate.txt` leaves to `make deep`. Each line
of that file names a test and the number of its cases to run, or one case that always runs:

    tests/run/test_boxing.py::test_two_axes 2
    tests/run/test_boxing.py::test_two_axes[S(0)-B]

A hash of their names decides which cases of a test are taken, so a new case changes no other. Tests
that are not listed run with all their cases. The files of tests that are in the lock do not run
again (`tests/lock.py`).
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
"""How many cases are left to the deep run, and how many files are locked."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files of the lock."""
    if not config.getoption("--gate") or config.getoption("--record"):
        return None
    from tests import lock

    if not collection_path.match("test_*.py") or not lock.unchanged(collection_path):
        return None
    cases, files = config.stash.get(LEFT, (0, 0))
    config.stash[LEFT] = (cases, files + 1)
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gate"):
        taken = Gate.read().taken(item.nodeid for item in items)
        out = [item for item in items if item.nodeid not in taken]
        items[:] = [item for item in items if item.nodeid in taken]
        config.hook.pytest_deselected(items=out)
        config.stash[LEFT] = (len(out), config.stash.get(LEFT, (0, 0))[1])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A worker of pytest-xdist sends the counts to the process that shows them."""
    left = session.config.stash.get(LEFT, None)
    output = getattr(session.config, "workeroutput", None)
    if output is not None and left is not None:
        output["left"] = left
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and left is not None and left[1]:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "left" in getattr(node, "workeroutput", {}):
        node.config.stash[LEFT] = tuple(node.workeroutput["left"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left = terminalreporter.config.stash.get(LEFT, None)
    if left is not None:
        terminalreporter.line(
            f"gate: {left[0]} cases are left to `make deep`; {left[1]} test files did not run again"
            " (tests/lock.py)"
        )
