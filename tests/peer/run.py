"""Runs JAX's own tests through `sbp.jit` and says what passed, what failed and what does not apply.

python -m tests.peer.run [--share 0.25] [--only EXPRESSION] [--pins SEED] [--jobs 2]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
MODES = {"free": "free types", "pins": "random types of the arguments"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test.

    Arguments:
      name: module, class and test.
      kind: "passed", "failed" or "skipped".
      text: the first line of the failure, or JAX's reason for skipping.
      calls: how many calls went through `sbp.jit`.
      differ: whether two arrays were compared and found different.
    """

    name: str
    kind: str
    text: str
    calls: int
    differ: bool


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some tests do not apply.

    Arguments:
      tests: a pattern of names, as `fnmatch` takes it.
      why: the reason.
      plain: whether they fail with plain `jax.jit` as well.
      modes: where they fail; all modes if it is empty.
    """

    tests: str
    why: str
    plain: bool = False
    modes: tuple[str, ...] = ()

    def covers(self, test: str, mode: str) -> bool:
        """Whether it excuses this test in this mode."""
        return fnmatchcase(test, self.tests) and (not self.modes or mode in self.modes)


def reasons(path: Path = HERE / "reasons.toml") -> tuple[Reason, ...]:
    """The reasons of the file, in its order."""
    return tuple(
        Reason(
            tests=entry["tests"],
            why=entry["why"],
            plain=entry.get("plain", False),
            modes=tuple(entry.get("modes", ())),
        )
        for entry in tomllib.loads(path.read_text("utf-8")).get("reason", ())
    )


def outcome(case: ElementTree.Element) -> Outcome:
    """The outcome that an element `testcase` of JUnit's XML states."""
    given = {p.get("name"): p.get("value") for p in case.iter("property")}
    failure = next((found for found in case if found.tag in ("failure", "error")), None)
    skipped = case.find("skipped")
    module = (case.get("classname") or "").removeprefix("tests.peer.jax_tests.")
    at = failure if failure is not None else skipped
    return Outcome(
        name=f"{module}.{case.get('name')}",
        kind="failed" if failure is not None else "passed" if skipped is None else "skipped",
        text=" ".join((at.get("message") or "").split())[:200] if at is not None else "",
        calls=int(given.get("calls") or 0),
        differ=given.get("values") == "differ",
    )


def run(mode: str, options: argparse.Namespace, tests: Sequence[str] = ()) -> dict[str, Outcome]:
    """Runs the tests in a process of their own.

    Arguments:
      mode: "jax", "free" or "pins".
      options: the command line's.
      tests: node ids; all tests if empty.
    """
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        # The files are JAX's: neither this project's markers nor its warnings as errors apply.
        command = [
            *[sys.executable, "-m", "pytest", "-q", "--tb=short", "-o", "addopts=", "--no-header"],
            *["-p", "no:warnings", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"],
            *["-n", str(options.jobs), "--dist", "worksteal", f"--junitxml={xml}"],
            *(["-k", options.only] if options.only else []),
            *(tests or [str(HERE / "jax_tests")]),
        ]
        # JAX's tests expect that no compilation cache is in use.
        settings = {
            "JAX_ENABLE_COMPILATION_CACHE": 0,
            "SBP_PEER": mode,
            "SBP_PEER_PINS": options.pins,
            "SBP_PEER_SHARE": options.share,
        }
        done = subprocess.run(
            command,
            env={**os.environ, **{key: str(value) for key, value in settings.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if options.verbose:
            print(done.stdout)
        if not xml.exists() or done.returncode not in (0, 1):
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout}")
        return {o.name: o for o in map(outcome, ElementTree.parse(xml).iter("testcase"))}


def node(name: str) -> str:
    """The node id of a test, for pytest."""
    module, group, test = name.split(".", 2)
    return f"{HERE / 'jax_tests' / module}.py::{group}::{test}"


def faults(
    mode: str,
    found: Mapping[str, Outcome],
    plain: Mapping[str, Outcome],
    listed: Sequence[Reason],
    whole: bool,
) -> list[str]:
    """What is wrong with a run.

    Arguments:
      mode: "free" or "pins".
      found: the outcomes in this mode.
      plain: the outcomes with plain `jax.jit` of all tests that failed in `found`.
      listed: the reasons.
      whole: whether all tests ran, so that a reason which names none of them is an error.
    """
    wrong: list[str] = []
    for name, o in found.items():
        why = next((r for r in listed if r.covers(name, mode)), None)
        if o.kind == "passed" and why:
            wrong.append(f"{name} passes, but reasons.toml has {why.tests!r}")
        if o.kind == "failed":
            too = plain[name].kind == "failed"
            if why is None:
                also = " (with plain jax.jit too)" if too else ""
                wrong.append(f"{name} fails{also}, and no reason names it: {o.text}")
            elif why.plain and not too:
                wrong.append(f"{name}: reasons.toml says that plain jax.jit fails too; it passes")
            if o.differ and not too:
                wrong.append(f"{name}: a wrong value: {o.text}")
    for r in listed:
        if (
            whole
            and not any(r.covers(name, mode) for name in found)
            and not (r.modes and mode not in r.modes)
        ):
            wrong.append(f"reasons.toml: {r.tests!r} names no test")
    return wrong


def show(mode: str, found: Mapping[str, Outcome], listed: Sequence[Reason], seconds: float) -> None:
    """Prints the outcomes of a run, and a reason for each group that does not apply."""
    count = Counter(o.kind for o in found.values())
    covered = Counter[str]()
    for name, o in found.items():
        why = next((r for r in listed if r.covers(name, mode)), None)
        if o.kind == "failed" and why:
            covered[why.why] += 1
        elif o.kind == "skipped":
            covered[f"JAX skips it: {o.text}"] += 1
    excused = covered.total() - count["skipped"]
    reached = [o for o in found.values() if o.kind == "passed" and o.calls]
    print(
        f"{MODES[mode]}: {count['passed']} passed ({len(reached)} of them call sbp.jit,"
        f" {sum(o.calls for o in reached)} calls), {count['failed'] - excused} failed,"
        f" {covered.total()} not applicable; {seconds:.0f} s"
    )
    for why, tests in covered.most_common():
        print(f"  {tests:4d} not applicable: {why}")


def main() -> int:
    """Runs both modes and prints what they found; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer.run", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="the part of the tests that run")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--pins", default="1", help="the seed of random types")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--verbose", action="store_true", help="print pytest's output")
    options = parser.parse_args()
    listed = reasons()
    plain: dict[str, Outcome] = {}
    wrong: list[str] = []
    total, differ, start = Counter[str](), 0, time.monotonic()
    for mode in options.modes:
        began = time.monotonic()
        found = run(mode, options)
        failing = [name for name, o in found.items() if o.kind == "failed" and name not in plain]
        if failing:
            plain |= run("jax", options, [node(name) for name in failing])
        wrong += [
            f"{MODES[mode]}: {text}"
            for text in faults(mode, found, plain, listed, options.share == 1 and not options.only)
        ]
        show(mode, found, listed, time.monotonic() - began)
        total.update(o.kind for o in found.values())
        differ += sum(o.differ and plain[o.name].kind != "failed" for o in found.values())
    print(f"{differ} wrong values; {len(wrong)} errors", *wrong, sep="\n  ")
    # In pytest's form, which .ci/run adds up.
    counts = (
        f"{total['passed']} passed, {max(0, total.total() - total['passed'] - len(wrong))} skipped"
    )
    counts = f"{len(wrong)} failed, {counts}" if wrong else counts
    print(f"=== {counts} in {time.monotonic() - start:.1f}s ===")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
