"""Seconds that planning takes after a step is traced: the check by Z3, the choice of types, and the
plan.

    python -m benchmarks.planning_speed
    python -m benchmarks.planning_speed --only one-axis unrolled
    python -m benchmarks.planning_speed --devices       # 128 to 8192 devices
    python -m benchmarks.planning_speed --cpu           # where other processes use the machine

Four cases are the full GShard step, with 36 layers and 2048 experts: on one, two and three mesh
axes, and unrolled. Their types come from the paper's three annotations (Lepikhin et al., 2020,
section 3.2) on the axis `d`; the other mesh axes are free. The other cases are everyday training
steps (`benchmarks.planning_cases`). Nothing is compiled and no device is needed.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, PartitionSpec

import sbp
from benchmarks import planning_cases
from benchmarks.gshard_ref import Config, abstract_arguments, sgd_step
from benchmarks.planning_cases import Planned
from sbp.api.jit import Jitted
from sbp.infer.check import Checker
from sbp.infer.request import RequestCaches
from sbp.plan.fit import fit
from sbp.plan.program import Program

MARKS = {"tokens": 0, "dispatched": 0, "outputs": 1}
"""The paper's annotations: the dim of each that is split over `d`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program to plan.

    Arguments:
      axes: names and sizes of the mesh axes; the experts and groups are as many as the devices of
          `d`.
      config: the model's sizes.
      limit: seconds that the check and the choice together may take.
      boxing: the policy.
      dispatched: the dim of the dispatched tokens that is split over `d`; 0 is the experts.
    """

    axes: tuple[tuple[str, int], ...]
    config: Config
    limit: float
    boxing: Literal["auto", "reduce", "explicit"] = "auto"
    dispatched: int = 0


def case(
    axes: dict[str, int], *, layers: int = 36, unrolled: bool = False, limit: float = 0.0
) -> Case:
    """The step of `layers` layers with 2048 experts on the given axes."""
    groups = max(2048, axes["d"])
    return Case(
        axes=tuple(axes.items()),
        config=Config(layers=layers, experts=groups, groups=groups, unrolled=unrolled),
        limit=limit,
    )


CASES: dict[str, Case] = {
    "one-axis": case({"d": 2048}, limit=10),
    "two-axes": case({"d": 512, "m": 4}, limit=20),
    "three-axes": case({"d": 256, "m": 4, "n": 2}, limit=60),
    "unrolled": case({"d": 2048}, unrolled=True, limit=30),
}


EVERYDAY: dict[str, tuple[Callable[[], Planned], float]] = {
    "flax": (planning_cases.flax_transformer, 3),
    "gpt-6": (lambda: planning_cases.gpt(6), 5),
    "gpt-24": (lambda: planning_cases.gpt(24), 20),
    "resnet-50": (lambda: planning_cases.resnet({"data": 16}), 5),
    "resnet-2-axes": (lambda: planning_cases.resnet({"data": 4, "model": 4}), 5),
}
"""Everyday training steps, each with the seconds that the check and the choice may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of each stage, and its results."""

    trace: float
    check: float
    choose: float
    nodes: int
    program: Program


def gshard_step(case: Case) -> Planned:
    """The SGD step as a function to plan, with its arguments."""
    return step(case), abstract_arguments(case.config)


def step(case: Case) -> Jitted:
    """The SGD step as a function to plan."""
    params, _ = abstract_arguments(case.config)

    def spec(path: Any, _: Any) -> PartitionSpec:
        return PartitionSpec(None, "d") if path[-1].key in ("ewi", "ewo") else PartitionSpec()

    def mark(x: jax.Array, name: str) -> jax.Array:
        return sbp.annotate(x, d=sbp.S(marks[name])) if name in marks else x

    marks = MARKS | {"dispatched": case.dispatched}
    names = [name for name, _ in case.axes]
    one = len(names) == 1
    types = (
        (jax.tree_util.tree_map_with_path(spec, params), PartitionSpec("d"))
        if one
        else (None, "d:S(0) " + " ".join(f"{n}:?" for n in names[1:]))
    )
    mesh = AbstractMesh(tuple(n for _, n in case.axes), tuple(names))
    return sbp.jit(
        lambda params, batch: sgd_step(params, batch, case.config, mark),
        mesh,
        in_types=types,
        donate_argnums=(0,),
        boxing=case.boxing,
    )


def measure(planned: Planned, clock: Callable[[], float] = time.perf_counter) -> Seconds:
    """Plans a case, stage by stage.

    Arguments:
      planned: a function to plan, and its arguments.
      clock: gives the seconds: `time.perf_counter` those of a clock on the wall,
        `time.process_time` those that this process had a core.
    """
    f, args = planned
    start = clock()
    traced = f.trace(*args)
    trace = clock() - start
    start = clock()
    found = Checker(traced.request).check()
    assert found.status == "sat", found
    check = clock() - start
    start = clock()
    program, _ = fit(dataclasses.replace(traced.request, caches=RequestCaches()))
    assert program is not None
    return Seconds(
        trace=trace,
        check=check,
        choose=clock() - start,
        nodes=traced.request.size,
        program=program,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[*CASES, *EVERYDAY])
    parser.add_argument(
        "--devices",
        action="store_true",
        help="time the one-axis case from 128 to 8192 devices instead",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="CPU seconds instead of wall-clock seconds",
    )
    arguments = parser.parse_args()
    gshard = (
        {str(n): case({"d": n}) for n in (128, 512, 2048, 8192)} if arguments.devices else CASES
    )
    cases: dict[str, tuple[Callable[[], Planned], float]] = {
        name: (functools.partial(gshard_step, one), one.limit) for name, one in gshard.items()
    }
    if not arguments.devices:
        cases |= EVERYDAY
    print(
        f"{'program':13} {'nodes':>6} {'trace':>7} {'check':>7} {'choose':>7} {'limit':>6}"
        f" {'gap':>8} {'MiB sent':>9} {'ms':>8}"
    )
    for name in arguments.only or cases:
        make, limit = cases[name]
        took = measure(make(), time.process_time if arguments.cpu else time.perf_counter)
        typing = took.program.typing
        sent, ms = took.program.cost.bytes_per_device / 2**20, typing.seconds * 1e3
        print(
            f"{name:13} {took.nodes:6} {took.trace:6.1f}s {took.check:6.1f}s {took.choose:6.1f}s"
            f" {limit:5.0f}s {100 * typing.gap:7.3f}% {sent:9,.1f} {ms:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
