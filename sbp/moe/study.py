"""What a training step of a model costs on a mesh of devices that are not here: parameters, memory,
modelled time, and the figures of the GShard paper beside them.

sbp plan --preset gshard-36l-2048e --hardware tpu-v3
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh
from rich.console import Console
from rich.table import Table

import sbp
from sbp.errors import SbpError
from sbp.moe.options import Run, parse_args
from sbp.moe.presets import PRESETS
from sbp.moe.step import TrainState, plan_train_step, state_shapes


class Published(NamedTuple):
    """A row of the tables 1 and 3 of the GShard paper.

    Attributes:
      weights: parameters, in units of 2**30 (the paper's "B").
      cores: TPU v3 cores.
      steps_per_second: of training.
      tokens: of a batch.
      core_years: of training on 10**12 tokens.
      days: the same.
      bleu: average over 100 languages.
    """

    weights: float
    cores: int
    steps_per_second: float
    tokens: float
    core_years: float
    days: float
    bleu: float


PUBLISHED: Mapping[str, Published] = {
    "gshard-36l-2048e": Published(600, 2048, 0.72, 4e6, 22.4, 4.0, 44.3),
    "gshard-12l-2048e": Published(200, 2048, 2.15, 4e6, 7.5, 1.4, 41.3),
    "gshard-36l-512e": Published(150, 512, 1.05, 1e6, 15.5, 11.0, 43.7),
    "gshard-12l-512e": Published(50, 512, 3.28, 1e6, 4.9, 3.5, 40.0),
    "gshard-36l-128e": Published(37, 128, 0.67, 1e6, 6.1, 17.3, 39.0),
    "gshard-12l-128e": Published(12.5, 128, 2.16, 1e6, 1.9, 5.4, 36.7),
}
"""The MoE models of the paper's tables 1 and 3, by preset."""


def training_days(tokens: float, steps_per_second: float) -> float:
    """Days of training on 10**12 tokens, as much as each model of the paper saw (section 4.3).

    Arguments:
      tokens: of a batch.
      steps_per_second: of training.

    >>> round(training_days(4e6, 0.72), 1)  # the paper's model of 600B parameters
    4.0
    """
    return 1e12 / tokens / steps_per_second / 86_400


def core_years(days: float, cores: int) -> float:
    """Years of one core.

    >>> round(core_years(4.02, 2048), 1)
    22.6
    """
    return days * cores / 365


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The cost of a training step.

    Attributes:
      devices: of the mesh.
      parameters: of the whole model.
      tokens: source tokens of a batch, padding included.
      memory: bytes that one device holds, by class.
      sent: bytes that one device sends in a step.
      seconds: of a step, by the cost model.
      published: what the paper says of this model, if it does.
      plan: the plan.
    """

    devices: int
    parameters: int
    tokens: int
    memory: Mapping[str, float]
    sent: float
    seconds: float
    published: Published | None
    plan: sbp.Plan


def study(run: Run, hardware: str) -> Study:
    """Plan the training step of a run for devices that are not here.

    Arguments:
      run: the options of the run; a model that equals a preset of `PUBLISHED` has its figures.
      hardware: a device kind of `sbp.HARDWARE`, such as "tpu-v3".

    Raises:
      SbpError: where the step has no typing, or the device kind is unknown.
    """
    names, sizes = zip(*run.mesh, strict=True)
    mesh = AbstractMesh(sizes, names)
    state = state_shapes(run.model, run.train)
    plan = plan_train_step(run.model, run.train, mesh, hardware)
    return Study(
        devices=math.prod(sizes),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)),
        tokens=run.model.sequences * run.model.source_length,
        memory=_memory(state, plan),
        sent=plan.cost.bytes_per_device,
        seconds=plan.cost.seconds,
        published=next(
            (said for name, said in PUBLISHED.items() if PRESETS[name].model == run.model), None
        ),
        plan=plan,
    )


def _memory(state: TrainState, plan: sbp.Plan) -> dict[str, float]:
    """Bytes of one device, by the classes of the paper's figure 7 and the optimiser's."""
    held = {"experts": 0.0, "other weights": 0.0}
    placed = plan.in_shardings[0]
    for path, size in _local_bytes(state.params, placed.params):
        held["experts" if "['expert_" in path else "other weights"] += size
    held["optimiser"] = sum(size for _, size in _local_bytes(state.optimizer, placed.optimizer))
    held["activations"] = plan.cost.peak_memory_bytes - sum(held.values())
    return held


def _local_bytes(tree: Any, shardings: Any) -> list[tuple[str, float]]:
    """The path of each leaf, and the bytes that one device holds of it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        (jax.tree_util.keystr(path), math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
        for (path, leaf), place in zip(leaves, jax.tree.leaves(shardings), strict=True)
    ]


def table(found: Study) -> Table:
    """The study beside the paper's figures."""
    shown = Table(box=None, header_style="bold", title_justify="left")
    shown.add_column("")
    shown.add_column("this plan", justify="right")
    shown.add_column("the paper", justify="right")
    said = found.published
    days = training_days(found.tokens, 1 / found.seconds)
    rows = [
        ("devices", f"{found.devices:,}", said and f"{said.cores:,}"),
        ("parameters / 2^30", f"{found.parameters / 2**30:,.1f}", said and f"{said.weights:g}"),
        ("tokens in a batch", f"{found.tokens:,}", said and f"{said.tokens:,.0f}"),
        ("seconds of a step, modelled", f"{found.seconds:.2f}", said and _seconds(said)),
        ("days for 10^12 tokens", f"{days:.1f}", said and f"{said.days:g}"),
        (
            "years of one core",
            f"{core_years(days, found.devices):.1f}",
            said and f"{said.core_years:g}",
        ),
        ("GiB sent in a step, by a device", f"{found.sent / 2**30:.2f}", None),
        *(
            (f"GiB held: {name}", f"{size / 2**30:.2f}", None)
            for name, size in found.memory.items()
        ),
    ]
    for name, here, paper in rows:
        shown.add_row(name, here, paper or "-")
    return shown


def _seconds(said: Published) -> str:
    return f"{1 / said.steps_per_second:.2f} measured"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: the options of a training run, and `--hardware`."""
    parser = argparse.ArgumentParser(
        prog="sbp plan",
        description="Types, price and memory of a training step, without devices.",
        epilog="Other options are those of sbp train, such as --preset, --mesh and --set.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hardware", default="tpu-v3", help="a device kind, as sbp hardware lists them"
    )
    args, rest = parser.parse_known_args(argv)
    try:
        found = study(parse_args(rest), args.hardware)
    except SbpError as error:
        print(f"error[{error.code}]: {error.message}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.print(table(found))
    console.print()
    console.print(found.plan.report().short())
    return 0


if __name__ == "__main__":
    sys.exit(main())
