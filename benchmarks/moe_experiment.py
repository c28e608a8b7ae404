"""MoE against dense models with as many FLOPs for each token, few experts against many, deep
against shallow, on both corpora: what holds of the GShard paper's tables 2 and 3 at this size.

    python -m benchmarks.moe_experiment
    python -m benchmarks.moe_experiment --share 0.5        # 52 minutes on two cores, others at work
    python -m benchmarks.moe_experiment --share 0.1        # a tenth of the steps
    python -m benchmarks.moe_experiment --report           # the report of what is there

Every model is a run of `sbp train` in a folder of its own. An interrupted experiment goes on where
it was, and a larger share continues its runs. The report is written again after each run.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from examples.gshard.options import parse_args
from sbp.moe.checkpoint import write_whole
from sbp.moe.config import ModelConfig
from sbp.moe.trainer import FILE, read_metrics, step_flops

STEPS = 400
"""Optimiser steps of a run at `--share 1`."""

CORPORA = ("phrases", "catalogues")
EXPERTS = (0, 4, 8, 16)
"""Experts of a layer; 0 is the dense model."""

LAYERS = (4, 8)
"""Layers of encoder and decoder together."""

SMOOTHED = 20
"""Steps over which the training loss is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """A run of the experiment.

    Attributes:
      corpus: a name of `CORPORA`.
      layers: of both sides together.
      experts: of a layer; 0 for dense.
      seed: of everything.
    """

    corpus: str
    layers: int
    experts: int
    seed: int = 0

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.corpus}-{self.layers}l-{self.experts}e-{self.seed}"

    @property
    def model(self) -> str:
        """As the paper writes it."""
        if self.experts:
            return f"MoE({self.experts}E, {self.layers}L)"
        return f"dense({self.layers}L)"

    def options(self, steps: int) -> list[str]:
        """Of `sbp train`."""
        sets = {
            "experts": self.experts,
            "encoder_layers": self.layers // 2,
            "decoder_layers": self.layers // 2,
            "groups": 8,
            "heldout_per_language": 3,
            "checkpoint_every": max(1, steps // 4),
        }
        words = ["--preset", "tiny-mt" if self.experts else "tiny-mt-dense"]
        words += ["--steps", str(steps), "--corpus", self.corpus, "--seed", str(self.seed)]
        return words + [word for item in sets.items() for word in ("--set", "{}={}".format(*item))]

    def config(self) -> ModelConfig:
        """The model."""
        return parse_args(self.options(1)).model


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a run gave.

    Attributes:
      steps: that it trained.
      losses: training loss after each step, a mean over `SMOOTHED` steps, in nats per target token,
        without the auxiliary loss.
      tokens: that were trained on after each step, source and target.
      heldout: the last loss on held-out text; None before the first checkpoint.
      seconds: of a step, the median.
      chrf, exact: of the held-out translations, of 100; None before the evaluation.
    """

    steps: int
    losses: tuple[float, ...]
    tokens: tuple[float, ...]
    heldout: float | None
    seconds: float
    chrf: float | None
    exact: float | None

    def tokens_to(self, loss: float) -> float | None:
        """Tokens until the training loss is at most `loss`; None where it never is."""
        pairs = zip(self.losses, self.tokens, strict=True)
        return next((tokens for reached, tokens in pairs if reached <= loss), None)


def read(folder: Path) -> Found | None:
    """A run from its folder; None where nothing is there yet."""
    steps = read_metrics(folder) if (folder / FILE).exists() else []
    if not steps:
        return None
    nll = [math.inf if step["nll"] is None else step["nll"] for step in steps]
    heldout = [step["heldout_nll"] for step in steps if step.get("heldout_nll") is not None]
    timed = sorted(step["seconds"] for step in steps if "seconds" in step)
    scored = folder / "evaluation.json"
    quality = (
        json.loads(scored.read_text("utf-8"))["overall"]["systems"]["model"]
        if scored.exists()
        else {}
    )
    return Found(
        steps=len(steps),
        losses=tuple(fmean(nll[max(0, at - SMOOTHED + 1) : at + 1]) for at in range(len(nll))),
        tokens=tuple(itertools.accumulate(step["tokens"] for step in steps)),
        heldout=heldout[-1] if heldout else None,
        seconds=timed[len(timed) // 2] if timed else 0.0,
        chrf=quality.get("chrf"),
        exact=quality.get("exact"),
    )


def levels(found: Mapping[Setting, Found]) -> list[float]:
    """Losses of table 2: one that every model of a corpus reaches, one that half of them do, and
    one that the best does."""
    last = sorted(run.losses[-1] for run in found.values())
    return [last[-1], last[len(last) // 2], last[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A sentence of the paper, and the pairs of models in which it holds here.

    Attributes:
      text: the sentence.
      source: where the paper has it.
      pairs: for each comparison that could be made, its name and whether it holds.
    """

    text: str
    source: str
    pairs: tuple[tuple[str, bool], ...]

    def __str__(self) -> str:
        good = sum(holds for _, holds in self.pairs)
        if not self.pairs:
            return f"- {self.text} ({self.source}): not compared yet."
        verdict = "holds" if good == len(self.pairs) else "does not hold" if not good else "mixed"
        missed = "; ".join(name for name, holds in self.pairs if not holds)
        but = f" Not in: {missed}." if missed and good else ""
        return (
            f"- {self.text} ({self.source}): **{verdict}**, in {good} of {len(self.pairs)}"
            f" comparisons.{but}"
        )


def _beside(found: Mapping[Setting, Found], axis: str) -> Iterator[tuple[str, Setting, Setting]]:
    """Pairs of settings that differ in one thing, the smaller first: neighbours in `experts` (dense
    left out) or `layers`, or a dense model and one with experts (`dense`)."""
    for one, two in itertools.product(sorted(found), repeat=2):
        if (one.corpus, one.seed) != (two.corpus, two.seed):
            continue
        name = f"{one.corpus}, {one.model} to {two.model}"
        same_depth, same_width = one.layers == two.layers, one.experts == two.experts
        if axis == "layers" and same_width and one.layers < two.layers:
            yield name, one, two
        if axis == "dense" and same_depth and not one.experts and two.experts:
            yield name, one, two
        if axis == "experts" and same_depth and 0 < one.experts == two.experts / 2:
            yield name, one, two


def claims(found: Mapping[Setting, Found]) -> list[Claim]:
    """What the paper says of its tables 2 and 3, compared with the runs that are there."""
    scored = {setting: run for setting, run in found.items() if run.chrf is not None}

    def better(axis: str) -> tuple[tuple[str, bool], ...]:
        return tuple(
            (name, (scored[two].chrf or 0.0) > (scored[one].chrf or 0.0))
            for name, one, two in _beside(scored, axis)
        )

    def sooner(axis: str) -> tuple[tuple[str, bool], ...]:
        pairs = []
        for name, one, two in _beside(found, axis):
            level = max(found[one].losses[-1], found[two].losses[-1])
            first, second = found[one].tokens_to(level), found[two].tokens_to(level)
            assert first is not None and second is not None  # each reaches its own last loss
            pairs.append((name, second < first))
        return tuple(pairs)

    diminishing = []
    gains = {(one, two): _gain(scored, one, two) for _, one, two in _beside(scored, "experts")}
    for (one, two), (three, four) in itertools.product(gains, repeat=2):
        if two == three:
            name = f"{one.corpus}, {one.layers} layers, {one.experts} to {four.experts} experts"
            diminishing.append((name, gains[three, four] < gains[one, two]))
    return [
        Claim(
            text="Experts beat a dense model with as many FLOPs for each token",
            source="table 3: 128 experts, 12 layers against T(96L); chrF here",
            pairs=better("dense"),
        ),
        Claim(
            text="More experts translate better at one depth",
            source="table 3, 36.7 to 40.0 to 41.3 BLEU",
            pairs=better("experts"),
        ),
        Claim(
            text="Each doubling of the experts brings less than the one before",
            source="section 4.3, +3.3 and then +1.3 BLEU",
            pairs=tuple(diminishing),
        ),
        Claim(
            text="Deeper models translate better with as many experts",
            source="table 3, 2 to 3 BLEU for three times the depth",
            pairs=better("layers"),
        ),
        Claim(
            text="Deeper models need fewer tokens to a training loss",
            source="table 2, 2 to 3 times fewer for three times the depth",
            pairs=sooner("layers"),
        ),
        Claim(
            text="More experts need fewer tokens to a training loss",
            source="table 2, 128 to 512 experts",
            pairs=sooner("experts"),
        ),
        Claim(
            text="A step takes as much longer as the model is deeper, within a quarter",
            source="table 3, 2.99 to 3.22 times for three times the depth",
            pairs=tuple(
                (name, 0.75 < _slower(found, one, two) / (two.layers / one.layers) < 1.25)
                for name, one, two in _beside(found, "layers")
                if found[one].seconds
            ),
        ),
    ]


def _gain(found: Mapping[Setting, Found], one: Setting, two: Setting) -> float:
    return (found[two].chrf or 0.0) - (found[one].chrf or 0.0)


def _slower(found: Mapping[Setting, Found], one: Setting, two: Setting) -> float:
    return found[two].seconds / found[one].seconds


def report(found: Mapping[Setting, Found]) -> str:
    """The tables and claims as markdown."""
    lines = ["# MoE against dense models at equal active FLOPs", ""]
    if not found:
        return "\n".join([*lines, "No run has a step yet.", ""])
    for corpus in CORPORA:
        own = {s: found[s] for s in sorted(found) if s.corpus == corpus}
        if own:
            lines += [*_table(corpus, own), ""]
    lines += ["## What holds of the paper's tables 2 and 3", ""]
    lines += [str(claim) for claim in claims(found)]
    seeds = {setting.seed for setting in found}
    lines += [
        "",
        f"Models have a width of 128 and {min(LAYERS)} or {max(LAYERS)} layers, the paper's 1024"
        " and 12 or 36; 4 to 16 experts, the paper's 128 to 2048. Scores are chrF and exact match"
        f" of greedy translations. {len(seeds)} seed{'s' * (len(seeds) > 1)}: differences that"
        " are smaller than those between seeds say nothing.",
        "",
    ]
    return "\n".join(lines)


def _table(corpus: str, found: Mapping[Setting, Found]) -> list[str]:
    """Tables 2 and 3 of one corpus, as markdown."""
    reached = levels(found)
    header = ["model", "seed", "steps", "GFLOP a step", "s a step", "chrF", "exact %"]
    header += ["held-out loss", "training loss"]
    header += [f"M tokens to {level:.3f}" for level in reached]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for setting, run in found.items():
        tokens = [run.tokens_to(level) for level in reached]
        rows.append(
            [
                setting.model,
                str(setting.seed),
                str(run.steps),
                f"{step_flops(setting.config()) / 1e9:.1f}",
                f"{run.seconds:.2f}",
                _number(run.chrf, ".1f"),
                _number(run.exact, ".1f"),
                _number(run.heldout, ".3f"),
                f"{run.losses[-1]:.3f}",
                *(_number(None if n is None else n / 1e6, ".2f") for n in tokens),
            ]
        )
    return [f"## {corpus}", "", *("| " + " | ".join(row) + " |" for row in rows)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def run(setting: Setting, folder: Path, steps: int) -> int:
    """Train and evaluate; returns the exit code. What is done is not done again."""
    workdir = folder / setting.folder
    done = workdir / "experiment.json"
    if done.exists() and json.loads(done.read_text("utf-8"))["steps"] >= steps:
        return 0
    workdir.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "sbp", "train", *setting.options(steps)]
    with (workdir / "log.txt").open("a", encoding="utf-8") as log:
        child = subprocess.Popen([*words, "--workdir", str(workdir)], stdout=log, stderr=log)
        while child.poll() is None:
            try:
                child.wait()
            except KeyboardInterrupt:
                print("  interrupted; waiting until its step is saved ..", flush=True)
    if child.returncode == 0:
        write_whole(done, json.dumps({"steps": steps}).encode())
    return child.returncode


def settings(corpora: Sequence[str], seeds: int) -> list[Setting]:
    """All runs; the models that most comparisons need come first."""
    grid = itertools.product(range(seeds), corpora, LAYERS, EXPERTS)
    return [
        Setting(corpus=corpus, layers=layers, experts=experts, seed=seed)
        for seed, corpus, layers, experts in grid
    ]


def collect(folder: Path) -> dict[Setting, Found]:
    """Every run that a folder has steps of."""
    names = {s.folder: s for s in settings(CORPORA, 100)}
    found = {
        names[path.name]: read(path) for path in sorted(folder.glob("*")) if path.name in names
    }
    return {setting: run for setting, run in found.items() if run}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/experiment"))
    parser.add_argument("--share", type=float, default=1.0, help=f"of {STEPS} steps (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="of each model (default 1)")
    parser.add_argument("--corpus", choices=CORPORA, action="append", help="default both")
    parser.add_argument("--report", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    if not 0 < args.share <= 100 or not 1 <= args.seeds <= 100:
        parser.error("--share is above 0 and --seeds from 1 to 100")
    steps = max(1, round(args.share * STEPS))
    every = [] if args.report else settings(args.corpus or CORPORA, args.seeds)
    failed = []
    for number, setting in enumerate(every, 1):
        started = time.monotonic()
        print(f"{number} of {len(every)}: {setting.corpus}, {setting.model} ..", flush=True)
        code = run(setting, args.workdir, steps)
        if code >= 128:
            print("interrupted; the same command goes on")
            return code
        if code:
            failed.append(args.workdir / setting.folder / "log.txt")
            print(f"  failed; see {failed[-1]}", flush=True)
        print(f"  {time.monotonic() - started:.0f} s", flush=True)
        write_whole(args.workdir / "report.md", report(collect(args.workdir)).encode())
    text = report(collect(args.workdir))
    print(text)
    for log in failed:
        print(f"failed: {log}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
