"""Figures 7, 8 and 9 of the GShard paper (Lepikhin et al., 2020, section 5) from the cost model,
with what the paper says beside them.

sbp plan --figures FOLDER
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

import sbp
from benchmarks.gshard.figure8 import LayerPair, all_reduce_seconds, all_to_all_seconds, figure8
from benchmarks.gshard.study import ALL_TO_ALL_GROWTH, LAYER_PAIR, RECOMPUTED, Study, study
from examples.gshard.drawing import COLOURS, Drawing, canvas, write_drawings
from examples.gshard.options import Run
from examples.gshard.presets import PRESETS

GIB = 2.0**30

MODELS = (
    (12, 128),
    (12, 512),
    (12, 2048),
    (24, 2048),
    (36, 128),
    (36, 512),
    (36, 2048),
    (60, 2048),
)
"""Layers and experts of the models of figure 7."""

PAYLOADS = (8 * 2**20, 32 * 2**20)
"""Bytes that each device holds of what figure 9 sends."""

PARTITIONS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Devices of figure 9."""


def model_run(layers: int, experts: int, *, remat: bool) -> Run:
    """The training run of a model of the paper.

    Arguments:
      layers: of encoder and decoder together.
      experts: of a layer, as many as devices.
      remat: whether layers are computed again in the backward pass.
    """
    chosen = PRESETS[f"gshard-12l-{experts}e"]
    half = layers // 2
    model = dataclasses.replace(chosen.model, encoder_layers=half, decoder_layers=half, remat=remat)
    return Run(
        model=model,
        train=chosen.train,
        mesh=chosen.mesh,
        workdir=Path(f"runs/gshard-{layers}l-{experts}e"),
        tensorboard=False,
        evaluate=False,
    )


def memory_studies(layers: int, experts: int, hardware: str) -> tuple[Study, ...]:
    """A model without rematerialisation and, where that does not fit a device, with it.

    Arguments:
      layers, experts: as for `model_run`.
      hardware: a device kind of `sbp.HARDWARE`.
    """
    found = study(model_run(layers, experts, remat=False), hardware)
    if found.plan.cost.peak_memory_bytes <= sbp.HARDWARE[hardware].hbm_bytes:
        return (found,)
    return found, study(model_run(layers, experts, remat=True), hardware)


def figure7(found: Sequence[tuple[Study, ...]], hardware: str) -> Drawing:
    """Memory of a device by class.

    Arguments:
      found: models, from `memory_studies`.
      hardware: the device kind that they were planned for.
    """
    figure, axes = canvas()
    shown = [studies[-1] for studies in found]
    names = [_name(one) for one in shown]
    whole = [sum(studies[0].memory.values()) / GIB for studies in found]
    bottom = [0.0] * len(found)
    for colour, kind in zip(COLOURS, shown[0].memory, strict=False):
        sizes = [one.memory[kind] / GIB for one in shown]
        axes.bar(names, sizes, bottom=bottom, color=colour, label=kind, width=0.7)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    spots = range(len(whole))
    left, right = [at - 0.3 for at in spots], [at + 0.3 for at in spots]
    axes.hlines(whole, left, right, color="black", linewidth=2, label="without recomputing")
    limit = sbp.HARDWARE[hardware].hbm_bytes / GIB
    axes.axhline(limit, color="#222222", linewidth=1, linestyle="--")
    axes.text(-0.45, limit + 0.3, f"memory of a {hardware} device", va="bottom", fontsize=9)
    for at, (one, top) in enumerate(zip(shown, bottom, strict=True)):
        if one.run.model.remat:
            axes.text(at, top + 0.2, "recomputed", ha="center", va="bottom", fontsize=8)
    axes.set_ylabel("GiB of one device, at the fullest moment")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return Drawing(
        name="figure7",
        title="Figure 7: memory of a device",
        note="From plans of the training step, 2048 tokens on a device. Bars of models that do not"
        " fit a device are of plans that recompute all layers in the backward pass. The paper's"
        " compiler recomputed as much as it had to; the paper says what share of the cycles that"
        " takes, and that the memory of a device stays constant as experts are added.",
        figure=figure,
        header=(
            "GiB",
            *shown[0].memory,
            "all",
            "without recomputing",
            "recomputed here",
            "recomputed in the paper",
        ),
        rows=[
            (
                name.replace("\n", " "),
                *(f"{size / GIB:.2f}" for size in one.memory.values()),
                f"{sum(one.memory.values()) / GIB:.2f}",
                f"{without:.2f}",
                "yes" if one.run.model.remat else "no",
                f"{RECOMPUTED[_layers(one)]:.0%} of cycles",
            )
            for name, one, without in zip(names, shown, whole, strict=True)
        ],
    )


def _layers(one: Study) -> int:
    return one.run.model.encoder_layers + one.run.model.decoder_layers


def _name(one: Study) -> str:
    return f"{one.run.model.experts}E\n{_layers(one)}L"


_PARTS: Mapping[str, str] = {
    "dense": "dense layers and projections",
    "attention": "attention",
    "gate": "gate einsums",
    "all_to_all": "dispatch and combine (all-to-all)",
    "linear": "cumsum and the like",
}


