"""Steps of everyday models: our plan beside an expert's `jax.jit`, both as the TPU compiler makes
them ahead of time.

    python -m benchmarks.steps                  # all steps
    python -m benchmarks.steps gpt_data clip    # some
    python -m benchmarks.steps gpt_data --save folder    # keeps the compiled programs' text
    python -m benchmarks.steps gpt_data --sides sbp --collectives   # of plan and compiled program
    python -m benchmarks.steps gpt_data --sides sbp free            # with types and without

`sbp` has the expert's types of arguments and results and nothing else; `expert` is `jax.jit` with
constraints on activations; `shard_map` is written by hand, where somebody has; `jax` is `jax.jit`
without constraints. `free` runs only where it is named: `sbp` without any types, within the memory
that the plan with types holds; its figures are over those of `sbp`. Each other figure of ours is
over that of the better expert. `products` are the matrix products and convolutions; those of the
side that takes the least for them are the floor of the step. No TPU is needed, only `libtpu`.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo_time import CHIPS, StepTime, step_time
from benchmarks.plan_collectives import compared as compared_collectives
from benchmarks.plan_collectives import table
from benchmarks.steps.program import Step
from benchmarks.steps.suite import SUITE

SIDES = ("expert", "shard_map", "jax", "sbp", "free")
EXPERTS = ("expert", "shard_map")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A compiled program: its step, and the bytes of device memory that it needs."""

    step: StepTime
    memory: float

    def uncounted(self) -> set[str]:
        """The kinds of what has no estimate: names without the compiler's numbers."""
        return {re.sub(r"[.\d]+$", "", name) for name in self.step.unknown}

    def __str__(self) -> str:
        s = self.step
        unknown = f"; not counted: {', '.join(s.unknown)}" if s.unknown else ""
        return (
            f"{s.seconds * 1e3:9.3f} ms, {s.cycles / 1e6:8.2f} Mcycles"
            f" ({s.products / 1e6:.2f} in products), exposed"
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


def compiled_side(
    side: str,
    step: Step,
    mesh: Any,
    *,
    limit: float | None = None,
    with_collectives: bool = False,
) -> tuple[Any, float | None]:
    """One side's program and, of ours, the memory of its plan; prints what ours was planned to be,
    and with `with_collectives` a table of its collectives. `limit` is the memory that `free` may
    hold by its plan; None for what the plan with types holds."""
    if side == "shard_map":
        return step.hand_written(mesh), None
    if side not in ("sbp", "free"):
        return step.expert(mesh, with_marks=side == "expert"), None
    if side == "free" and limit is None:
        limit = step.planned(mesh).cost.peak_memory_bytes
    start = time.perf_counter()
    if side == "free":
        plan = step.planned(mesh, pinned=False, memory_limit=limit)
    else:
        plan = step.planned(mesh)
    took = time.perf_counter() - start
    if side == "free":
        print(f"    chose {_chosen(plan, step)}")
    cost = plan.cost
    print(
        f"    planned in {took:.1f} s: {cost.seconds * 1e3:.3f} ms,"
        f" {cost.bytes_per_device / MIB:.1f} MiB sent, {cost.peak_memory_bytes / MIB:.1f} MiB held"
    )
    compiled = plan.lower().compile()
    if with_collectives:
        print("\n".join(table(compared_collectives(plan, compiled.as_text()))))
    return compiled, cost.peak_memory_bytes


def _chosen(plan: Any, step: Step) -> str:
    """The shardings of a plan's arguments, each with its number of leaves and their global size,
    most bytes first."""
    sizes: dict[str, list[int]] = {}
    leaves = jax.tree.leaves(plan.in_shardings), jax.tree.leaves(step.avals)
    for sharding, aval in zip(*leaves, strict=True):
        spec = f"({', '.join(map(str, sharding.spec))})"
        sizes.setdefault(spec, []).append(math.prod(aval.shape) * aval.dtype.itemsize)
    rows = sorted(sizes.items(), key=lambda row: -sum(row[1]))
    return "; ".join(f"{spec} {len(s)} leaves, {sum(s) / MIB:.1f} MiB" for spec, s in rows)


def compared(ours: Measured, *experts: Measured) -> dict[str, float]:
    """Ours over the better expert, figure by figure. Steps of which one has work without an
    estimate of a kind that the other has not do not compare, and are left out."""
    ratios = {
        "bytes": ours.step.bytes_per_device
        / max(1.0, min(e.step.bytes_per_device for e in experts)),
        "memory": ours.memory / min(e.memory for e in experts),
    }
    comparable = [e.step.seconds for e in experts if e.uncounted() == ours.uncounted()]
    if comparable:
        ratios["step"] = ours.step.seconds / min(comparable)
    return ratios


def _words(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {value:.2f}" for what, value in ratios.items())


def _run(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Compiles the sides of a step and prints their figures; returns the ratios, if sbp and an
    expert are among them."""
    step, folder = SUITE[name](), args.save
    mesh, found, predicted, limit = step.devices(), {}, None, None
    print(name, flush=True)
    for side in sorted(args.sides, key=SIDES.index):
        if side == "shard_map" and step.by_hand is None:
            continue
        try:
            compiled, planned = compiled_side(
                side, step, mesh, limit=limit, with_collectives=args.collectives
            )
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            print(f"  {side:9s} does not compile: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        found[side] = measured(compiled, step, folder and folder / f"{name}.{side}.hlo")
        print(f"  {side:9s}{found[side]}", flush=True)
        if planned:
            share = planned / found[side].memory
            print(f"    planned memory is {share:.2f} of the memory held", flush=True)
            if side == "sbp":
                predicted, limit = share, planned
    if found:
        floor = min(m.step.products for m in found.values()) / CHIPS[step.chip].hertz
        print(f"  floor    {floor * 1e3:9.3f} ms of products")
    if "sbp" in found and "free" in found:
        print(f"  free/sbp: {_words(compared(found['free'], found['sbp']))}", flush=True)
    experts = [found[side] for side in EXPERTS if side in found]
    if not experts or "sbp" not in found:
        return {}
    ratio = compared(found["sbp"], *experts)
    void = "" if "step" in ratio else "; step void: not counted on one side only"
    print(f"  sbp/better expert: {_words(ratio)}{void}", flush=True)
    return {**ratio, "planned memory": predicted} if predicted else ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("steps", nargs="*", help=f"of: {', '.join(SUITE)}")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES[:4]))
    parser.add_argument("--save", type=Path, help="a folder for the texts of the programs")
    parser.add_argument(
        "--collectives", action="store_true", help="show those of our plan beside the compiled ones"
    )
    args = parser.parse_args()
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    ratios: dict[str, list[float]] = {"bytes": [], "step": [], "memory": [], "planned memory": []}
    for name in args.steps or SUITE:
        for what, value in _run(name, args).items():
            ratios[what].append(value)
    if len(ratios["bytes"]) > 1:
        means = {what: math.exp(sum(map(math.log, r)) / len(r)) for what, r in ratios.items() if r}
        counts = ", ".join(f"{len(r)} of {what}" for what, r in ratios.items())
        print(f"geometric means: {_words(means)} ({counts})")
        predicted = ratios["planned memory"]
        errors = [abs(p - 1) for p in predicted]
        print(
            f"planned memory over held: {min(predicted):.2f} to {max(predicted):.2f}, median error"
            f" {statistics.median(errors):.2f}"
        )


if __name__ == "__main__":
    main()
