"""Runs the tests of this folder in several processes of one machine, under `jax.distributed`.

`make test-multiprocess` runs this. Every process runs the same tests in the same order, and the
processes share the eight simulated devices. A test passes if it passes in all processes.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
DEVICES = 8
GRACE_SECONDS = 10.0
"""How long the others may go on after one process has failed. They often wait for it."""
ABORT_SECONDS = 3.0
"""How long a process has to say what it did before it gets the next signal."""
NOISE = b"[Gloo]"


@dataclass(slots=True)
class Ended:
    """How a group of processes ended.

    Arguments:
      codes: the exit status of each process; None for one that was killed.
      said: the lines of each process.
      why: why processes were killed; empty where none was.
    """

    codes: list[int | None]
    said: list[list[str]]
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether all processes ended by themselves, without an error."""
        return all(code == 0 for code in self.codes)


def together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    *,
    seconds: float,
    grace: float = GRACE_SECONDS,
    out: IO[str] | None = None,
) -> Ended:
    """Runs commands at the same time, each in its own process group. Kills all of them when the
    time is up, and those that are left a while after one has failed.

    Arguments:
      commands: one for each process.
      environments: the environment variables of each process.
      seconds: the time limit.
      grace: seconds that processes have after one has failed.
      out: where lines are printed, each behind the number of its process; None for nowhere.
    """
    lock = threading.Lock()
    said: list[list[str]] = [[] for _ in commands]

    def read(number: int, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                if line.startswith(NOISE):
                    continue
                text = line.decode(errors="replace").rstrip()
                with lock:
                    said[number].append(text)
                    if out is not None:
                        print(f"[{number}] {text}", file=out, flush=True)

    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    readers = [
        threading.Thread(target=read, args=(number, process.stdout), daemon=True)
        for number, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    killed: set[int] = set()
    why = ""
    try:
        why = _wait(processes, seconds, grace)
        killed = {p.pid for p in processes if p.poll() is None}
    finally:
        _kill(processes)
    for reader in readers:
        reader.join(timeout=ABORT_SECONDS)
    codes = [None if p.pid in killed else p.returncode for p in processes]
    return Ended(codes, said, why if killed else "")


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float, grace: float) -> str:
    """Waits until all processes have ended, or the rest has to be killed; returns why."""
    end, why = time.monotonic() + seconds, f"{seconds:.0f} seconds were over"
    failed = False
    while time.monotonic() < end:
        codes = [p.poll() for p in processes]
        if None not in codes:
            break
        if not failed and any(codes):
            failed = True
            first = next(k for k, code in enumerate(codes) if code)
            if (soon := time.monotonic() + grace) < end:
                end, why = soon, f"process {first} had failed"
        try:
            processes[codes.index(None)].wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
    return why


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: first with a signal at which pytest names the case that ran, then with
    one at which Python writes its stack."""
    for sent in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL):
        running = [p for p in processes if p.poll() is None]
        for process in running:
            os.killpg(process.pid, sent)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=ABORT_SECONDS)


def verdicts(reports: Sequence[Path]) -> dict[str, str]:
    """For each test `passed`, `skipped`, `failed` or `error`, from the JUnit files of all
    processes. A test that is missing in a report is an error, and so is a process without one."""
    found: list[dict[str, str]] = []
    for report in reports:
        tests: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
            ends = [kinds[child.tag] for child in case if child.tag in kinds]
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            tests[name] = ends[0] if ends else "passed"
        if tests:
            found.append(tests)
    worst = ("error", "failed", "skipped", "passed")
    return {report.stem: "error" for report in reports if not report.exists()} | {
        name: min((tests.get(name, "error") for tests in found), key=worst.index)
        for name in sorted(set().union(*found))
    }


def world(count: int, seconds: float, arguments: Sequence[str]) -> dict[str, int]:
    """Runs the tests in `count` processes; returns how many tests ended in which way."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"report of process {k}.xml" for k in range(count)]
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x"]
        pytest += ["-m", "multiprocess", "tests/multiprocess", *arguments]
        ended = together(
            [[*pytest, f"--junitxml={report}"] for report in reports],
            [
                {
                    "SBP_PROCESS": f"{k} {count} {port}",
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count}",
                    "JAX_ENABLE_COMPILATION_CACHE": "false",
                    "JAX_PLATFORMS": "cpu",
                    # A plan may not depend on the order of a set.
                    "PYTHONHASHSEED": str(k + 1),
                }
                for k in range(count)
            ],
            seconds=seconds,
            out=sys.stdout,
        )
        found = verdicts(reports)
    counts = {kind: list(found.values()).count(kind) for kind in sorted(set(found.values()))}
    for name, verdict in found.items():
        if verdict in ("failed", "error"):
            print(f"{count} processes: {verdict} {name}")
    for number, code in enumerate(ended.codes):
        if code != 0:
            how = f"was killed: {ended.why}" if code is None else f"ended with status {code}"
            print(f"{count} processes: process {number} {how}")
    if not ended.ok and not counts.keys() & {"failed", "error"}:
        counts["error"] = 1
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status. The last line is in pytest's form."""
    parser = argparse.ArgumentParser(prog="python -m tests.multiprocess.run", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--seconds", type=float, default=900.0, help="time limit of all together")
    options, rest = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends what was started, too
    start = time.monotonic()
    total: dict[str, int] = {}
    for count in options.processes:
        left = max(1.0, options.seconds - (time.monotonic() - start))
        for kind, tests in world(count, left, rest).items():
            total[kind] = total.get(kind, 0) + tests
    kinds = [k for k in ("failed", "error", "passed", "skipped") if total.get(k)]
    summary = ", ".join(f"{total[k]} {k}" for k in kinds) or "no tests ran"
    print(f"=== {summary} in {time.monotonic() - start:.2f}s ===")
    return 1 if {"failed", "error"} & total.keys() or not total.get("passed") else 0


if __name__ == "__main__":
    sys.exit(main())
