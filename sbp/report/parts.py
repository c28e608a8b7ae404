"""The parts of a report, without their looks: the same parts become terminal text and HTML; and the
board that their pictures are drawn on.

Words in `backticks` are code. Every renderer shows all facts of a part, in the order of its fields.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from sbp.errors import Diagnostic, Label, SbpError, bytes_text
from sbp.plan.program import PHASES, Phase
from sbp.source.reader import shorten

SHOWN_ROWS = 12
"""Rows of a long table; the others are folded."""

Cell = str | float
"""A text, or a share: a number from 0 to 1 that shows as a bar."""

Item = TypeVar("Item")


TableRow = tuple[tuple[Cell, ...], str]
"""Cells, and a sentence below them; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under headings (`table` makes one).

    Arguments:
      headings: one for each column.
      right: the numbers of the columns whose cells stand at the right and do not wrap.
      rows: the rows that are shown.
      folded: further rows, which HTML can open.
      rest: what sums them up.
    """

    headings: tuple[str, ...]
    right: frozenset[int]
    rows: tuple[TableRow, ...]
    folded: tuple[TableRow, ...] = ()
    rest: str = ""


def table(
    headings: Iterable[str],
    rows: Iterable[Iterable[Cell]],
    *,
    details: Iterable[str] = (),
    shown: int | None = None,
    rest: Callable[[int], str] = "and {} more".format,
) -> Table:
    """A table.

    Arguments:
      headings: one for each column; one that begins with `>` is that of figures, which stand at
        the right.
      rows: the cells of each row.
      details: the sentence below each row.
      shown: the number of rows that are shown; None for all. The others are folded.
      rest: their number in words.

    >>> found = table(("name", ">size"), [("a", "1"), ("b", "2"), ("c", "3")], shown=1)
    >>> found.headings, found.right, len(found.rows), found.rest
    (('name', 'size'), frozenset({1}), 1, 'and 2 more')
    """
    names = tuple(headings)
    made = tuple(
        (tuple(cells), detail) for cells, detail in zip_longest(rows, details, fillvalue="")
    )
    kept = len(made) if shown is None else min(shown, len(made))
    return Table(
        headings=tuple(name.removeprefix(">") for name in names),
        right=frozenset(k for k, name in enumerate(names) if name[:1] == ">"),
        rows=made[:kept],
        folded=made[kept:],
        rest=rest(len(made) - kept) if made[kept:] else "",
    )


def table_of(
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], Cell]],
    *,
    detail: Callable[[Item], str] = lambda _: "",
    shown: int | None = None,
    rest: Callable[[Sequence[Item]], str] = lambda left: f"and {len(left)} more",
) -> Table:
    """A table with a row for each item.

    Arguments:
      items: the items.
      columns: for each heading, the cell of an item.
      detail: the sentence below the row of an item.
      shown: the number of rows that are shown; None for all. The others are folded.
      rest: what sums up the items that are folded.

    >>> table_of(["a", "bc"], {"name": str, ">length": lambda t: str(len(t))}).rows[1]
    (('bc', '2'), '')
    """
    every = list(items)
    return table(
        columns,
        ([cell(item) for cell in columns.values()] for item in every),
        details=map(detail, every),
        shown=shown,
        rest=lambda _: rest(every[shown or 0 :]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names with values."""

    pairs: tuple[tuple[str, str], ...]


Mark = tuple[int, int, Label]
"""An underlined part of a source line, primary with carets, others with dashes: its columns from 0,
the second excluded, and the label behind the marks."""

SourceLine = tuple[int, str | None, tuple[Mark, ...]]
"""The number of a line, its text or None where the source cannot be read, and its marks."""


