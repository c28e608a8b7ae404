"""What a training run shows: a progress bar with the model's health, and the evaluation as
tables."""

from __future__ import annotations

import time
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sbp.moe.evaluate import MODEL, Evaluation
from sbp.moe.model import Metrics

_BARS = "▁▂▃▄▅▆▇█"


def load_bars(load: np.ndarray) -> str:
    """One bar per expert; a full bar is twice the even share or more."""
    share = load / max(load.sum(), 1.0) * len(load)
    return "".join(_BARS[min(7, int(s * 4))] for s in share)


def summarize(metrics: Metrics) -> dict[str, float]:
    """Scalars of one step, from host arrays: loss, nll, aux, accuracy, drop rates and load
    imbalance.

    `drop` is the fraction of wanted choices that found no slot; choices that random routing left
    out were not wanted. `imbalance` is the busiest expert's load over the even share, worst layer.
    """
    sides = (metrics.encoder, metrics.decoder)
    tokens = sum(float(np.sum(side.tokens)) for side in sides)
    dropped = sum(float(np.sum(side.dropped_first) + np.sum(side.dropped_second)) for side in sides)
    skipped = sum(float(np.sum(side.skipped_second)) for side in sides)
    wanted = sum(float(np.sum(side.demand)) for side in sides)
    loads = np.concatenate([np.asarray(side.load) for side in sides])
    return {
        "loss": float(metrics.loss),
        "nll": float(metrics.nll),
        "aux": float(metrics.aux),
        "accuracy": float(metrics.correct),
        "drop": dropped / max(wanted, 1.0),
        "skipped": skipped / max(tokens, 1.0),
        "imbalance": float(np.max(loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1.0))),
        "tokens": float(sides[0].tokens[0] + sides[1].tokens[0]),
        "grad_norm": float(metrics.grad_norm),
        "skipped_step": float(metrics.skipped_step),
    }


class TrainingDisplay:
    """A live progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, first: int, steps: int, line_every: int = 50) -> None:
        self._console, self._steps, self._line_every = console, steps, line_every
        self._progress = Progress(
            TextColumn("step {task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[health]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=first, health="")
        self._first, self._tokens = first, 0.0
        self._counted_from: float | None = None

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Show the state after `step` steps.

        Returns:
          The scalars shown, with `tokens_per_second` (source and target, without padding) since the
          first step.
        """
        values = summarize(metrics)
        now = time.monotonic()
        if self._counted_from is None:
            # The first step compiles; the rate and the remaining time leave it out.
            self._counted_from, self._first = now, step
        else:
            self._tokens += values["tokens"]
        elapsed = max(now - self._counted_from, 1e-9)
        values["tokens_per_second"] = self._tokens / elapsed
        load = load_bars(
            np.sum(np.concatenate([metrics.encoder.load, metrics.decoder.load]), axis=0)
        )
        health = (
            f"loss {values['loss']:.3f}  aux {values['aux']:.2f}  load {load}  drop"
            f" {values['drop']:.1%}  {values['tokens_per_second']:,.0f} tokens/s"
        )
        self._progress.update(self._task, completed=step, health=health)
        if not self._console.is_terminal and (step % self._line_every == 0 or step == self._steps):
            eta = elapsed / max(step - self._first, 1) * (self._steps - step)
            self._console.print(
                f"step {step:>5}/{self._steps}  {health}  ETA {eta:.0f} s",
                highlight=False,
                soft_wrap=True,
            )
        if values["skipped_step"]:
            self._progress.console.print(
                f"step {step:>5}/{self._steps}  skipped: loss {values['loss']:g}, norm of the"
                f" gradients {values['grad_norm']:g}",
                highlight=False,
            )
        return values

    def heldout(self, step: int, nll: float) -> None:
        """Show the loss on held-out text after `step` steps, in nats per target token."""
        self._progress.console.print(
            f"step {step:>5}/{self._steps}  held-out loss {nll:.3f}", highlight=False
        )


def show_evaluation(console: Console, result: Evaluation) -> None:
    """Print the scores by held-out set and by languages beside the baselines, and samples."""
    console.print(_by_set(result))
    console.print(_by_languages(result))
    samples = Table(title="sample translations", title_justify="left")
    for name in ("", "source", "reference", "translation"):
        samples.add_column(name)
    for pair, text in result.samples:
        # Text, not str: brackets in a sentence are no markup.
        right = Text(text, style="green" if text == pair.target else "red")
        samples.add_row(Text(pair.language), Text(pair.source), Text(pair.target), right)
    console.print(samples)
    ahead = sum(score.beats_baselines for score in result.languages)
    lines = [
        f"chrF is above every baseline's in {ahead} of {len(result.languages)} languages",
        *result.signatures,
    ]
    if result.too_long:
        lines.append(
            f"{result.too_long} held-out sources are longer than the model's; their translations"
            " count as empty"
        )
    console.print("\n".join(lines), highlight=False, markup=False)


def _by_set(result: Evaluation) -> Table:
    table = Table(title="held-out translations", title_justify="left")
    for name in ("set", "system"):
        table.add_column(name)
    for name in ("sentences", "exact %", "chrF", "BLEU"):
        table.add_column(name, justify="right")
    sets = result.sets if len(result.sets) == 1 else (*result.sets, result.overall)
    for score in sets:
        for system, quality in score.systems.items():
            first = system == MODEL
            table.add_row(
                score.name if first else "",
                system,
                str(score.sentences) if first else "",
                f"{quality.exact:.1f}",
                f"{quality.chrf:.1f}",
                "-" if quality.bleu is None else f"{quality.bleu:.1f}",
                style="bold" if first else "",
            )
        table.add_section()
    return table


def _by_languages(result: Evaluation) -> Table:
    table = Table(title="all sets by language, most training text first", title_justify="left")
    table.add_column("languages")
    for name in ("sentences", "exact %", "chrF", "best baseline"):
        table.add_column(name, justify="right")
    table.add_column("")
    for score in result.groups:
        best = score.systems[score.baseline]
        table.add_row(
            Text(score.name),
            str(score.sentences),
            f"{score.model.exact:.1f}",
            f"{score.model.chrf:.1f}",
            f"{best.chrf:.1f}",
            Text(" ".join(score.languages[:6]) + " .." * (len(score.languages) > 6)),
        )
    return table
