"""Steps of everyday models: our plan beside an expert's `jax.jit`, both as the TPU compiler makes
them ahead of time.

    python -m benchmarks.steps                  # all steps
    python -m benchmarks.steps gpt_data clip    # some
    python -m benchmarks.steps gpt_data --save folder    # keeps the compiled programs' text
    python -m benchmarks.steps gpt_data --sides sbp --collectives   # of plan and compiled program
    python -m benchmarks.steps gpt_data --sides sbp free            # with types and without
    python -m benchmarks.steps adapters --memory-limit 1930    # ours may hold that many MiB
    python -m benchmarks.steps --write          # and keeps the figures of docs/benchmarks.md

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
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

# The first one sets the ahead-of-time environment before JAX is used.
from benchmarks.gshard_bytes import MIB, held_bytes
from benchmarks.hlo.schedule import step_time
from benchmarks.plan_collectives import compared as compared_collectives, table
from benchmarks.steps.figures import (
    EXPERTS,
    Figures,
    Ratios,
    compared,
    floor,
    geometric_means,
    read,
    write,
)
from benchmarks.steps.program import Step
from benchmarks.steps.suite import SUITE
from benchmarks.steps.unseen import UNSEEN

STEPS = SUITE | UNSEEN
SIDES = ("expert", "shard_map", "jax", "sbp", "free")


def measured(compiled: Any, step: Step, save: Path | None = None) -> Figures:
    """Reads a compiled program."""
    text = compiled.as_text()
    if save:
        save.write_text(text, encoding="utf-8")
    devices = math.prod(n for _, n in step.mesh)
    return Figures.of(step_time(text, devices, step.chip), held_bytes(compiled), step.chip)


def compiled_side(
    side: str,
    step: Step,
    mesh: Any,
    *,
    limit: float | None = None,
    with_collectives: bool = False,
) -> tuple[Any, float | None]:
    """One side's program and, of ours, the memory of its plan; prints what ours was planned to be,
    and with `with_collectives` a table of its collectives. `limit` is the memory that ours may hold
    by its plan; None for no limit, and for `free` for what the plan with types holds."""
    if side == "shard_map":
        return step.hand_written(mesh), None
    if side not in ("sbp", "free"):
        return step.expert(mesh, with_marks=side == "expert"), None
    if side == "free" and limit is None:
        limit = step.planned(mesh).cost.peak_memory_bytes
    start = time.perf_counter()
    plan = step.planned(mesh, pinned=side != "free", memory_limit=limit)
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


def _words(ratios: Ratios) -> str:
    return ", ".join(f"{what} {value:.2f}" for what, value in ratios.items())


def _run(name: str, args: argparse.Namespace) -> tuple[Ratios, float | None]:
    """Compiles the sides of a step and prints their figures; returns the ratios, if sbp and an
    expert are among them, and the planned memory over what is held, if sbp is."""
    step, folder = STEPS[name](), args.save
    mesh, found, predicted = step.devices(), {}, None
    limit = args.memory_limit and args.memory_limit * MIB
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
            share = planned / found[side].held
            print(f"    planned memory is {share:.2f} of the memory held", flush=True)
            if side == "sbp":
                predicted, limit = share, limit or planned
    if found:
        print(f"  floor    {floor(found.values()) * 1e3:9.3f} ms of products")
    if "sbp" in found and "free" in found:
        print(f"  free/sbp: {_words(compared(found['free'], found['sbp']))}", flush=True)
    if args.write:
        write({name: found}, metadata.version("libtpu"))
        found = read()[name]
    experts = [found[side] for side in EXPERTS if side in found]
    if not experts or "sbp" not in found:
        return {}, predicted
    ratio = compared(found["sbp"], *experts)
    void = "" if "step" in ratio else "; step void: not counted on one side only"
    print(f"  sbp/better expert: {_words(ratio)}{void}", flush=True)
    return ratio, predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("steps", nargs="*", help=f"of: {', '.join(STEPS)}")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES[:4]))
    parser.add_argument("--save", type=Path, help="a folder for the texts of the programs")
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the figures, and compare with the kept ones of sides that did not run",
    )
    parser.add_argument(
        "--memory-limit", type=float, metavar="MIB", help="what our plans may hold on one device"
    )
    parser.add_argument(
        "--collectives", action="store_true", help="show those of our plan beside the compiled ones"
    )
    args = parser.parse_args()
    if args.write and args.memory_limit:
        parser.error("the figures that are kept have no memory limit: leave out one of the two")
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    ran = [_run(name, args) for name in args.steps or STEPS]
    ratios = [ratio for ratio, _ in ran if ratio]
    predicted = [memory for _, memory in ran if memory]
    if len(ratios) > 1:
        means = [f"{what} {m:.2f} of {n}" for what, (m, n) in geometric_means(ratios).items()]
        print(f"geometric means: {', '.join(means)} steps")
    if len(predicted) > 1:
        errors = [abs(p - 1) for p in predicted]
        print(
            f"planned memory over held: {min(predicted):.2f} to {max(predicted):.2f}, median error"
            f" {statistics.median(errors):.2f}"
        )


if __name__ == "__main__":
    main()
