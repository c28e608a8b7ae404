"""Steps of everyday models: our plan beside an expert's `jax.jit`, both as the TPU compiler makes
them ahead of time.

    python -m benchmarks.steps                  # all steps
    python -m benchmarks.steps gpt_data clip    # some
    python -m benchmarks.steps gpt_data --save folder    # keeps the compiled programs' text

`sbp` has the expert's types of arguments and results and nothing else; `expert` is `jax.jit` with
constraints on activations; `jax` is `jax.jit` without them. No TPU is needed, only `libtpu`.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo_time import StepTime, step_time
from benchmarks.steps.program import Step
from benchmarks.steps.suite import SUITE

SIDES = ("expert", "jax", "sbp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A compiled program: its step, and the bytes of device memory that it needs."""

    step: StepTime
    memory: float

    def __str__(self) -> str:
        s = self.step
        unknown = f"; not counted: {', '.join(s.unknown)}" if s.unknown else ""
        return (
            f"{s.seconds * 1e3:9.3f} ms, {s.cycles / 1e6:8.2f} Mcycles, exposed"
            f" {s.exposed * 1e3:7.3f} ms, {s.bytes_per_device / MIB:8.1f} MiB sent,"
            f" {self.memory / MIB:8.1f} MiB held{unknown}"
        )


def measured(compiled: Any, step: Step, save: Path | None = None) -> Measured:
    """Reads a compiled program."""
    text = compiled.as_text()
    if save:
        save.write_text(text, encoding="utf-8")
    memory = compiled.memory_analysis()
    return Measured(
        step=step_time(text, math.prod(n for _, n in step.mesh), step.chip),
        memory=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
    )


def compiled_side(side: str, step: Step, mesh: Any) -> Any:
    """One side's program; prints what ours was planned to be."""
    if side != "sbp":
        return step.expert(mesh, with_marks=side == "expert")
    start = time.perf_counter()
    plan = step.planned(mesh)
    took = time.perf_counter() - start
    cost = plan.cost
    print(
        f"    planned in {took:.1f} s: {cost.seconds * 1e3:.3f} ms,"
        f" {cost.bytes_per_device / MIB:.1f} MiB sent, {cost.peak_memory_bytes / MIB:.1f} MiB held"
    )
    return plan.lower().compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("steps", nargs="*", help=f"of: {', '.join(SUITE)}")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--save", type=Path, help="a folder for the texts of the programs")
    args = parser.parse_args()
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    ratios: list[tuple[float, float, float]] = []
    for name in args.steps or SUITE:
        step = SUITE[name]()
        mesh, found = step.devices(), {}
        print(name, flush=True)
        for side in args.sides:
            save = args.save and args.save / f"{name}.{side}.hlo"
            found[side] = measured(compiled_side(side, step, mesh), step, save)
            print(f"  {side:7s}{found[side]}", flush=True)
        if {"expert", "sbp"} <= found.keys():
            ours, theirs = found["sbp"], found["expert"]
            ratio = (
                ours.step.bytes_per_device / max(1.0, theirs.step.bytes_per_device),
                ours.step.seconds / theirs.step.seconds,
                ours.memory / theirs.memory,
            )
            ratios.append(ratio)
            print(
                "  sbp/expert: bytes {:.2f}, step {:.2f}, memory {:.2f}".format(*ratio), flush=True
            )
    if len(ratios) > 1:
        means = [
            math.exp(sum(map(math.log, column)) / len(ratios))
            for column in zip(*ratios, strict=True)
        ]
        print("geometric means: bytes {:.2f}, step {:.2f}, memory {:.2f}".format(*means))


if __name__ == "__main__":
    main()
