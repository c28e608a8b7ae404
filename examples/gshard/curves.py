"""The curves of a run as one HTML page: `<workdir>/curves.html`, drawn from its metrics.

sbp curves runs/tiny-mt
"""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.gshard.options import CommandParser
from sbp.errors import SbpError
from sbp.moe.checkpoint import write_whole
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

_WIDTH, _HEIGHT, _MOST = 600, 160, 300  # the last: points of a curve, two to a pixel of a phone

_STYLE = """
:root{color-scheme:light dark;--ink:#222;--page:#fff;--line:#ccc;
--c0:#2a6099;--c1:#c43d50;--c2:#1f7a2f;--c3:#8a2c7a;--c4:#8a6d00;--c5:#007c91}
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--page:#161616;--line:#444;
--c0:#7fb2e5;--c1:#ff8a98;--c2:#6fce80;--c3:#e08fd0;--c4:#dcc05a;--c5:#5fd0e3}}
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:1em auto;padding:0 1em;
color:var(--ink);background:var(--page);overflow-wrap:anywhere}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26em),1fr));gap:1em 2em}
figure{margin:0;min-width:0}h2{font-size:1.1em;margin:.5em 0 0}
.plot{display:grid;grid-template-columns:5em 1fr;font-size:12px}
.y,.x{display:flex;justify-content:space-between}.y{flex-direction:column;text-align:right;
white-space:nowrap;padding-right:.5em}.x{grid-column:2}
.plot svg{width:100%;height:160px;display:block;
border:solid var(--line);border-width:0 0 1px 1px}
path{fill:none;stroke-width:1.6;stroke-linecap:round;vector-effect:non-scaling-stroke}
ul{list-style:none;padding:0;margin:.3em 0;font-size:13px;display:flex;flex-wrap:wrap;gap:0 1em}
li svg{width:2em;height:.7em}p{margin:0}
"""

_DASHES = ("none", "6 4", "2 4", "10 4 2 4")
"""Curves of one colour differ by them, and readers who see no colour have them."""


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


def thinned(points: Sequence[Point], most: int = _MOST) -> list[Point]:
    """At most `most` points, each the mean of some neighbours; None stays where all are None.

    >>> thinned([(1, 1.0), (2, 3.0), (3, None), (4, None)], 2)
    [(2, 2.0), (4, None)]
    """
    each = -(-len(points) // most) or 1
    found: list[Point] = []
    for start in range(0, len(points), each):
        part = points[start : start + each]
        known = [value for _, value in part if value is not None]
        found.append((part[-1][0], math.fsum(v / len(known) for v in known) if known else None))
    return found


def _path(points: Sequence[Point], x: Callable[[int], float], y: Callable[[float], float]) -> str:
    """The line through some points, with a gap at each None."""
    words, pen = [], "M"
    for step, value in points:
        if value is None:
            pen = "M"
            continue
        words.append(f"{pen}{x(step):.1f} {y(value):.1f}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(words)


def _number(value: float) -> str:
    """Four digits, and thousands as people write them."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def _said(name: str, points: Sequence[Point]) -> str:
    """A curve in words."""
    known = [(step, value) for step, value in points if value is not None]
    gaps = len(points) - len(known)
    lost = f", not finite in {gaps:,} steps" if gaps else ""
    if not known:
        return f"{name}: no finite number{lost}"
    low, high = min(v for _, v in known), max(v for _, v in known)
    (first, start), (last, end) = known[0], known[-1]
    return (
        f"{name}: {_number(start)} at step {first:,}, {_number(end)} at step {last:,}, between"
        f" {_number(low)} and {_number(high)}{lost}"
    )


def _figure(chart: Chart) -> str:
    """A chart as HTML: the picture, its axes and each curve in words."""
    steps = [step for points in chart.curves.values() for step, _ in points]
    drawn = {name: thinned(points) for name, points in chart.curves.items()}
    values = [v for points in drawn.values() for _, v in points if v is not None] or [0.0]
    left, right, low, high = min(steps), max(steps), min(values), max(values)
    # Halves, since the difference of two finite numbers may be none.
    tall, wide = high / 2 - low / 2 or 1.0, right - left or 1
    lines, keys = [], []
    for i, (name, points) in enumerate(drawn.items()):
        style = f"stroke:var(--c{i % 6});stroke-dasharray:{_DASHES[i // 6 % len(_DASHES)]}"
        line = _path(
            points,
            lambda step: (step - left) / wide * _WIDTH,
            lambda value: _HEIGHT - 4 - (value / 2 - low / 2) / tall * (_HEIGHT - 8),
        )
        lines.append(f'<path style="{style}" d="{line}"/>')
        key = f'<svg viewBox="0 0 30 10" aria-hidden="true"><path style="{style}" d="M0 5H30"/>'
        keys.append(f"<li>{key}</svg> {html.escape(_said(name, chart.curves[name]))}</li>")
    each = max(-(-len(points) // _MOST) for points in chart.curves.values())
    means = f"; each point is the mean of {each} steps" if each > 1 else ""
    label = f"{chart.title}, steps {left:,} to {right:,}; in words below"
    return (
        f"<figure><h2>{html.escape(chart.title)}</h2><p>{html.escape(chart.note + means)}</p>"
        f'<div class="plot"><div class="y"><span>{_number(high)}</span>'
        f"<span>{_number(low)}</span></div>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="{html.escape(label)}">{"".join(lines)}</svg>'
        f'<div class="x"><span>step {left:,}</span><span>{right:,}</span></div></div>'
        f"<ul>{''.join(keys)}</ul></figure>"
    )


def curves_page(title: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The page: no script, and no other file.

    Arguments:
      title: of the page.
      records: one for each step, as `read_metrics` gives them.
    """
    name = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>{name}</title><style>{_STYLE}</style></head><body>'
        f"<h1>{name}</h1><main>{''.join(map(_figure, charts(records)))}</main></body></html>\n"
    )


def write_curves(workdir: Path) -> Path | None:
    """Draw the curves of a run into its folder; None where no step has been reported.

    Raises:
      SbpError: `bad-checkpoint` where the page cannot be written.
    """
    records = read_metrics(workdir)
    if not records:
        return None
    write_whole(workdir / PAGE, curves_page(f"Curves of {workdir}", records).encode())
    return workdir / PAGE


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
