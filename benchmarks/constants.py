"""What constants of sbp decide: each is made smaller and larger, and the facts are made again.

    python -m benchmarks.constants
    python -m benchmarks.constants --only LOCAL_PASS TRIALS --jobs 2

The facts come from `benchmarks.facts`: plans of steps and of programs with late reductions, or
verdicts on programs written by hand. Each run uses a copy of the package with another value of one
constant. Its line names the facts that differ from `benchmarks/facts.txt`. For a plan, two numbers
follow: the bytes sent and the bytes held, each divided by the figure of the plan in that file.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PLANS = ("steps", "reductions")
WRITTEN = ("shardmap", "everyday")


class Constant(NamedTuple):
    """A constant, the other values to try, and the facts that it may change."""

    module: str
    value: str
    others: tuple[str, ...]
    sections: tuple[str, ...] = PLANS


CONSTANTS: dict[str, Constant] = {
    "STEP_LATENCIES": Constant("infer/cost", "3.0", ("1.5", "6.0")),
    "FUSED_FRACTION": Constant("infer/cost", "0.25", ("0.125", "0.5")),
    "FREE_FRACTION": Constant("infer/cost", "0.05", ("0.025", "0.1")),
    "FUSED_SHARE": Constant("infer/cost", "0.01", ("0.005", "0.02")),
    "COLLECTIVE_PASS": Constant("infer/space", "0.25, 0.01", ("0.125, 0.01", "0.5, 0.01")),
    "LOCAL_PASS": Constant("infer/space", "0.25, 0.01", ("0.25, 0.005", "0.25, 0.02")),
    "LOCAL_SECONDS": Constant("infer/space", "1e-9", ("5e-10", "2e-9")),
    "LARGE": Constant("plan/fit", "6000, 8", ("3000, 8", "12000, 8")),
    "AXIS_FACTOR": Constant("plan/fit", "6000, 8", ("6000, 4", "6000, 16")),
    "FREE": Constant("plan/fit", "0.001", ("0.0005", "0.002")),
    "NOTED": Constant("plan/fit", "0.01", ("0.005", "0.02")),
    "TRIALS": Constant("plan/fit", "16", ("8", "32")),
    "ORDERED_TYPES": Constant("plan/lower", "4", ("2", "8")),
    "WINDOW": Constant("solve/search", "48, 3", ("24, 3", "96, 3")),
    "PASSES": Constant("solve/search", "48, 3", ("48, 1", "48, 6")),
    "NUMBERS": Constant("handwritten/one_device", "3", ("1", "6"), WRITTEN),
    "SLICES": Constant("handwritten/one_device", "16", ("8", "32"), WRITTEN),
    "CHECKED_ELEMENTS": Constant("handwritten/emulation", "2**22", ("2**21", "2**23"), WRITTEN),
    "CHECKED_WORK": Constant("handwritten/emulation", "2**28", ("2**27", "2**29"), WRITTEN),
    "TOLERANCE": Constant(
        "handwritten/emulation",
        "{8: 1e-8, 4: 1e-3, 2: 1e-1, 1: 5e-1}",
        ("{8: 1e-9, 4: 2e-4, 2: 0.05, 1: 0.25}", "{8: 1e-7, 4: 5e-3, 2: 0.2, 1: 1.0}"),
        WRITTEN,
    ),
    "_POWERS": Constant(
        "handwritten/measured",
        "(0, 1, -1, 2, -2)",
        ("(0, 1, -1)", "(0, 1, -1, 2, -2, 3, -3)"),
        WRITTEN,
    ),
    "TRIED": Constant("handwritten/check", "24", ("12", "48"), WRITTEN),
    "DEPTH": Constant("handwritten/written_sizes", "6", ("3", "12"), WRITTEN),
}


def changed(name: str, constant: Constant, value: str, folder: Path) -> None:
    """Puts a copy of the package with another value of a constant into a folder."""
    shutil.copytree(ROOT / "sbp", folder / "sbp", ignore=shutil.ignore_patterns("__pycache__"))
    for other in ("benchmarks", "tests", "examples"):
        (folder / other).symlink_to(ROOT / other)
    path = folder / "sbp" / f"{constant.module}.py"
    line = rf"^((?:\w+, )?{name}(?:, \w+)?(?:: [^=]+)? = ){re.escape(constant.value)}$"
    text, count = re.subn(line, rf"\g<1>{value}", path.read_text("utf-8"), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{name} is not {constant.value} in {constant.module}.py")
    path.write_text(text, encoding="utf-8")


def compared(name: str, value: str) -> str:
    """The line of a constant with another value."""
    constant = CONSTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        changed(name, constant, value, Path(folder))
        command = [sys.executable, "-m", "benchmarks.facts", *constant.sections]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    if not lines or not lines[-1].endswith("differ"):
        return f"{name} = {value}: failed\n{ran.stderr[-2000:]}"
    return f"{name} = {value}: {'; '.join((lines[-1], *summary(lines)))}"


def summary(lines: list[str]) -> Iterator[str]:
    """Each fact that differs, for a plan with the ratios of its bytes."""
    for name, was, now in zip(lines, lines[1:], lines[2:], strict=False):
        if was.startswith("  was ") and now.startswith("  is  "):
            pairs = zip(numbers(was), numbers(now), strict=False)
            ratios = "/".join(f"{b / a:.3f}" if a else "?" for a, b in pairs)
            yield f"{name} {ratios}".strip()


def numbers(fact: str) -> list[float]:
    """The bytes that a plan sends and holds."""
    return [float(number) for number in re.findall(r"(?:sends|holds) (\d+)", fact)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(CONSTANTS), default=list(CONSTANTS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    arguments = parser.parse_args()
    trials = [(name, value) for name in arguments.only for value in CONSTANTS[name].others]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(lambda trial: compared(*trial), trials):
            print(line, flush=True)


if __name__ == "__main__":
    main()
