"""A pytest plug-in that measures the CPU seconds of every case.

`pytest --seconds=FILE` writes a line for each case as it ends: the CPU seconds
of its set-up, call and tear-down, in all threads and in the processes that it waited for; its
outcome; and its name. A fixture of a module or a session counts for the case that needed it first.
With `--resume`, cases that passed in FILE are not run again.

`python -m tests.case_seconds FILE ..` sums tables up by folder.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest


def cpu_seconds() -> float:
    """CPU seconds of this process and of the processes that it waited for."""
    return sum(os.times()[:4])


class CaseSeconds:
    """Writes the table, also of the cases that workers run.

    Arguments:
      table: the file.
      resume: whether its cases that passed are left out.
    """

    def __init__(self, table: Path, resume: bool) -> None:
        self.table = table
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcomes: dict[str, str] = {}
        table.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            table.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = report.nodeid
        self.seconds[case] += getattr(report, "cpu_seconds", 0.0)
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[case] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid in self.outcomes:
            with self.table.open("a") as table:
                table.write(f"{self.seconds[nodeid]:.3f}\t{self.outcomes[nodeid]}\t{nodeid}\n")


class Passed:
    """Leaves out cases that passed before.

    Arguments:
      cases: their names.
    """

    def __init__(self, cases: frozenset[str]) -> None:
        self.cases = cases

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        out = [item for item in items if item.nodeid in self.cases]
        items[:] = [item for item in items if item.nodeid not in self.cases]
        config.hook.pytest_deselected(items=out)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # all have passed before


def read_table(path: Path) -> dict[str, tuple[float, str]]:
    """The CPU seconds and the outcome of each case; the last line of a case counts."""
    rows = (line.split("\t") for line in path.read_text("utf-8").splitlines())
    return {case: (float(seconds), outcome) for seconds, outcome, case in rows}


def folder(case: str) -> str:
    """The folder of a case under `tests/`, or its file where it is in no folder."""
    return case.split("::")[0].removeprefix("tests/").split("/")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Notes on each report the CPU seconds since the last one of this process."""
    report = yield
    now = cpu_seconds()
    report.cpu_seconds = now - _last["report"]
    _last["report"] = now
    return report


def pytest_runtest_logstart() -> None:
    _last["report"] = cpu_seconds()


_last: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=Path, metavar="FILE", help="write CPU seconds of cases")
    parser.addoption("--resume", action="store_true", help="leave out cases that passed in FILE")


def pytest_configure(config: pytest.Config) -> None:
    table, resume = config.getoption("--seconds"), config.getoption("--resume")
    if table is None:
        return
    if resume and table.exists():
        passed = (case for case, (_, how) in read_table(table).items() if how == "passed")
        config.pluginmanager.register(Passed(frozenset(passed)), "passed-before")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(CaseSeconds(table, bool(resume)), "case-seconds")


def main() -> None:
    """The command line."""
    folders: dict[str, list[float]] = defaultdict(list)
    for path in sys.argv[1:]:
        for case, (seconds, _) in read_table(Path(path)).items():
            folders[folder(case)].append(seconds)
    print("CPU s   cases  folder")
    for name, found in sorted(folders.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(found):7.1f} {len(found):5}  {name}")
    print(f"{sum(map(sum, folders.values())):7.1f} {sum(map(len, folders.values())):5}  all")


if __name__ == "__main__":
    main()
