"""A pytest plug-in that records which lines of `sbp` each case runs, on Python 3.12 or newer.

    python -m pytest -p tests.mutants.lines --lines=FOLDER

Each process appends to a file of its own in FOLDER. A line that a case needs but that ran earlier,
such as a cached result or the body of a module, is recorded for the first case only. Lines that run
in other processes are not recorded.
"""

import os
import pickle
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'sbp'}{os.sep}"

Lines = dict[str, int]
"""For each file, relative to the checkout, its lines as the bits of an integer."""


class Recorder:
    """Records lines while cases run.

    Arguments:
      file: where they are written.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.found: Lines = defaultdict(int)
        self.monitoring: Any = vars(sys)["monitoring"]  # since Python 3.12
        self.monitoring.use_tool_id(self.monitoring.COVERAGE_ID, "sbp lines")
        event = self.monitoring.events.LINE
        self.monitoring.register_callback(self.monitoring.COVERAGE_ID, event, self.line)
        self.monitoring.set_events(self.monitoring.COVERAGE_ID, event)

    def line(self, code: CodeType, number: int) -> Any:
        if code.co_filename.startswith(PACKAGE):
            self.found[code.co_filename] |= 1 << number
        return self.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.found.clear()
        self.monitoring.restart_events()
        result = yield
        lines = {os.path.relpath(name, ROOT): bits for name, bits in self.found.items()}
        pickle.dump((item.nodeid, zlib.compress(pickle.dumps(lines))), self.file)
        self.file.flush()
        return result

    def pytest_unconfigure(self) -> None:
        self.monitoring.set_events(self.monitoring.COVERAGE_ID, 0)
        self.monitoring.free_tool_id(self.monitoring.COVERAGE_ID)


def recorded(folder: Path) -> Iterator[tuple[str, Lines]]:
    """The lines of each case that ran."""
    for path in sorted(folder.glob("*.lines")):
        with path.open("rb") as file:
            while file.peek(1):
                case, packed = pickle.load(file)
                yield case, pickle.loads(zlib.decompress(packed))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, metavar="FOLDER", help="record the lines of each case")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--lines")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{os.getpid()}.lines").open("wb")
        config.pluginmanager.register(Recorder(file), "sbp-lines")
