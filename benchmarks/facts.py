"""What must stay when the package is changed without a change of its behavior: plans, verdicts on
programs written by hand, and explanations of faults.

    python -m benchmarks.facts                  # prints what differs from benchmarks/facts.txt
    python -m benchmarks.facts steps fuzz       # some sections
    python -m benchmarks.facts --write          # keeps the facts as they are

A fact is one line, `section/name | value`. Plans are digests of their text with bytes sent and held
per device; no TPU and no `libtpu` is needed. A change of a fact needs its reason in the commit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is loaded, hence the imports below
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8")
)

import jax
from jax.sharding import AbstractMesh

import sbp
from benchmarks import gshard_ref, planning_speed, repro
from benchmarks.fault_suite import FOLDER, checked, faulty_programs
from benchmarks.steps.suite import SUITE
from benchmarks.steps.unseen import UNSEEN
from sbp.errors import Diagnostic, SbpError
from sbp.source.reader import source_text
from tests.fuzz.generate import generate
from tests.fuzz.oracle import jitted
from tests.gallery.repair import load as load_gallery
from tests.shardmap import test_practice as practice
from tests.shardmap.programs import collection
from tests.shardmap.programs.kinds import mapped, mesh
from tests.shardmap.programs.wrong.counts import NOTED

Facts = Iterator[tuple[str, str]]

FILE = Path(__file__).with_name("facts.txt")
FUZZED = 300
"""Programs of the fuzzer, by seeds from 0 on."""


def _plan(plan: Any) -> str:
    """A plan's digest with its bytes."""
    digest = hashlib.sha256(str(plan).encode()).hexdigest()[:16]
    cost = plan.cost
    return f"{digest} sends {cost.bytes_per_device:.0f} holds {cost.peak_memory_bytes:.0f}"


def _abstract(sizes: Sequence[tuple[str, int]]) -> AbstractMesh:
    return AbstractMesh(tuple(n for _, n in sizes), tuple(axis for axis, _ in sizes))


def steps() -> Facts:
    """The steps of `benchmarks.steps`."""
    for name, make in (SUITE | UNSEEN).items():
        step = make()
        yield name, _plan(step.planned(_abstract(step.mesh), hardware=f"tpu-{step.chip}"))


def reductions() -> Facts:
    """The programs of `benchmarks.repro`. Most of them have a reduction that can come late."""
    for name, case in repro.CASES.items():
        for label, options in case.choices.items():
            options = {"hardware": f"tpu-{repro.CHIP}", **options}
            yield f"{name}, {label}", _plan(case.plan(_abstract(case.mesh), options))


def gshard() -> Facts:
    """The training step of GShard, of 36 layers in a loop."""
    for name in ("one-axis", "two-axes"):
        case = planning_speed.CASES[name]
        arguments = gshard_ref.abstract_arguments(case.config)
        yield name, _plan(planning_speed.step(case).plan(*arguments))


def fuzz() -> Facts:
    """Random programs."""
    for seed in range(FUZZED):
        try:
            f, arguments = jitted(generate(seed))
            yield f"{seed:03}", _plan(f.plan(*arguments))
        except SbpError as error:
            yield f"{seed:03}", error.code
        if seed % 20 == 0:
            jax.clear_caches()


def _line(found: Diagnostic) -> str:
    """A finding: severity, code, and the source at its primary label."""
    at = source_text(found.primary.span) if found.primary else ""
    return f"{found.severity} {found.code} `{at}`"


