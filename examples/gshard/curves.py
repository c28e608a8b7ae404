"""The curves of a run as PNG files and one HTML page: `<workdir>/curves.html`, drawn from its
metrics.

sbp curves runs/tiny-mt
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.gshard.drawing import COLOURS, Drawing, canvas, write_drawings
from examples.gshard.options import CommandParser
from sbp.errors import SbpError
from sbp.moe.trainer import FILE, read_metrics

PAGE = "curves.html"

Point = tuple[int, float | None]
"""A step and a number, None where it was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Some curves with common axes.

    Attributes:
      title: what they show.
      note: how to read them.
      curves: points of each, by name, in the order of steps.
    """

    title: str
    note: str
    curves: Mapping[str, Sequence[Point]]


_RUN = (
    ("Loss", "per target token, in nats", ("loss", "nll", "heldout_nll")),
    ("Norm of the gradients", "of all together, before clipping", ("grad_norm",)),
    ("Learning rate", "of the schedule", ("learning_rate",)),
    ("Tokens per second", "source and target, without padding", ("tokens_per_second",)),
    ("Skipped steps", "so far; each changed nothing", ("skipped_steps",)),
)
"""Charts of the whole run: title, note, and the names of the numbers."""

_LAYERS = (
    ("Load of the busiest expert", "over the even share; 1 is balanced", "load"),
    ("Entropy of the router", "mean over tokens, in nats", "entropy"),
    ("Dropped choices", "share of wanted choices without a slot", "drop"),
)
"""Charts with a curve for each MoE layer: title, note, and the end of the names."""

_DASHES = ("-", "--", ":", "-.")
"""Curves of one color differ by them."""


def _numbers(records: Iterable[Mapping[str, Any]], name: str) -> Iterator[Point]:
    """The points of a number; steps that do not have it are left out."""
    for record in records:
        if name in record:
            yield record["step"], _finite(record[name])


def _finite(value: Any) -> float | None:
    """A number of a file, or how uneven a list of loads is; None for anything else."""
    if isinstance(value, list):
        loads = [_finite(x) for x in value if not isinstance(x, list)]
        known = [x for x in loads if x is not None]
        whole = len(known) == len(value) and sum(known) > 0
        return max(known) * len(known) / sum(known) if whole else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < sys.float_info.max else None


def charts(records: Iterable[Mapping[str, Any]]) -> list[Chart]:
    """The charts of a run that has numbers for them.

    Arguments:
      records: one for each step, as `read_metrics` gives them. Of a step that is there twice, the
        last counts.
    """
    by_step = {record["step"]: record for record in records}
    ordered = [by_step[step] for step in sorted(by_step)]
    names = list(dict.fromkeys(name for record in ordered for name in record))

    def chart(title: str, note: str, found: Mapping[str, str]) -> Chart:
        curves = {label: list(_numbers(ordered, name)) for label, name in found.items()}
        return Chart(title=title, note=note, curves=curves)

    made = [chart(title, note, {n: n for n in of if n in names}) for title, note, of in _RUN]
    for title, note, end in _LAYERS:
        layers = {name.removesuffix(f"/{end}"): name for name in names if name.endswith(f"/{end}")}
        made.append(chart(title, note, layers))
    return [chart for chart in made if chart.curves]


def _number(value: float) -> str:
    """Four digits, and thousands as people write them."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def _row(name: str, points: Sequence[Point]) -> list[str]:
    """A curve in numbers."""
    known = [value for _, value in points if value is not None]
    ends = (known[0], known[-1], min(known), max(known)) if known else ()
    shown = [_number(value) for value in ends] or [""] * 4
    return [name, *shown, f"{len(points) - len(known):,}"]


def _drawing(chart: Chart) -> Drawing:
    """A chart as a figure, and each curve in numbers."""
    figure, axes = canvas()
    for i, (name, points) in enumerate(chart.curves.items()):
        axes.plot(
            [step for step, _ in points],
            # matplotlib cannot scale the largest numbers.
            np.clip([math.nan if v is None else v for _, v in points], -1e300, 1e300),
            color=COLOURS[i % len(COLOURS)],
            linestyle=_DASHES[i // len(COLOURS) % len(_DASHES)],
            marker=".",
            markersize=2,
            label=name.replace("$", r"\$"),
        )
    axes.set_xlabel("step")
    axes.legend(fontsize=8)
    return Drawing(
        name=f"curves-{chart.title.lower().replace(' ', '-')}",
        title=chart.title,
        note=chart.note,
        figure=figure,
        header=("curve", "first", "last", "least", "most", "steps that are not finite"),
        rows=[_row(name, points) for name, points in chart.curves.items()],
    )


def write_curves(workdir: Path) -> Path | None:
    """Draw the curves of a run into its folder; None where no step has been reported.

    Raises:
      SbpError: `bad-checkpoint` where the page cannot be written; `unknown-option` where matplotlib
        is not installed.
    """
    records = read_metrics(workdir)
    drawings = [_drawing(chart) for chart in charts(records)]
    title = f"Curves of {workdir}"
    return write_drawings(workdir, PAGE, title, drawings)[-1] if records else None


class TensorBoard(AbstractContextManager["TensorBoard"]):
    """The numbers of a run as TensorBoard's curves, in `<workdir>/log`.

    Arguments:
      workdir: the folder of the run.
      first: steps done; curves of later steps, which no checkpoint kept, are left out.
    """

    def __init__(self, workdir: Path, first: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(workdir / "log"), purge_step=first + 1)

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the numbers of a step; a list is a histogram."""
        for name, value in values.items():
            if isinstance(value, list):
                self._writer.add_histogram(name, np.asarray(value), step)
            else:
                self._writer.add_scalar(name, value, step)


def main(argv: Sequence[str]) -> int:
    """The command line of `sbp curves`.

    Raises:
      SbpError: `bad-checkpoint` for a folder without a run.
    """
    about = "Draw the curves of a run again, also while it is training."
    parser = CommandParser(prog="sbp curves", description=about, allow_abbrev=False)
    parser.add_argument("workdir", metavar="RUN", help="folder of a training run")
    workdir = Path(parser.parse_all(argv).workdir)
    page = write_curves(workdir)
    if page is None:
        raise SbpError(
            f"{workdir / FILE} has no step of a run; name the --workdir of one",
            code="bad-checkpoint",
        )
    print(f"wrote {page}")
    return 0
