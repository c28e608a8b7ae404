"""What a training run shows: a progress bar with the model's health, and the evaluation as
tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from examples.gshard.evaluate import MODEL, Evaluation, Quality, Score
from sbp.errors import SbpError
from sbp.moe.trainer import Values

_BARS = "▁▂▃▄▅▆▇█"
_WIDEST = 32
"""Bars of one layer: of more experts, neighbours share one."""

_LINE_EVERY = 50
"""Steps for each line that is printed where there is no terminal."""


def load_bars(load: np.ndarray) -> str:
    """One bar per expert; a full bar is twice the even share or more.

    >>> load_bars(np.asarray([1.0, 1.0, 2.0, 0.0]))
    '▅▅█▁'
    """
    if len(load) > _WIDEST:
        load = np.asarray([part.mean() for part in np.array_split(load, _WIDEST)])
    share = load / max(load.sum(), 1.0) * len(load)
    return "".join(_BARS[min(7, int(s * 4))] for s in share)


def show_error(error: SbpError) -> None:
    """Print an error of the user, without a traceback."""
    Console(stderr=True).print(
        f"error[{error.code}]: {error.message}", markup=False, highlight=False, soft_wrap=True
    )


class TrainingDisplay:
    """A live view on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, first: int, steps: int) -> None:
        self._console, self._steps = console, steps
        self._progress = Progress(
            TextColumn("step {task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._task = self._progress.add_task("", total=steps, completed=first)
        self._tokens = self._seconds = 0.0
        self._timed = 0
        self._heldout = ""
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def __enter__(self) -> TrainingDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, step: int, values: Values) -> None:
        """Show the numbers of a step, as `sbp.moe.trainer.summarize` and `rates` name them, and
        the loss on held-out text where it was taken."""
        number = {name: value for name, value in values.items() if not isinstance(value, list)}
        if "seconds" in number:  # the first step compiles; rates and the remaining time omit it
            self._tokens += number["tokens"]
            self._seconds += number["seconds"]
            self._timed += 1
        speed = f"{self._tokens / max(self._seconds, 1e-9):,.0f} tokens/s"
        if number["skipped_step"]:
            self._console.print(
                f"step {step:>5}/{self._steps}  skipped: loss {number['loss']:g}, norm of the"
                f" gradients {number['grad_norm']:g}",
                highlight=False,
            )
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step)
            self._live.update(self._dashboard(number, values, speed))
        elif step % _LINE_EVERY == 0 or step == self._steps:
            left = self._seconds / max(self._timed, 1) * (self._steps - step)
            parts = [f"loss {number['loss']:.3f}", *self._experts(values), speed]
            self._console.print(
                f"step {step:>5}/{self._steps}  {'  '.join(parts)}  ETA {left:.0f} s",
                highlight=False,
                soft_wrap=True,
            )
        if nll := number.get("heldout_nll"):
            self._heldout = f" (held-out {nll:.3f})"
            self._console.print(
                f"step {step:>5}/{self._steps}  held-out loss {nll:.3f}", highlight=False
            )

    def _dashboard(self, number: Mapping[str, float], values: Values, speed: str) -> Group:
        """The progress bar with four lines, three for a dense model."""
        training = [
            f"loss {number['loss']:.3f}{self._heldout}",
            f"accuracy {number['accuracy']:.1%}",
            f"gradient norm {number['grad_norm']:.3g}",
            f"learning rate {number['learning_rate']:.3g}",
            f"skipped steps {number['skipped_steps']:.0f}",
        ]
        if "mfu" in number:
            speed += f"   {number['flops_per_second'] / 1e9:,.1f} GFLOP/s   MFU {number['mfu']:.1%}"
        lines = ["   ".join(training), speed, "   ".join(self._experts(values))]
        return Group(self._progress, *(Text(f"  {line}") for line in lines if line))

    def _experts(self, values: Values) -> list[str]:
        """What the MoE layers do; nothing for a dense model."""
        loads = [np.asarray(load) for name, load in values.items() if name.endswith("/load")]
        if not loads:
            return []
        unused = sum(int(np.sum(load == 0)) for load in loads)
        return [
            f"aux {values['aux']:.2f}",
            f"load {' '.join(map(load_bars, loads))}",
            f"drop {values['drop']:.1%}",
            *([f"unused experts {unused}"] if unused else []),
        ]


def show_evaluation(console: Console, result: Evaluation, *, languages: bool = False) -> None:
    """Print the scores by held-out set and by languages beside the baselines, and samples.

    Arguments:
      console: where to print.
      result: the scores.
      languages: of each language too, not of groups of them alone.
    """
    console.print(_by_set(result))
    console.print(_by_languages("groups of languages", result.groups))
    if languages:
        console.print(_by_languages("language", result.languages))
    headers = "", "source", "reference", "translation"
    samples = Table(*headers, title="sample translations", title_justify="left")
    for pair, text in result.samples:
        # Text, not str: brackets in a sentence are no markup.
        right = Text(text, style="green" if text == pair.target else "red")
        samples.add_row(Text(pair.language), Text(pair.source), Text(pair.target), right)
    console.print(samples)
    ahead = sum(score.beats_baselines for score in result.languages)
    lost = (
        (
            result.too_long,
            f"{result.too_long} held-out sources are longer than the model's; their translations"
            " count as empty",
        ),
        (
            result.unsayable,
            f"references with characters that the vocabulary cannot spell: {result.unsayable}; no"
            " translation equals them. See the options normalization, byte_fallback and"
            " character_coverage",
        ),
    )
    lines = [
        f"chrF is above every baseline's in {ahead} of {len(result.languages)} languages",
        *result.signatures,
        *(text for count, text in lost if count),
    ]
    console.print("\n".join(lines), highlight=False, markup=False)


def _by_set(result: Evaluation) -> Table:
    numbers = (Column(name, justify="right") for name in ("sentences", "exact %", "chrF", "BLEU"))
    table = Table("set", "system", *numbers, title="held-out translations", title_justify="left")
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
                _bleu(quality),
                style="bold" if first else "",
            )
        table.add_section()
    return table


def _by_languages(by: str, scores: Sequence[Score]) -> Table:
    names = "sentences", "exact %", "chrF", "best baseline", "BLEU"
    table = Table(
        "languages",
        *(Column(name, justify="right") for name in names),
        "",
        title=f"all sets by {by}, most training text first",
        title_justify="left",
    )
    for score in scores:
        best = score.systems[score.baseline]
        table.add_row(
            Text(score.name),
            str(score.sentences),
            f"{score.model.exact:.1f}",
            f"{score.model.chrf:.1f}",
            f"{best.chrf:.1f}",
            _bleu(score.model),
            Text(" ".join(score.languages[:6]) + " .." * (len(score.languages) > 6)),
        )
    return table


def _bleu(quality: Quality) -> str:
    return "-" if quality.bleu is None else f"{quality.bleu:.1f}"
