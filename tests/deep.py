"""The deep run: every stage with all its cases; `make deep` runs this.

    python -m tests.deep [STAGE ..]

Logs, and the cases that have passed, are in `build/deep`. Running again on the same commit resumes:
stages that passed are skipped, and an interrupted stage goes on after the cases that passed.
`docs/deep.md` has one row for each stage, for its latest run.
"""

import argparse
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.case_seconds import read_table

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "deep"
PAGE = ROOT / "docs" / "deep.md"

STAGES = {
    "lint": ("lint",),
    "test-all": ("test-all",),
    "laws": ("laws",),
    "test-newest": ("test-newest", "NEWEST_TESTS=tests examples", "NEWEST_EXTRAS=gshard,dev"),
    "test-tpu": ("test-tpu",),
    "test-multiprocess": ("test-multiprocess",),
    "screenshots": ("screenshots",),
    "fuzz": ("fuzz", "ARGS=--seeds 0:1000"),
    "peer": ("peer",),
    "real": ("real", "ARGS=--write docs/real-programs.md"),
}
"""What each stage gives to `make`."""
RESUMED = ("test-all", "laws", "test-newest")
"""Stages whose tests go on after the cases that passed."""

HEAD = """# The deep run

`make deep` runs every stage with all its cases. It writes this page, which shows the last run of
each stage. [Testing](testing.md) explains the stages and what the gate runs of them.

| Stage | Date | Commit | Versions | Found | Seconds |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a stage ended.

    Arguments:
      stage: a key of `STAGES`.
      date: in UTC.
      commit: with `+` behind it where the checkout had changes.
      versions: of Python, JAX and libtpu.
      found: its last line: counts of tests.
      seconds: wall time since it was last started.
      passed: whether it ended well.
    """

    stage: str
    date: str
    commit: str
    versions: str
    found: str
    seconds: float
    passed: bool

    @property
    def row(self) -> str:
        """Its line of the page."""
        found = self.found if self.passed else f"**failed**: {self.found}"
        cells = (self.stage, self.date, self.commit, self.versions, found, f"{self.seconds:.0f}")
        return f"| {' | '.join(cells)} |"


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    stages = parser.parse_args().stages or list(STAGES)
    if unknown := [stage for stage in stages if stage not in STAGES]:
        parser.error(f"no stage is named {', '.join(unknown)}; known: {', '.join(STAGES)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    ended = [run(stage, commit()) for stage in stages]
    PAGE.write_text(page({e.stage: e for e in ended}, PAGE.read_text("utf-8")), "utf-8")
    failed = [e.stage for e in ended if not e.passed]
    passed = len({e.stage for e in ended if e.passed})
    print(f"deep: {passed} stages passed" + (f"; failed: {', '.join(failed)}" * bool(failed)))
    return bool(failed)


def run(stage: str, at: str) -> Ended:
    """Runs a stage, unless it has ended well in this commit."""
    state, table, log = (LOGS / f"{stage}.{kind}" for kind in ("json", "tsv", "log"))
    before = Ended(**json.loads(state.read_text())) if state.exists() else None
    now = (at, versions())
    # Two checkouts with changes may differ.
    same = before is not None and not at.endswith("+") and (before.commit, before.versions) == now
    if before is not None and same and before.passed:
        print(f"deep: {stage} passed before: {before.found}")
        return before
    command = ["make", "--no-print-directory", *STAGES[stage]]
    if stage in RESUMED:
        if not same:
            table.unlink(missing_ok=True)
        command.append(f"PYTEST_ARGS=--seconds={table} --resume")
    unfinished = Ended(stage, today(), at, versions(), "interrupted", 0.0, passed=False)
    state.write_text(json.dumps(asdict(unfinished)))
    print(f"deep: {' '.join(command)}", flush=True)
    began, lines = time.monotonic(), [""]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with log.open("a") as file:
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            if line.strip() and not line.startswith("make: ***"):
                lines.append(line.strip())
    status = process.wait()
    found = re.sub(r"^=+ | in [\d.]+s?.*$", "", lines[-1]).strip("= ")
    if table.exists():
        passed = sum(how == "passed" for _, how in read_table(table).values())
        found = f"{found}; {passed} passed in all its parts"
    seconds = time.monotonic() - began
    ended = Ended(stage, today(), at, versions(), found, seconds, passed=status == 0)
    state.write_text(json.dumps(asdict(ended)))
    return ended


def page(ended: dict[str, Ended], before: str) -> str:
    """The page with the new rows in the place of the old ones of the same stages."""
    rows = {line.split(" | ")[0].strip("| "): line for line in before.splitlines()}
    rows |= {stage: e.row for stage, e in ended.items()}
    return HEAD + "".join(f"{rows[stage]}\n" for stage in STAGES if stage in rows)


def today() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}"


def versions() -> str:
    found = {d.name: d.version for d in importlib.metadata.distributions()}
    names = (("JAX", "jax"), ("libtpu", "libtpu"))
    packages = [f"{name} {found[package]}" for name, package in names if package in found]
    return ", ".join([f"Python {sys.version.split()[0]}", *packages])


def commit() -> str:
    """The commit of the checkout, with `+` behind it where files differ that no stage writes."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    changed = [
        *("git", "status", "--porcelain", "--", "."),
        *(":!docs/deep.md", ":!docs/real-programs.md"),
    ]
    name = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    status = subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return name.strip() + "+" * bool(status.strip())


if __name__ == "__main__":
    sys.exit(main())
