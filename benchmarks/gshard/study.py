"""What a training step of a model costs on a mesh of devices that are not here: parameters, memory,
modelled time, and the figures of the GShard paper beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh
from rich.table import Table

import sbp
from benchmarks.gshard.table4 import DEVICES, TABLE4, exponent, planned
from examples.gshard.options import Run
from examples.gshard.presets import PRESETS
from sbp.moe.step import TrainState, plan_train_step, state_shapes
from sbp.plan.program import Loop
from sbp.report.facts import tensor

# ---- figures of the paper -----------------------------------------------------------------------


class Published(NamedTuple):
    """A row of the tables 1, 2 and 3.

    Attributes:
      weights: parameters, in units of 2**30 (the paper's "B").
      cores: TPU v3 cores.
      layers: of encoder and decoder together.
      experts: of a layer; `layers / 2` layers have them. (Two totals in the paper's table 1 are
        misprinted: 36684 for 36864 and 12228 for 12288.)
      steps_per_second: of training.
      tokens: of a batch.
      core_years: of training on 10**12 tokens.
      days: the same.
      bleu: average over 100 languages.
      tokens_to_loss: billions of tokens until the training loss is below 0.7, 0.6 and 0.5; those
        that were not reached are left out.
    """

    weights: float
    cores: int
    layers: int
    experts: int
    steps_per_second: float
    tokens: float
    core_years: float
    days: float
    bleu: float
    tokens_to_loss: tuple[float, ...]


PUBLISHED: Mapping[str, Published] = {
    "gshard-36l-2048e": Published(600, 2048, 36, 2048, 0.72, 4e6, 22.4, 4.0, 44.3, (82, 175, 542)),
    "gshard-12l-2048e": Published(200, 2048, 12, 2048, 2.15, 4e6, 7.5, 1.4, 41.3, (176, 484, 1780)),
    "gshard-36l-512e": Published(150, 512, 36, 512, 1.05, 1e6, 15.5, 11.0, 43.7, (66, 170, 567)),
    "gshard-12l-512e": Published(50, 512, 12, 512, 3.28, 1e6, 4.9, 3.5, 40.0, (141, 486)),
    "gshard-36l-128e": Published(37, 128, 36, 128, 0.67, 1e6, 6.1, 17.3, 39.0, (321, 1074)),
    "gshard-12l-128e": Published(12.5, 128, 12, 128, 2.16, 1e6, 1.9, 5.4, 36.7, (995,)),
}
"""The MoE models of the paper's tables 1, 2 and 3, by preset."""

LOSSES = (0.7, 0.6, 0.5)
"""Training losses of table 2, in nats per token."""

BASELINE_BLEU = 30.8
"""Average of the paper's 100 bilingual models of 0.4B weights each."""


def training_days(tokens: float, steps_per_second: float, total: float = 1e12) -> float:
    """Days of training.

    Arguments:
      tokens: of a batch.
      steps_per_second: of training.
      total: tokens of the whole training; each model of the paper saw 10**12 (section 4.3).

    >>> round(training_days(4e6, 0.72), 1)  # the paper's model of 600B parameters
    4.0
    """
    return total / tokens / steps_per_second / 86_400


def core_years(days: float, cores: int) -> float:
    """Years of one core.

    >>> round(core_years(4.02, 2048), 1)
    22.6
    """
    return days * cores / 365


class LayerPairShare(NamedTuple):
    """A bar of figure 8.

    Attributes:
      time: of an MoE layer and its neighbour, over that with 128 experts.
      all_to_all: share of it for dispatch and combine.
    """

    time: float
    all_to_all: float


LAYER_PAIR: Mapping[int, LayerPairShare] = {
    128: LayerPairShare(1.0, 0.16),
    2048: LayerPairShare(1.7, 0.36),
}
"""Figure 8 by experts, as far as the text of section 5.2 has numbers."""

RECOMPUTED: Mapping[int, float] = {12: 0.0, 24: 0.0, 36: 0.28, 60: 0.34}
"""Share of cycles for rematerialisation by layers (section 5.1), beside figure 7."""

ALL_TO_ALL_GROWTH = 9
"""Time of an all-to-all on 2048 partitions over that on 16 (section 5.3), beside figure 9."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The cost of a training step.

    Attributes:
      run: the options.
      devices: of the mesh.
      parameters: of the whole model.
      tokens: source tokens of a batch, padding included.
      memory: bytes that one device holds at the fullest moment, by class: weights of experts and
        others, the optimiser's state, gradients with updates, activations and temporaries.
      sent: bytes that one device sends in a step.
      seconds: of a step, by the cost model.
      published: what the paper says of this model, if it does.
      plan: the plan.
    """

    run: Run
    devices: int
    parameters: int
    tokens: int
    memory: Mapping[str, float]
    sent: float
    seconds: float
    published: Published | None
    plan: sbp.Plan


def study(run: Run, hardware: str | None, mesh: Any = None) -> Study:
    """Plan the training step of a run for devices that are not here.

    Arguments:
      run: the options of the run; a model that equals a preset of `PUBLISHED` has its figures.
      hardware: a device kind of `sbp.HARDWARE`, such as "tpu-v3"; None for that of `mesh`.
      mesh: where to plan; None for an abstract mesh of the run's axes.

    Raises:
      SbpError: where the step has no typing, or the device kind is unknown.
    """
    if mesh is None:
        names, sizes = zip(*run.mesh, strict=True)
        mesh = AbstractMesh(sizes, names)
    state = state_shapes(run.model, run.train)
    plan = plan_train_step(run.model, run.train, mesh, hardware)
    return Study(
        run=run,
        devices=mesh.size,
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
    """Bytes of one device at the fullest moment, by class.

    The paper's figure 7 has weights and activations, the outputs of layers that both passes read.
    Here these are the results of loops over layers. Those that are shaped like weights are
    gradients and updates. Temporaries are all the rest, gaps between buffers included.
    """
    held = {"experts": 0.0, "other weights": 0.0}
    placed = plan.in_shardings[0]
    for path, size in _local_bytes(state.params, placed.params):
        held["experts" if "['expert_" in path else "other weights"] += size
    held["optimiser"] = sum(size for _, size in _local_bytes(state.optimizer, placed.optimizer))
    held |= {"gradients, updates": 0.0, "activations": 0.0}
    program = plan.program
    weights = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    looped = {r for i in program.block.instructions if isinstance(i, Loop) for r in i.outs}
    for register in looped.intersection(program.fullest):
        is_weight = program.graph.avals[register.value].shape in weights
        size = tensor(program, register, "").bytes_per_device
        held["gradients, updates" if is_weight else "activations"] += size
    held["temporaries"] = plan.cost.peak_memory_bytes - sum(held.values())
    return held


def _local_bytes(tree: Any, shardings: Any) -> list[tuple[str, float]]:
    """The path of each leaf, and the bytes that one device holds of it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        (jax.tree_util.keystr(path), math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
        for (path, leaf), place in zip(leaves, jax.tree.leaves(shardings), strict=True)
    ]


def _row(name: str, here: float, paper: float | None, form: str = ",.0f") -> tuple[str, ...]:
    """A line: this plan, the paper, and the first over the second. A number that would round to
    zero has two significant digits."""
    shown = f"{here:{form}}"
    shown = shown if any(digit in shown for digit in "123456789") else f"{here:.2g}"
    if paper is None:
        return name, shown, "-", "-"
    return name, shown, f"{paper:{form}}", f"{here / paper:.2f}"


def table(found: Study) -> Table:
    """The study beside the paper's tables 1, 2 and 3."""
    shown = Table(box=None, header_style="bold", title_justify="left")
    shown.add_column("")
    for name in ("this plan", "the paper", "ratio"):
        shown.add_column(name, justify="right")
    model, said = found.run.model, found.published
    layers = model.encoder_layers + model.decoder_layers
    days = training_days(found.tokens, 1 / found.seconds)
    rows = [
        _row("devices", found.devices, said and said.cores),
        _row("layers", layers, said and said.layers),
        _row("experts of a layer", model.experts, said and said.experts),
        _row(
            "experts of all layers",
            model.experts * layers / model.moe_every,
            said and said.experts * said.layers / 2,
        ),
        _row("parameters / 2^30", found.parameters / 2**30, said and said.weights, ",.1f"),
        _row("tokens in a batch", found.tokens, said and said.tokens),
        _row("steps in a second", 1 / found.seconds, said and said.steps_per_second, ".2f"),
        _row(
            "tokens in a second",
            found.tokens / found.seconds,
            said and said.tokens * said.steps_per_second,
        ),
        _row("days for 10^12 tokens", days, said and said.days, ".1f"),
        _row(
            "years of one core",
            core_years(days, found.devices),
            said and said.core_years,
            ".1f",
        ),
        *_to_losses(found, said),
        _row("seconds of a step, modelled", found.seconds, said and _seconds(said), ".2f"),
        _row("GiB sent in a step, by a device", found.sent / 2**30, None, ".2f"),
        *(_row(f"GiB held: {name}", size / 2**30, None, ".2f") for name, size in _held(found)),
    ]
    for row in rows:
        shown.add_row(*row)
    if said:
        above = said.bleu - BASELINE_BLEU
        shown.add_row("BLEU, mean of 100 languages", "-", f"{said.bleu}", "-")
        shown.add_row("BLEU above bilingual models", "-", f"{above:.1f}", "-")
    return shown


def _held(found: Study) -> list[tuple[str, float]]:
    return [*found.memory.items(), ("all", sum(found.memory.values()))]


def _seconds(said: Published) -> float:
    return 1 / said.steps_per_second


def _to_losses(found: Study, said: Published | None) -> list[tuple[str, ...]]:
    """Days until the losses of table 2, with the tokens that the paper's model needed."""
    if said is None:
        return []
    rows = []
    for loss, billions in zip(LOSSES, said.tokens_to_loss, strict=False):
        here = training_days(found.tokens, 1 / found.seconds, billions * 1e9)
        paper = training_days(said.tokens, said.steps_per_second, billions * 1e9)
        rows.append(_row(f"days to loss {loss}, {billions:g}B tokens", here, paper, ".2f"))
    return rows


def operators(hardware: str) -> Table:
    """The paper's table 4 beside plans of its operators: how communication and computation of one
    device grow with D devices, as exponents of D.

    Arguments:
      hardware: a device kind of `sbp.HARDWARE`.
    """
    shown = Table(
        title="operators on D devices: exponents of D (table 4)",
        box=None,
        header_style="bold",
        title_justify="left",
    )
    for name in ("", "collective", "sending", "the paper", "compute", "the paper"):
        shown.add_column(name, justify="right" if name in ("sending", "compute") else "left")
    for row in TABLE4:
        found = [planned(row, d, hardware) for d in DEVICES]
        asked = row.communication
        sends = "-" if asked is None else _exponent([p.communication for p in found])
        shown.add_row(
            row.title,
            ", ".join(sorted(found[-1].kinds)) or "none",
            sends,
            "-" if asked is None else f"{asked:g}",
            _exponent([p.compute for p in found]),
            f"{row.compute:g}",
        )
    return shown


def _exponent(seconds: Sequence[float]) -> str:
    return f"{abs(round(exponent(DEVICES, seconds), 2)):.2f}"
