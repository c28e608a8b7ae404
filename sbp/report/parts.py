"""The parts of a report, without their looks: the same parts become terminal text and HTML.

Words in `backticks` are code. Every renderer shows all facts of a part, in the order of its fields.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import TypeVar

from sbp.errors import Diagnostic, Label, bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A table cell that shows a fraction between 0 and 1 as a bar."""

    fraction: float

    @property
    def percent(self) -> str:
        """The share in words."""
        return f"{100 * self.fraction:.0f}%"


SHOWN_ROWS = 12
"""Rows of a long table; the others are folded."""

Cell = str | Share
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Cells, and a sentence below them."""

    cells: tuple[Cell, ...]
    detail: str = ""


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
        TableRow(cells=tuple(cells), detail=detail)
        for cells, detail in zip_longest(rows, details, fillvalue="")
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

    >>> table_of(["a", "bc"], {"name": str, ">length": lambda t: str(len(t))}).rows[1].cells
    ('bc', '2')
    """
    every = list(items)
    rows = ([cell(item) for cell in columns.values()] for item in every)
    left = every[shown or 0 :]
    return table(columns, rows, details=map(detail, every), shown=shown, rest=lambda _: rest(left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names with values."""

    pairs: tuple[tuple[str, str], ...]


Mark = tuple[int, int, Label]
"""An underlined part of a source line, primary with carets, others with dashes: its columns from 0,
the second excluded, and the label behind the marks."""

SourceLine = tuple[int, str | None, tuple[Mark, ...]]
"""The number of a line, its text or None where the source cannot be read, and its marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Lines of one file.

    Arguments:
      place: file:line:column of the primary mark, or of the first mark in the file.
      scope: the function or region around it, and the pass; empty for files after the first.
      lines: the lines.
    """

    place: str
    scope: str
    lines: tuple[SourceLine, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawing. Terminals show `instead`, and HTML has it folded below the drawing.

    Arguments:
      caption: what it shows, in a sentence.
      svg: the drawing (`sbp.report.svg`).
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
