"""The fuzzer: random programs on every mesh against one device; what goes wrong is minimised and
printed as a file that runs.

    python -m tests.fuzz.run --seeds 0:1000
    python -m tests.fuzz.run --seeds 412 --policy auto --mesh 2x4       one program, as it was

A worker process runs the programs and is replaced after `--batch` of them, when its memory grows,
when it dies, and when a program takes too long, so one program cannot stop a run. Seeds are
independent: an interrupted run is resumed from the last seed that it
printed. Measured: 250 programs take 331 s of one core, so 1,000 take some 22 minutes. Of 1.1 s of
processor time for one, planning takes 0.11 s and generating 0.03 s; the rest is tracing, compiling
and running, the reference taking nearly half.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_PROGRAM = 120
GRACE_SECONDS = 60  # for starting, and for a worker to notice the time itself
FAILURES = ("mismatch", "no-typing", "crash", "time-out")
FLAG, GIVEN = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    **os.environ,
    "XLA_FLAGS": GIVEN if FLAG in GIVEN else f"{GIVEN} {FLAG}=8".strip(),
}


@dataclass(slots=True, eq=False)
class Tally:
    """What has happened so far."""

    programs: list[tuple[int, str, str, str]] = field(default_factory=list)
    """The seed, the verdict, the mesh and the policy of each."""
    started: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> list[int]:
        """The seeds of the programs that failed."""
        return sorted(seed for seed, verdict, *_ in self.programs if verdict in FAILURES)

    def counts(self, column: int) -> str:
        """How many programs have which verdict (1), mesh (2) or policy (3), failures left out."""
        found = Counter(program[column] for program in self.programs)
        return ", ".join(f"{k} {n}" for k, n in sorted(found.items()) if k not in FAILURES)

    def line(self) -> str:
        """Rates and counts in one line."""
        rate = len(self.programs) / max(1e-9, time.monotonic() - self.started)
        return (
            f"{rate:.2f}/s  {self.counts(1)}  [{'red' if self.failed else 'green'}]failed"
            f" {len(self.failed)}[/]"
        )


def _command(options: argparse.Namespace, times: int, **more: Any) -> list[str]:
    """The command of a worker, which may minimise for `times` as long as the options say."""
    seconds = 0 if options.no_minimise else times * options.minimise
    settings = {"policy": options.policy, "mesh": options.mesh, "minimise": seconds, **more}
    return [sys.executable, "-m", "tests.fuzz.worker", json.dumps(settings)]


def _worker(seeds: list[int], options: argparse.Namespace) -> subprocess.Popen[str]:
    """A worker on these seeds, which writes one line of JSON when it begins a program and one when
    it has judged it."""
    command = _command(options, 1, memory=options.memory, seeds=seeds)
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def _messages(worker: subprocess.Popen[str], minimise: float) -> Iterator[dict[str, Any] | None]:
    """The worker's messages; None when it has been silent too long, which may be `minimise` seconds
    more after a fault."""
    assert worker.stdout is not None
    patience = SECONDS_PER_PROGRAM + GRACE_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(patience):
                yield None
                return
            line = worker.stdout.readline()
            if not line:
                return
            if line.startswith("{"):
                message = json.loads(line)
                patience = (
                    SECONDS_PER_PROGRAM + GRACE_SECONDS + (minimise if "found" in message else 0)
                )
                if "found" not in message:
                    yield message


def fuzz(seeds: list[int], options: argparse.Namespace, console: Console) -> Tally:
    """Runs all seeds and prints what fails as it is found."""
    tally, left = Tally(), list(seeds)

    def count(seed: int, verdict: str, about: dict[str, Any]) -> None:
        tally.programs.append((seed, verdict, about.get("mesh", "?"), about.get("policy", "?")))
        left.remove(seed)
        done = len(seeds) - len(left)
        if done % 50 == 0:
            console.print(f"{done}/{len(seeds)}, at seed {seed}: {tally.line()}", highlight=False)

    while left:
        worker = _worker(left[: options.batch], options)
        running: int | None = None
        silent = False
        for message in _messages(worker, options.minimise):
            if message is None:
                silent = True
            elif "begin" in message:
                running = message["begin"]
            elif "again" in message:
                break  # its memory has grown
            else:
                running = None
                count(message["seed"], message["verdict"], message)
                if message["verdict"] in FAILURES:
                    _show(console, message)
        if silent:
            worker.kill()
        code = worker.wait()
        if running is not None:
            verdict = "time-out" if silent else "crash"
            count(running, verdict, {})
            _show(
                console,
                {
                    "seed": running,
                    "verdict": verdict,
                    "detail": f"no word in {SECONDS_PER_PROGRAM + GRACE_SECONDS} s"
                    if silent
                    else f"the process ended with status {code}",
                    "source": _source(running, options),
                },
            )
        elif code and left:
            raise SystemExit(f"the worker ended with status {code} before a program began")
    return tally


def _show(console: Console, message: dict[str, Any]) -> None:
    console.rule(f"seed {message['seed']}: {message['verdict']}")
    console.print(message["detail"], markup=False, highlight=False)
    console.print(message.get("source", ""), markup=False, highlight=False, soft_wrap=True)


def _source(seed: int, options: argparse.Namespace) -> str:
    """The whole program of a seed, from a process of its own, minimised where every candidate gets
    one, since this one may not survive."""
    return subprocess.run(
        _command(options, 2, fatal=True, seeds=[seed]),
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    ).stdout


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        found += range(int(first or 0), int(last)) if colon else [int(first)]
    return found


def main() -> int:
    """The command line; the exit status is 1 when something failed."""
    parser = argparse.ArgumentParser(description="random programs on every mesh against one device")
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=_seeds("0:1000"),
        help="first:last+1, or single ones, separated by commas",
    )
    parser.add_argument(
        "--policy",
        choices=("auto", "reduce", "explicit"),
        help="for all programs; else each seed chooses",
    )
    parser.add_argument("--mesh", help="for all programs, as 2x4; else each seed chooses")
    parser.add_argument("--batch", type=int, default=100, help="programs of one process")
    parser.add_argument(
        "--memory", type=float, default=4.0, help="GiB after which a process is replaced"
    )
    parser.add_argument(
        "--minimise", type=int, default=180, metavar="SECONDS", help="for minimising one failure"
    )
    parser.add_argument(
        "--no-minimise", action="store_true", help="print failing programs as they are"
    )
    options = parser.parse_args()
    console = Console()
    tally = fuzz(options.seeds, options, console)
    took = f"{len(tally.programs)} programs in {time.monotonic() - tally.started:.0f} s"
    console.print(f"{took}: {tally.line()}", highlight=False)
    for column in (2, 3):
        console.print(f"  {tally.counts(column)}", highlight=False)
    if tally.failed:
        console.print(f"failed: --seeds {','.join(map(str, tally.failed))}", highlight=False)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