def _checked(program: Callable[..., Any], args: Any, mesh: Any) -> str:
    """The verdict on a program written by hand."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    try:
        report = sbp.check_shard_map(program, *shapes, mesh=mesh)
    except (ValueError, TypeError) as error:  # JAX refuses it
        return type(error).__name__
    return "; ".join([f"{'ok' if report.ok else 'wrong'}", *map(_line, report.diagnostics)])


def shardmap() -> Facts:
    """The programs of `tests/shardmap`."""
    modules = collection.MODULES
    for name, pair in collection.pairs(m for m in modules if hasattr(m, "PAIRS")).items():
        for which in ("wrong", "right"):
            for vma in (True, False) if pair.vma is None else (pair.vma,):
                key = f"{name} {which} {vma}"
                yield key, _checked(pair.program(vma, which), pair.args, mesh())
    for name, program in collection.programs(m for m in modules if hasattr(m, "PROGRAMS")).items():
        make = getattr(program, "make", None) or program.program
        for vma in program.vma:
            yield f"{name} {vma}", _checked(make(vma), program.args, mesh())
    for name, (body, _, ins, outs, args, _) in NOTED.items():
        yield name, _checked(mapped(body, ins, outs)(False), args, mesh())


def everyday() -> Facts:
    """The programs of `tests/shardmap/practice` and their usual mistakes."""
    for name, case in practice.CASES.items():
        devices = practice.devices(case.mesh)
        for mistake in (None, *case.mistakes):
            program = practice.mapped(case, mistake, devices)
            yield f"{name}, {mistake or 'right'}", _checked(program, case.args(), devices)


def _explained(findings: Sequence[Diagnostic]) -> str:
    """Findings with their labels, and the first help with its bytes."""
    texts: list[str] = []
    for found in findings:
        core = " ".join(sorted(f"`{source_text(label.span)}`" for label in found.labels))
        help_ = f"; {found.helps[0].text}, {found.helps[0].bytes_per_device}" if found.helps else ""
        texts.append(f"{found.severity} {found.code} {core}{help_}")
    return "; ".join(texts) or "nothing"


def faults() -> Facts:
    """Programs with one fault."""
    for folder in (FOLDER, FOLDER.with_name("faults_unseen")):
        for program in faulty_programs(folder):
            yield program.name, _explained(checked(program.name, program.faulty).found)


def gallery() -> Facts:
    """The broken programs of `tests/gallery`."""
    for name, entry in load_gallery().items():
        yield name, _explained(entry.check().diagnostics)


SECTIONS: Mapping[str, Callable[[], Facts]] = {
    f.__name__: f for f in (steps, reductions, gshard, fuzz, shardmap, everyday, faults, gallery)
}


def made(names: Sequence[str]) -> dict[str, str]:
    """The facts of some sections."""
    facts: dict[str, str] = {}
    for section in names:
        start = time.process_time()
        with warnings.catch_warnings(action="ignore"):
            facts |= {
                f"{section}/{name}": " ".join(text.split()) for name, text in SECTIONS[section]()
            }
        print(f"{section}: {time.process_time() - start:.0f} CPU seconds", flush=True)
    return facts


def read() -> dict[str, str]:
    """The facts that are kept."""
    lines = FILE.read_text("utf-8").splitlines() if FILE.exists() else []
    return dict(line.split(" | ", 1) for line in lines)  # pyright: ignore


def differences(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each fact that differs: its name, what it was and what it is."""
    return [
        f"{name}\n  was {was.get(name, 'absent')}\n  is  {now.get(name, 'absent')}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sections", nargs="*", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--write", action="store_true", help="keep the facts as they are")
    args = parser.parse_args()
    names = args.sections or list(SECTIONS)
    if unknown := set(names) - SECTIONS.keys():
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    kept = read()
    was = {name: fact for name, fact in kept.items() if name.split("/")[0] in names}
    now = made(names)
    found = differences(was, now)
    print("\n".join([*found, f"{len(now)} facts, {len(found)} differ"]))
    if args.write:
        facts = {name: fact for name, fact in kept.items() if name not in was} | now
        lines = [f"{name} | {fact}\n" for name, fact in sorted(facts.items())]
        FILE.write_text("".join(lines), encoding="utf-8")
    return int(bool(found) and not args.write)


if __name__ == "__main__":
    raise SystemExit(main())
