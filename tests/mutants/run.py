"""Runs the tests on mutants of the package and writes which cases find them.

    python -m tests.mutants.run --lines=FOLDER --seconds=FILE [--count 200]

The lines and seconds of the cases come from `tests.mutants.lines` and `tests.case_seconds`. For
each mutant, the cases of the gate that ran its line run first, the quickest at the start, until one
fails. If none fails, the other cases that ran its line follow. Each verdict is a line of
`verdicts.tsv`, and a mutant that has one is not run again.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.case_seconds import read_table
from tests.gate import Gate
from tests.mutants.lines import recorded
from tests.mutants.mutate import AREAS, ROOT, Mutant, drawn, mutated

VERDICTS = Path(__file__).with_name("verdicts.tsv")
FIRST = 30
"""Cases that run before the others are even imported."""
GRACE = 60.0
"""Seconds that a run may take beyond five times the seconds of its cases."""


@dataclass(frozen=True, slots=True)
class Case:
    """A case of the tests, and what it did without a fault.

    Arguments:
      name: its node id.
      seconds: CPU seconds.
      gate: whether the gate runs it.
    """

    name: str
    seconds: float
    gate: bool


class Chosen:
    """A pytest plug-in: runs these cases, in this order, and notes the first that fails."""

    def __init__(self, cases: Sequence[str], note: Path) -> None:
        self.order = {case: number for number, case in enumerate(cases)}
        self.note = note

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.note.exists():
            self.note.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.note.exists():
            self.note.write_text(f"import of {report.nodeid}")


def failing(checkout: Path, cases: Sequence[Case]) -> str:
    """The first of the cases that fails in a checkout, or `time-out`; empty where none does."""
    if not cases:
        return ""
    note = checkout / "failed"
    note.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(checkout)
        sys.path.insert(0, str(checkout))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        for module in [m for m in sys.modules if m.split(".")[0] in ("tests", "conftest")]:
            del sys.modules[module]  # it came from the sound checkout
        files = dict.fromkeys(case.name.split("::")[0] for case in cases)
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", *files]
        status = 3
        try:
            status = pytest.main(arguments, [Chosen([c.name for c in cases], note)])
            if status not in (0, 1, pytest.ExitCode.NO_TESTS_COLLECTED) and not note.exists():
                note.write_text(f"pytest ended with status {int(status)}")
        finally:
            os._exit(int(status))
    end = time.monotonic() + GRACE + 5 * sum(case.seconds for case in cases)
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "time-out"
    return note.read_text() if note.exists() else ""


def in_turn(checkout: Path, cases: Iterable[Case], most: float) -> tuple[str, float]:
    """The first failing case, the quickest first and no more than `most` seconds of them; and the
    seconds of the cases that were left out."""
    ordered = sorted(cases, key=lambda case: (case.seconds, case.name))
    taken, total = 0, 0.0
    while taken < len(ordered) and total + ordered[taken].seconds <= most:
        total += ordered[taken].seconds
        taken += 1
    left = sum(case.seconds for case in ordered[taken:])
    functions: dict[str, Case] = {}
    for case in ordered[:taken]:
        functions.setdefault(case.name.split("[")[0], case)
    first = list(functions.values())[:FIRST]
    rest = [case for case in ordered[:taken] if case not in first]
    return failing(checkout, first) or failing(checkout, rest), left


def checkout_of(folder: Path) -> Path:
    """A copy of the checkout without what runs write."""
    copy = folder / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "mutants")
    for name in ("sbp", "tests", "benchmarks", "docs", "examples", "notebooks", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in (p for p in ROOT.iterdir() if p.is_file()):
        shutil.copy(path, copy)
    return copy


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--lines", type=Path, required=True, help="of tests.mutants.lines")
    parser.add_argument("--seconds", type=Path, required=True, help="of tests.case_seconds")
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th mutant, from the K-th")
    parser.add_argument("--most", type=float, default=150.0, help="CPU seconds for one mutant")
    options = parser.parse_args()
    seconds = {case: row[0] for case, row in read_table(options.seconds).items()}
    kept = Gate.read().taken(seconds)
    cases = {name: Case(name, taken, name in kept) for name, taken in seconds.items()}
    part, parts = map(int, options.part.split("/"))
    done = {line.split("\t")[0] for line in VERDICTS.read_text().splitlines()[1:]}
    wanted = [m for m in drawn(options.count, options.seed)[part::parts] if str(m) not in done]
    covering = _covering(wanted, options.lines, cases)
    _import_libraries()
    with tempfile.TemporaryDirectory() as folder:
        checkout = checkout_of(Path(folder))
        for number, mutant in enumerate(wanted, 1):
            start = time.monotonic()
            row = judge(mutant, checkout, covering[mutant], options.most)
            with VERDICTS.open("a") as table:
                table.write("\t".join((str(mutant), mutant.area, *row)) + "\n")
            taken = time.monotonic() - start
            print(f"{number}/{len(wanted)} {mutant}: {row} in {taken:.0f} s", flush=True)
    print(summary())


def summary() -> str:
    """A table of the verdicts by area, as Markdown."""
    found = {area: [0, 0, 0] for area in (*AREAS, "all")}
    for line in VERDICTS.read_text().splitlines()[1:]:
        _, area, gate, other, _ = line.split("\t")
        for name in (area, "all"):
            for column, counts in enumerate((True, bool(gate), bool(other))):
                found[name][column] += counts
    rows = (f"| {name} | {' | '.join(map(str, counts))} |" for name, counts in found.items())
    head = "| Area | Mutants | Found by the gate | Found by the gate or `make deep` |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def judge(mutant: Mutant, checkout: Path, cases: Sequence[Case], most: float) -> tuple[str, ...]:
    """What finds a mutant: in the gate, and in all the tests; and seconds of cases left out."""
    path = checkout / mutant.path
    sound = path.read_text("utf-8")
    path.write_text(mutated(mutant), "utf-8")
    try:
        found, left = in_turn(checkout, (c for c in cases if c.gate), most)
        other, more = found, 0.0
        if not found:
            other, more = in_turn(checkout, (c for c in cases if not c.gate), most)
    finally:
        path.write_text(sound, "utf-8")
    # A case, or the import of a file.
    again = [c for c in cases if other in (c.name, f"import of {c.name.split('::')[0]}")]
    if failing(checkout, again[:1]):
        raise SystemExit(f"{other} fails without a mutant, too: mend it first")
    return found, other, "0" if other else f"{left + more:.0f}"


def _covering(
    mutants: Sequence[Mutant], folder: Path, cases: dict[str, Case]
) -> dict[Mutant, list[Case]]:
    """The cases that ran the line of each mutant; where none did, as for lines that run when a
    module is imported, those that ran any line of its file."""
    line: dict[Mutant, list[Case]] = {m: [] for m in mutants}
    file: dict[Mutant, list[Case]] = {m: [] for m in mutants}
    for name, lines in recorded(folder):
        if name in cases:
            for m in mutants:
                bits = lines.get(m.path, 0)
                if bits:
                    file[m].append(cases[name])
                if bits >> m.line & 1:
                    line[m].append(cases[name])
    return {m: line[m] or file[m] for m in mutants}


def _import_libraries() -> None:
    """What every child needs, once; not the package, which is changed, and no device."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # The first one sets what JAX reads when it is imported.
    for name in ("conftest", "jax", "flax.nnx", "optax", "z3"):
        importlib.import_module(name)


if __name__ == "__main__":
    main()
