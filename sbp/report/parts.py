"""The parts of a report, without their looks: the same parts become terminal text and HTML.

Words in `backticks` are code. Every renderer shows all facts of a part, in the order of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp.errors import RuleRow, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A table cell that shows a fraction between 0 and 1 as a bar."""

    fraction: float

    @property
    def percent(self) -> str:
        """The share in words."""
        return f"{100 * self.fraction:.0f} %"


Cell = str | Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column: its heading, side, and whether its cells may wrap when the terminal is narrow."""

    heading: str
    right: bool = False
    wraps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """Cells, and a sentence below them."""

    cells: tuple[Cell, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under headings. `rest` sums up the `folded` rows; HTML can open them."""

    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    folded: tuple[TableRow, ...] = ()
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names with values."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A sentence or two."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An underlined part of a source line: primary with carets, others with dashes.

    Arguments:
      start, end: columns from 0, `end` excluded.
      text: the label behind the marks.
      primary: whether the diagnostic is about this part.
    """

    start: int
    end: int
    text: str
    primary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A numbered line with its marks; `text` is None where the source cannot be read."""

    number: int
    text: str | None
    marks: tuple[Mark, ...]


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
class PricedHelp:
    """An edit, with the bytes that the plan sends after it."""

    text: str
    price: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDiagnostic:
    """A diagnostic with its source lines, ready to be rendered."""

    severity: Severity
    code: str
    title: str
    excerpts: tuple[Excerpt, ...] = ()
    rule: str = ""
    rows: tuple[RuleRow, ...] = ()
    notes: tuple[str, ...] = ()
    helps: tuple[PricedHelp, ...] = ()

    @property
    def more(self) -> str:
        """Where to read on."""
        return f"sbp explain {self.code}"


Plain = Table | Facts | Paragraph


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