def figure8_drawing(pairs: Sequence[LayerPair]) -> Drawing:
    """Time of an MoE layer and its neighbour by part, over the time with the fewest devices.

    Arguments:
      pairs: from `figure8`.
    """
    figure, axes = canvas(7.0)
    base = pairs[0].seconds
    names = [f"{pair.devices} experts" for pair in pairs]
    bottom = [0.0] * len(pairs)
    for colour, (part, label) in zip(COLOURS, _PARTS.items(), strict=False):
        sizes = [getattr(pair, part) / base for pair in pairs]
        axes.bar(names, sizes, bottom=bottom, color=colour, label=label, width=0.55)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    said = [LAYER_PAIR.get(pair.devices) for pair in pairs]
    times = [one.time for one in said if one]
    spots = [at for at, one in enumerate(said) if one]
    left, right = [at - 0.36 for at in spots], [at + 0.36 for at in spots]
    axes.hlines(times, left, right, color="black", linewidth=2, label="the paper")
    for at, pair in enumerate(pairs):
        share = pair.all_to_all / pair.seconds
        paper = said[at]
        beside = f" (paper {paper.all_to_all:.0%})" if paper else ""
        text = f"all-to-all {share:.0%}{beside}"
        axes.text(at, bottom[at] + 0.09, text, ha="center", fontsize=9)
    axes.set_ylim(0, 2.0)
    axes.set_ylabel(f"time over that with {pairs[0].devices} experts")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    return Drawing(
        name="figure8",
        title="Figure 8: time of an MoE layer and its neighbouring layer",
        note="Dense layers at 85 % of the peak, attention at 30 %, and cumsum with 10 % of the time"
        " on 2048 devices: these are the paper's. The all-to-all is that of the torus of the"
        " hardware table. The paper's text gives the time with 2048 experts over that with 128"
        " (1.7) and the all-to-all's shares of both (36 % and 16 %).",
        figure=figure,
        header=("ms", *_PARTS.values(), "all", "over the first", "the paper"),
        rows=[
            (
                name,
                *(f"{1e3 * getattr(pair, part):.2f}" for part in _PARTS),
                f"{1e3 * pair.seconds:.2f}",
                f"{pair.seconds / base:.2f}",
                f"{paper.time:g}" if paper else "-",
            )
            for name, pair, paper in zip(names, pairs, said, strict=True)
        ],
    )


_COLLECTIVES = {"all-to-all": all_to_all_seconds, "all-reduce": all_reduce_seconds}


def figure9(hardware: sbp.Hardware) -> Drawing:
    """Time of an all-to-all and of an all-reduce by devices."""
    figure, axes = canvas(7.0)
    rows: list[list[str]] = [[f"{count}"] for count in PARTITIONS]
    grown: list[float] = []
    for colour, (kind, seconds_of) in zip(COLOURS, _COLLECTIVES.items(), strict=False):
        for style, payload in zip(("o-", "s--"), PAYLOADS, strict=True):
            found = [seconds_of(count, payload, hardware) for count in PARTITIONS]
            label = f"{kind}, {payload // 2**20} MiB"
            axes.plot(PARTITIONS, [1e3 * s for s in found], style, color=colour, label=label)
            grown.append(found[-1] / found[0])
            if kind == "all-to-all":
                said = 1e3 * found[0] * ALL_TO_ALL_GROWTH
                axes.plot([PARTITIONS[-1]], [said], "k*", markersize=11)
            for row, seconds in zip(rows, found, strict=True):
                row.append(f"{1e3 * seconds:.3f}")
    axes.plot([], [], "k*", markersize=11, label=f"the paper: {ALL_TO_ALL_GROWTH} times the first")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="milliseconds")
    axes.set_xticks(PARTITIONS, [str(count) for count in PARTITIONS])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9)
    return Drawing(
        name="figure9",
        title="Figure 9: collectives by number of devices",
        note="Each device holds 8 or 32 MiB. The all-to-all grows as the square root of the"
        f" devices on a torus: from 16 to 2048 devices by {grown[0]:.1f} and {grown[1]:.1f} here,"
        f" and by {ALL_TO_ALL_GROWTH} in the paper. The time of an all-reduce is nearly constant"
        " in both. The paper's text has no times.",
        figure=figure,
        header=(
            "ms, by devices",
            *(f"{kind}, {size // 2**20} MiB" for kind in _COLLECTIVES for size in PAYLOADS),
        ),
        rows=rows,
    )


def draw(folder: Path, hardware: str, console: Console) -> None:
    """Write figures 7, 8 and 9 as PNG and an HTML page.

    Arguments:
      folder: where.
      hardware: a device kind of `sbp.HARDWARE`.
      console: where progress and the names of the files are shown.

    Raises:
      SbpError: `unknown-option` where the folder cannot be written, matplotlib is missing, or the
        device kind is unknown.
    """
    canvas()  # refuses before any planning
    studies = [
        memory_studies(layers, experts, hardware)
        for layers, experts in track(
            MODELS, "planning", console=console, transient=True, disable=not console.is_terminal
        )
    ]
    kind = sbp.HARDWARE[hardware]
    drawings = (figure7(studies, hardware), figure8_drawing(figure8(kind)), figure9(kind))
    for file in write_drawings(folder, "costs.html", "Costs of the GShard models", drawings):
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)
