"""Whether of two plans of one program the one that we model to be faster is the faster one.

    python -m benchmarks.plan_order                    # all programs
    python -m benchmarks.plan_order optimiser experts  # some
    python -m benchmarks.plan_order --half unseen      # those that prices were not corrected on

Each program of `benchmarks.order_programs` and `benchmarks.order_unseen` is planned in three ways,
which gives three pairs. A way is named after its types of arguments; the plan may convert them. The
judge reads the seconds of a plan from the program that the TPU compiler makes of it ahead of time
(`benchmarks.hlo.schedule`). A pair counts where these are at least 5 % apart; it is right where our
modelled seconds have the same order.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

import sbp
from benchmarks.gshard_bytes import MIB  # sets the ahead-of-time environment before JAX is used
from benchmarks.hlo.schedule import step_time
from benchmarks.order_programs import TUNED, OrderProgram
from benchmarks.order_unseen import UNSEEN

APART = 1.05
"""The slower plan's seconds over the faster one's, from which on a pair counts."""
PAIRS_ASKED, RIGHT_ASKED = 30, 27


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """A plan's seconds and bytes as we model them, and as the compiled program has them."""

    way: str
    modelled: float
    judged: float
    modelled_bytes: float
    judged_bytes: float
    compute: float
    uncounted: tuple[str, ...]

    def __str__(self) -> str:
        missing = f"; not counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        return (
            f"{self.way:22s} modelled {self.modelled * 1e3:8.3f} ms, judge {self.judged * 1e3:8.3f}"
            f" ({self.compute * 1e3:.3f} computing), {self.modelled / self.judged:5.2f}; MiB sent"
            f" {self.modelled_bytes / MIB:7.1f} and {self.judged_bytes / MIB:7.1f}{missing}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPair:
    """Two plans of one program, the faster one by the judge first."""

    program: str
    faster: TimedPlan
    slower: TimedPlan

    @property
    def right(self) -> bool:
        """Whether our modelled seconds have the judge's order."""
        return self.faster.modelled < self.slower.modelled

    def __str__(self) -> str:
        f, s = self.faster, self.slower
        return (
            f"{self.program}: '{f.way}' is faster than '{s.way}': {s.judged / f.judged:.2f} by the"
            f" judge, {s.modelled / f.modelled:.2f} modelled"
        )


def pairs_of(program: str, plans: Sequence[TimedPlan]) -> list[PlanPair]:
    """The pairs of plans of a program that count. A plan with work that has no estimate is in
    none."""
    counted = sorted((p for p in plans if not p.uncounted), key=lambda p: p.judged)
    return [
        PlanPair(program=program, faster=a, slower=b)
        for a, b in itertools.combinations(counted, 2)
        if b.judged >= APART * a.judged
    ]


def timed(program: OrderProgram, way: str, mesh: Mesh, save: Path | None = None) -> TimedPlan:
    """Plans a program in one way and compiles the plan."""
    f = sbp.jit(program.fn, mesh, donate_argnums=program.donate, **program.ways[way])
    plan = f.plan(*program.avals)
    text = plan.lower().compile().as_text()
    if save:
        save.write_text(text, encoding="utf-8")
        save.with_suffix(".plan").write_text(str(plan), encoding="utf-8")
    found = step_time(text, mesh.size, program.topology.split(":")[0])
    return TimedPlan(
        way=way,
        modelled=plan.cost.seconds,
        judged=found.seconds,
        modelled_bytes=plan.cost.bytes_per_device,
        judged_bytes=found.bytes_per_device,
        compute=found.compute,
        uncounted=tuple(found.unknown),
    )


def mesh_of(program: OrderProgram) -> Mesh:
    """The mesh over the chips of the program's topology."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=program.topology)
    sizes = [size for _, size in program.mesh]
    return Mesh(np.array(found.devices).reshape(sizes), tuple(a for a, _ in program.mesh))


def _measure(make: Callable[[], OrderProgram], folder: Path | None) -> list[PlanPair]:
    """Times all plans of a program, and prints them."""
    program, name = make(), make.__name__
    mesh = mesh_of(program)
    print(f"{name} ({'unseen' if make in UNSEEN else 'tuned'})", flush=True)
    plans: list[TimedPlan] = []
    for way in program.ways:
        save = folder and folder / f"{name}.{way.replace(' ', '_')}.hlo"
        plans.append(timed(program, way, mesh, save))
        print(f"  {plans[-1]}", flush=True)
    return pairs_of(name, plans)


def _score(what: str, pairs: Sequence[PlanPair]) -> str:
    return f"{what}: {sum(p.right for p in pairs)} of {len(pairs)} pairs right"


def main() -> None:
    makers: dict[str, Callable[[], Any]] = {f.__name__: f for f in (*TUNED, *UNSEEN)}
    halves = {"tuned": TUNED, "unseen": UNSEEN}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help=f"of: {', '.join(makers)}")
    parser.add_argument("--half", choices=halves)
    parser.add_argument("--save", type=Path, help="a folder for the texts of plans and programs")
    args = parser.parse_args()
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    chosen = [makers[name] for name in args.programs or makers]
    if args.half:
        chosen = [make for make in chosen if make in halves[args.half]]
    found = {make: _measure(make, args.save) for make in chosen}
    pairs = [pair for of_one in found.values() for pair in of_one]
    for pair in pairs:
        if not pair.right:
            print(f"wrong  {pair}")
    for what, half in halves.items():
        print(_score(what, [p for make in half for p in found.get(make, ())]))
    least = math.ceil(RIGHT_ASKED / PAIRS_ASKED * len(pairs))
    print(f"{_score('all', pairs)}; asked: {least}")


if __name__ == "__main__":
    main()
