"""Chooses the cases of the gate by their cost and by the lines that they run.

    python -m tests.mutants.choose --lines=FOLDER --seconds=FILE

A test keeps as many of its cases as fit into `--each` CPU seconds. It keeps at least one, unless
that one costs more than `--most`. The program then adds cases until the gate runs every line of
`sbp` that any case below `--most` runs, and the cases that alone find a mutant (`verdicts.tsv`).
Lines of the list stay where their test was not measured: those for TPU and for several processes.

It writes `gate.txt` and `newest.txt`. With the newest JAX the gate runs `NEWEST_TESTS`, and cases
that run all lines of the modules that touch JAX's internals.
"""

import argparse
import csv
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Container
from pathlib import Path

from tests.case_seconds import read_table
from tests.gate import LIST, drawn
from tests.lock import locked
from tests.mutants.lines import Lines, recorded
from tests.mutants.mutate import ROOT
from tests.mutants.run import VERDICTS

NEWEST = ROOT / "tests" / "newest.txt"
NEWEST_TESTS = (
    "tests/signatures/test_registry.py::test_every_primitive_has_a_rule_or_a_reason",
    "tests/signatures/test_registry.py::test_calls_with_a_body_are_typed_inside",
    "tests/signatures/test_registry.py::test_facts_decide_rows",  # every sample is traced
    "tests/run/test_programs.py::test_equals_one_device",
    "tests/run/test_programs.py::test_all_inputs_split",
    "tests/shardmap/test_region_check.py::test_the_divisor_of_a_mean_may_be_a_cast",
    "tests/shardmap/test_region_check.py::test_integers_of_64_bits_are_those_of_jax",
)
OTHER_PACKAGES = re.compile(
    r"\b(flax|optax|equinox|orbax|benchmarks|examples|nbformat|grimp|sbp\.moe)\b"
)
"""What tests import that the newest JAX is tested without."""


def kept(seconds: dict[str, float], each: float, most: float) -> dict[str, list[str]]:
    """For each test the cases that it keeps by their cost, in the order in which they are drawn."""
    tests: dict[str, list[str]] = defaultdict(list)
    for case in sorted(seconds, key=drawn):
        tests[case.split("[")[0]].append(case)
    found: dict[str, list[str]] = {}
    for test, cases in tests.items():
        total, count = 0.0, 0
        while count < len(cases) and seconds[cases[count]] <= most:
            total += seconds[cases[count]]
            if count and total > each:
                break
            count += 1
        found[test] = cases[:count]
    return found


def covering(
    lines: dict[str, Lines], seconds: dict[str, float], chosen: set[str], most: float
) -> tuple[list[str], int]:
    """Cases that run the lines which the chosen ones do not, and how many lines are left out."""
    have: Lines = defaultdict(int)
    every: Lines = defaultdict(int)
    for case, found in lines.items():
        for file, bits in found.items():
            every[file] |= bits
            if case in chosen:
                have[file] |= bits

    def gain(case: str) -> float:
        new = sum((bits & ~have[file]).bit_count() for file, bits in lines[case].items())
        return new / max(0.05, seconds[case])

    more: list[str] = []
    queue = [(-gain(case), case) for case in lines if seconds.get(case, most + 1) <= most]
    heapq.heapify(queue)
    while queue:
        _, case = heapq.heappop(queue)
        now = -gain(case)
        if now == 0:
            continue
        if queue and now > queue[0][0]:
            heapq.heappush(queue, (now, case))
            continue
        more.append(case)
        for file, bits in lines[case].items():
            have[file] |= bits
    left = sum((bits & ~have[file]).bit_count() for file, bits in every.items())
    return more, left


def finders() -> set[str]:
    """Cases that found a mutant which no case of the gate found."""
    with VERDICTS.open() as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    return {row["all"] for row in rows if not row["gate"] and "::" in row["all"]}


def measured(line: str, tests: Container[str]) -> bool:
    """Whether a line of the list is of a test that was measured."""
    return line.split("[")[0] in tests or line.rpartition(" ")[0] in tests


def asks_for_more(test: str) -> bool:
    """Whether a test file imports packages that the newest JAX is tested without."""
    files = {test, *(name for name in locked()[test]["ran"] if name.endswith(".py"))}
    return any(OTHER_PACKAGES.search((ROOT / name).read_text("utf-8")) for name in files)


def of_newest(lines: dict[str, Lines], seconds: dict[str, float], most: float) -> list[str]:
    """The cases that the gate runs with the newest JAX."""
    able = {file for file in {case.split("::")[0] for case in lines} if not asks_for_more(file)}
    inside = {
        case: {file: bits for file, bits in found.items() if file.startswith("sbp/_jax")}
        for case, found in lines.items()
        if case.split("::")[0] in able
    }
    return [*NEWEST_TESTS, *sorted(covering(inside, seconds, set(), most)[0])]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.choose", description=__doc__)
    parser.add_argument("--lines", type=Path, required=True, help="of tests.mutants.lines")
    parser.add_argument("--seconds", type=Path, required=True, help="of tests.case_seconds")
    parser.add_argument("--each", type=float, default=3.0, help="CPU seconds of a test")
    parser.add_argument("--most", type=float, default=8.0, help="CPU seconds of a case")
    options = parser.parse_args()
    seconds = {case: row[0] for case, row in read_table(options.seconds).items()}
    lines = dict(recorded(options.lines))
    tests = kept(seconds, options.each, options.most)
    chosen = {case for cases in tests.values() for case in cases}
    more, left = covering(lines, seconds, chosen, options.most)
    every = Counter(case.split("[")[0] for case in seconds)
    fewer = {t: len(cases) for t, cases in sorted(tests.items()) if len(cases) < every[t]}
    named = sorted({*more, *(finders() & seconds.keys() - chosen)})
    assert all(case.split("[")[0] in fewer for case in named)
    listed = [f"{test} {count}" for test, count in fewer.items()]
    others = [line for line in LIST.read_text("utf-8").splitlines() if not measured(line, every)]
    LIST.write_text("".join(f"{line}\n" for line in [*others, *listed, *named]), "utf-8")
    ours = {case: lines[case] for case in chosen.union(named) if case in lines}
    newest = of_newest(ours, seconds, options.most)
    NEWEST.write_text("".join(f"{test}\n" for test in newest), "utf-8")
    total = sum(seconds[case] for case in chosen.union(named))
    print(
        f"{len(chosen) + len(named)} of {len(seconds)} cases, {total:.0f} of"
        f" {sum(seconds.values()):.0f} CPU seconds; {left} lines that other cases run are left out"
    )


if __name__ == "__main__":
    main()