Excerpt = tuple[str, str, tuple[SourceLine, ...]]
"""Lines of one file: file:line:column of the primary mark, or of the first mark in the file; the
function or region around it and the pass, empty for files after the first; and the lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDiagnostic:
    """A diagnostic with its source lines, ready to be rendered."""

    diagnostic: Diagnostic
    excerpts: tuple[Excerpt, ...] = ()

    @property
    def helps(self) -> list[tuple[str, str]]:
        """The edits, each with what a device sends after it, and its memory where a plan was
        made."""
        return [
            (
                h.text,
                f"{bytes_text(h.bytes_per_device)} per device"
                if h.peak_memory_bytes is None
                else f"{bytes_text(h.bytes_per_device)} sent,"
                f" {bytes_text(h.peak_memory_bytes)} memory per device",
            )
            for h in self.diagnostic.helps
        ]


Plain = Table | Facts | str
"""A text is a paragraph: a sentence or two."""


def sentences(texts: Mapping[str, object], between: str = " ") -> str:
    """The sentences whose condition holds, one behind the other; empty ones are left out.

    >>> sentences({"It is split.": True, "It is partial.": ()})
    'It is split.'
    """
    return between.join(text for text, condition in texts.items() if text and condition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing. Terminals show `instead`, and HTML has it folded below the drawing.

    Arguments:
      caption: what it shows, in a sentence.
      svg: the drawing (`Board`).
      instead: the same facts in words and tables; empty where the page has them elsewhere.
    """

    caption: str
    svg: str
    instead: tuple[Plain, ...]


Leaf = Plain | Picture | ShownDiagnostic


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with its parts; `opened` says whether HTML shows them at first."""

    title: str
    parts: tuple[Leaf, ...]
    opened: bool = True


Part = Leaf | Section


def table_section(
    title: str,
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], Cell]],
    *,
    opened: bool = True,
    **more: Any,
) -> Section:
    """A section with the table of some items, whose other arguments are `more` (`table_of`)."""
    return Section(title=title, parts=(table_of(items, columns, **more),), opened=opened)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report. Without a title only the parts are shown."""

    title: str = ""
    parts: tuple[Part, ...]


# ---- marks --------------------------------------------------------------------------------------
# Only renderers read the marks of a text. No other code of sbp does.


def pieces(text: str) -> list[tuple[str, bool]]:
    """The pieces of a text in order, and whether each is code. A backtick without a partner is
    plain.

    >>> pieces("made by `x @ w` at a.py:1")
    [('made by ', False), ('x @ w', True), (' at a.py:1', False)]
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    return [(part, number % 2 == 1) for number, part in enumerate(parts) if part or number % 2]


def plain(text: str) -> str:
    """A text without its marks."""
    return text.replace("`", "")


def words(text: str) -> list[str]:
    """The words of a text with their marks. Code is not split.

    >>> words("made by `x @ w`, once")
    ['made', 'by', '`x @ w`,', 'once']
    """
    signs = (
        (sign, not is_code and sign.isspace())
        for content, is_code in pieces(text)
        for sign in (f"`{content}`" if is_code else content)
    )
    return [
        "".join(sign for sign, _ in run)
        for is_blank, run in groupby(signs, key=lambda at: at[1])
        if not is_blank
    ]


# ---- drawings -----------------------------------------------------------------------------------
# Shapes -> SVG and PNG. A picture has no style sheet and no script: it looks the same inside a
# report, in a file and as PNG. Text and thin lines have the colour of the page around it
# (`currentColor`), and fills are half transparent, so it is readable on light and dark pages.


NAMESPACE = "http://www.w3.org/2000/svg"
FILE_ATTRIBUTES = f' xmlns="{NAMESPACE}" style="background:white"'
"""What a drawing has in a file and not inside a page, whose background it takes."""

FONT_SIZE = 11
"""Of a label, in pixels."""

CELL = 6.7
"""Width of one cell of monospaced text at `FONT_SIZE`, in pixels, rounded up."""

PHASE_HEIGHT = 14.0
"""Pixels of the band of passes."""

Point = tuple[float, float]

SPLIT, WHOLE, PARTIAL, COSTLY = "#3b82f6", "#8a8f98", "#f59e0b", "#dc2626"
"""The colours of what is split, whole and partial, and of what costs most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ink:
    """How a shape looks.

    Arguments:
      color: of lines and text, and of a fill.
      opacity: of a fill, from 0 to 1.
      width: of a line, in pixels; 0 for a box without a border.
      dashed: whether the line is.
      bold: whether the text is.
    """

    color: str = "currentColor"
    opacity: float = 0.25
    width: float = 1
    dashed: bool = False
    bold: bool = False


