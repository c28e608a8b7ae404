"""Figures as PNG files, and an HTML page with all of them and the numbers that they show."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbp.errors import SbpError
from sbp.moe.checkpoint import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart."""

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;"
    "color:#222;background:#fff}img{max-width:100%}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure with its numbers.

    Attributes:
      name: of its file, without the ending.
      title: a sentence.
      note: what it shows, where the numbers come from, and where they differ from the paper's.
      figure: the matplotlib figure.
      header, rows: its numbers as a table, the name of each row first.
    """

    name: str
    title: str
    note: str
    figure: Figure
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def canvas(width: float = 8.0) -> tuple[Figure, Axes]:
    """An empty figure and its axes.

    Arguments:
      width: in inches.

    Raises:
      SbpError: `unknown-option` where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SbpError(
            "figures need matplotlib; install the extra: pip install 'sbp-jax[gshard]'",
            code="unknown-option",
        ) from None
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def write_drawings(folder: Path, page: str, title: str, drawings: Sequence[Drawing]) -> list[Path]:
    """Write each figure as PNG, and a page with all of them, which needs no other file.

    Arguments:
      folder: where; it is made if it is not there.
      page: the name of the HTML file.
      title: of the page.
      drawings: the figures.

    Returns:
      The files.

    Raises:
      SbpError: `unknown-option` where the folder cannot be written.
    """
    body, files = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in drawings:
            png = _png(drawing.figure)
            files.append(folder / f"{drawing.name}.png")
            write_whole(files[-1], png)
            body.append(_section(drawing, png))
        files.append(folder / page)
        text = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>'
            f"{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
            f"<h1>{html.escape(title)}</h1>{''.join(body)}</body></html>\n"
        )
        write_whole(files[-1], text.encode())
    except OSError as error:
        raise SbpError(
            f"cannot write figures to {folder}: {error.strerror}", code="unknown-option"
        ) from None
    return files


def _png(figure: Any) -> bytes:
    held = io.BytesIO()
    # Without the version of the library the same numbers give the same bytes.
    figure.savefig(held, format="png", dpi=150, metadata={"Software": None})
    return held.getvalue()


def _section(drawing: Drawing, png: bytes) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    rows = "".join(row(cells, "td") for cells in drawing.rows)
    image = base64.b64encode(png).decode()
    return (
        f"<h2>{html.escape(drawing.title)}</h2>"
        f'<img alt="{html.escape(drawing.title)}" src="data:image/png;base64,{image}">'
        f"<p>{html.escape(drawing.note)}</p><details open><summary>numbers</summary><table>"
        f"<thead>{row(drawing.header, 'th')}</thead><tbody>{rows}</tbody></table></details>"
    )