class Board:
    """Shapes on a board. Coordinates are in pixels from the top left corner. The `title` of a shape
    shows when the pointer rests on it.

    Arguments:
      width, height: of the board.

    >>> board = Board(80, 20)
    >>> board.rect((0, 0), (80, 20), Ink(color="#3b82f6"), title="a weight")
    >>> board.text((40, 14), "S(0)", anchor="middle")
    >>> board.svg("one box").startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    True
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._shapes: list[ElementTree.Element] = []

    def rect(self, corner: Point, size: Point, ink: Ink = Ink(), *, title: str = "") -> None:
        """A filled box from its top left `corner`; `size` is its width and height."""
        box = {"x": corner[0], "y": corner[1], "width": size[0], "height": size[1]}
        self._add("rect", {**box, "rx": min(3, size[0] / 2, size[1] / 2), **_fill(ink)}, title)

    def line(
        self, points: Sequence[Point], ink: Ink = Ink(), *, arrow: bool = False, title: str = ""
    ) -> None:
        """Straight lines from point to point, with a head at the last where `arrow` is true."""
        self._add("polyline", {"points": _path(points), "fill": "none", **_stroke(ink)}, title)
        if arrow:
            head = _path(_head(points[-2], points[-1], ink.width))
            self._add("polygon", {"points": head, "fill": ink.color})

    def area(self, points: Sequence[Point], ink: Ink = Ink(), *, title: str = "") -> None:
        """A filled polygon."""
        self._add("polygon", {"points": _path(points), **_fill(ink)}, title)

    def text(
        self, at: Point, text: str, ink: Ink = Ink(), *, anchor: str = "start", title: str = ""
    ) -> None:
        """A label whose base line is at height `at[1]`; `anchor` is what of it stands at `at[0]`:
        its "start", "middle" or "end"."""
        shape: dict[str, float | str] = {
            "x": at[0],
            "y": at[1],
            "fill": ink.color,
            "text-anchor": anchor,
            **({"font-weight": "bold"} if ink.bold else {}),
        }
        self._add("text", shape, title, text)

    def label(
        self, at: Point, text: str, room: float, ink: Ink = Ink(), *, anchor: str = "start"
    ) -> None:
        """A text that is cut where it is longer than `room` pixels, and whole under the pointer."""
        self.text(at, shorten(text, int(room / CELL)), ink, anchor=anchor, title=text)

    def inside(
        self, left: float, right: float, y: float, text: str, title: str = "", spare: int = 0
    ) -> None:
        """A text in the middle between two edges. It is left out unless there is room for it and
        for `spare` more characters."""
        if right - left > CELL * (len(text) + spare):
            self.text(((left + right) / 2, y), text, anchor="middle", title=title)

    def key(self, at: Point, ink: Ink, text: str, *, sign: str = "", title: str = "") -> float:
        """An entry of the key: a box of a colour with a sign, and the meaning beside it. Returns
        where the next entry may begin."""
        self.rect(at, (22, 14), ink)
        if sign:
            self.text((at[0] + 11, at[1] + 11), sign, anchor="middle")
        self.text((at[0] + 27, at[1] + 11), text, title=title)
        return at[0] + 40 + CELL * len(text)

    def svg(self, description: str) -> str:
        """The drawing as SVG.

        Arguments:
          description: what it shows, for those who cannot see it.
        """
        width, height = _number(self.width), _number(self.height)
        root = ElementTree.Element(
            "svg",
            {
                "xmlns": NAMESPACE,
                "style": "background:white",
                "width": width,
                "height": height,
                "viewBox": f"0 0 {width} {height}",
                "role": "img",
                "aria-label": _printable(description),
                "font-family": "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace",
                "font-size": str(FONT_SIZE),
            },
        )
        root.extend(self._shapes)
        return ElementTree.tostring(root, encoding="unicode")

    def _add(
        self, tag: str, attributes: Mapping[str, float | str], title: str = "", text: str = ""
    ) -> None:
        shown = {k: v if isinstance(v, str) else _number(v) for k, v in attributes.items()}
        shape = ElementTree.Element(tag, shown)
        shape.text = _printable(text) or None
        if title:
            ElementTree.SubElement(shape, "title").text = _printable(title)
        self._shapes.append(shape)


def draw_phases(board: Board, ends: Iterable[tuple[Phase, float, float]], top: float) -> None:
    """Draws the passes along the top of a picture, with their names where these have room.

    Arguments:
      board: what is drawn on.
      ends: what stands in the picture from left to right: its pass, and where it begins and ends.
      top: the height of their upper edge.
    """
    for phase, joined in groupby(ends, key=lambda end: end[0]):
        parts = list(joined)
        left, right = parts[0][1], max(end for _, _, end in parts)
        if right - left >= 1:
            board.rect(
                (left, top),
                (right - left, PHASE_HEIGHT),
                Ink(opacity=0.08 * (1 + PHASES.index(phase)), width=0),
                title=phase,
            )
            board.inside(left, right, top + 11, phase, title=phase, spare=1)


def picture(caption: str, board: Board | None, *instead: Plain) -> Picture:
    """A picture with its words.

    Arguments:
      caption: what it shows, in a sentence.
      board: the drawing; None where there is nothing to draw.
      instead: the same in words and tables.
    """
    return Picture(
        caption=caption,
        svg=(board or Board(1, 1)).svg(caption),
        instead=instead,
    )


def _fill(ink: Ink) -> dict[str, float | str]:
    return {"fill": ink.color, "fill-opacity": ink.opacity} | (_stroke(ink) if ink.width else {})


def _stroke(ink: Ink) -> dict[str, float | str]:
    return {
        "stroke": ink.color,
        "stroke-width": ink.width,
        **({"stroke-dasharray": "4 3"} if ink.dashed else {}),
    }


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _head(start: Point, end: Point, width: float) -> tuple[Point, ...]:
    """The corners of an arrow head at `end`."""
    along = complex(end[0] - start[0], end[1] - start[1])
    arrow = (4 + 2 * width) * along / (abs(along) or 1.0)
    sides = (complex(*end) - arrow + turn * arrow / 2 for turn in (1j, -1j))
    return end, *((side.real, side.imag) for side in sides)


def _number(value: float) -> str:
    """At most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _printable(text: str) -> str:
    """Characters that XML forbids are replaced."""
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}"
        for c in text.replace("\t", " ")
    )


def png_of(svg: str, scale: float) -> bytes:
    """A picture as PNG on a white ground, with the fonts that matplotlib brings: it is the same on
    every machine. Characters that these fonts lack, such as Chinese ones, are empty boxes.

    Arguments:
      svg: the picture.
      scale: pixels of the PNG for a pixel of the picture.

    Raises:
      SbpError: `unknown-option` where a library of the extra is not installed.
    """
    try:
        resvg, matplotlib = map(importlib.import_module, ("resvg_py", "matplotlib"))
    except ModuleNotFoundError as error:
        raise SbpError(
            f"a picture as PNG needs {error.name}; install the extra: pip install 'sbp-jax[png]'",
            code="unknown-option",
        ) from None
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return bytes(
        resvg.svg_to_bytes(
            svg_string=svg,
            zoom=scale,
            background="white",
            skip_system_fonts=True,
            font_files=[str(fonts / f"DejaVuSansMono{face}.ttf") for face in ("", "-Bold")],
            font_family="DejaVu Sans Mono",
            monospace_family="DejaVu Sans Mono",
        )
    )
