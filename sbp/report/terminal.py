"""Parts -> lines of a terminal. The plain text is the same lines without styles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from rich.cells import cell_len
from rich.text import Text

from sbp.report.markup import plain, words
from sbp.report.parts import (
    Cell,
    Column,
    Excerpt,
    Facts,
    Leaf,
    Page,
    Paragraph,
    Picture,
    Section,
    Share,
    ShownDiagnostic,
    Table,
)

MIN_WIDTH = 40
BAR_WIDTH = 8
GAP = "  "
SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def page_lines(page: Page, width: int) -> Iterator[Text]:
    """A page as lines of at most `width` cells. Source lines and single words may be longer."""
    width = max(width, MIN_WIDTH)
    started = after_finding = False
    if page.title:
        yield from (Text(line, "bold") for line in wrap(page.title, width))
        started = True
    for part in page.parts:
        if started and (after_finding or not isinstance(part, Paragraph | Facts)):
            yield Text()
        started, after_finding = True, isinstance(part, ShownDiagnostic)
        if isinstance(part, Section):
            yield from (Text(line, "bold") for line in wrap(part.title, width))
            for number, leaf in enumerate(part.parts):
                if number:
                    yield Text()
                yield from _indented(_leaf(leaf, width - 2), "  ")
        else:
            yield from _leaf(part, width)


def _indented(lines: Iterable[Text], by: str) -> Iterator[Text]:
    for line in lines:
        yield Text(by).append_text(line)


def _leaf(part: Leaf, width: int) -> Iterator[Text]:
    match part:
        case Paragraph():
            yield from (Text(line) for line in wrap(part.text, width))
        case Facts():
            room = max(cell_len(name) for name, _ in part.pairs)
            for name, value in part.pairs:
                yield Text.assemble((_fit(name, room), "dim"), GAP, (value, "bold"))
        case Table():
            yield from _table(part, width)
        case Picture():
            yield from (Text(line) for line in wrap(part.caption, width))
            for plain_part in part.instead:
                yield from _leaf(plain_part, width)
        case ShownDiagnostic():
            yield from _finding(part, width)
        case _:
            assert_never(part)


def wrap(text: str, width: int) -> list[str]:
    """Breaks a sentence at blanks into lines of at most `width` cells. A word or `code` that is
    longer has a line of its own."""
    lines = [""]
    for word in words(text):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def _fit(text: str, width: int, *, right: bool = False) -> str:
    space = " " * max(0, width - cell_len(text))
    return space + text if right else text + space


# ---- tables -------------------------------------------------------------------------------------


def _cell(cell: Cell, *, bars: bool = True) -> str:
    if isinstance(cell, str):
        return plain(cell)
    return bar(cell) if bars else cell.percent


def bar(share: Share) -> str:
    """A share as a bar of eighths and in percent."""
    eighths = round(share.fraction * BAR_WIDTH * 8)
    full, rest = divmod(max(eighths, 1 if share.fraction > 0 else 0), 8)
    return _fit("█" * full + (_EIGHTHS[rest] if rest else ""), BAR_WIDTH) + f" {share.percent:>5}"


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Column widths. Where the table is too wide, columns that wrap get narrower, the one with most
    room first. They may add up to more than there is."""
    wanted = [
        max([cell_len(c.heading), *(cell_len(row[i]) for row in rows)])
        for i, c in enumerate(columns)
    ]
    least = [
        (
            max(
                [
                    cell_len(c.heading),
                    *(cell_len(word) for row in rows for word in row[i].split()),
                ]
            )
            if c.wraps
            else wanted[i]
        )
        for i, c in enumerate(columns)
    ]
    spare = width - len(GAP) * (len(columns) - 1)
    while sum(wanted) > spare:
        room = [w - m for w, m in zip(wanted, least, strict=True)]
        if max(room) <= 0:
            break
        wanted[room.index(max(room))] -= 1
    return wanted


def _table(table: Table, width: int) -> Iterator[Text]:
    """A table in columns; where these have no room, without its bars, or row by row."""
    last = len(table.columns) - 1
    room = width - len(GAP) * last
    for bars in (True, False):
        rows = [[_cell(cell, bars=bars) for cell in row.cells] for row in table.rows]
        widths = _widths(table.columns, rows, width)
        if sum(widths) <= room:
            break
    else:
        yield from _records(table, width)
        return
    yield Text(
        GAP.join(
            _fit(c.heading, w, right=c.right) for c, w in zip(table.columns, widths, strict=True)
        ).rstrip(),
        "dim",
    )
    for row, texts in zip(table.rows, rows, strict=True):
        cells = [
            wrap(text, w) if column.wraps else [text]
            for text, w, column in zip(texts, widths, table.columns, strict=True)
        ]
        for number in range(max(map(len, cells))):
            line = Text()
            for i, (lines, w, column) in enumerate(zip(cells, widths, table.columns, strict=True)):
                text = lines[number] if number < len(lines) else ""
                style = "bold" if i == 0 else "cyan" if isinstance(row.cells[i], Share) else ""
                line.append(_fit(text, w, right=column.right) + ("" if i == last else GAP), style)
            line.rstrip()
            yield line
        if row.detail:
            yield from (Text(f"    {line}", "dim") for line in wrap(row.detail, width - 4))
    if table.rest:
        yield Text(table.rest, "dim")


def _records(table: Table, width: int) -> Iterator[Text]:
    """A table that is too wide for columns: each row by itself, its first cell above the others,
    which stand behind the headings of their columns."""
    yield Text(table.columns[0].heading, "dim")
    for row in table.rows:
        first, *others = (_cell(cell, bars=False) for cell in row.cells)
        yield from (Text(line, "bold") for line in wrap(first, width))
        headings = [column.heading for column in table.columns[1:]]
        pairs = zip(headings, others, strict=True)
        said = [f"{heading} {' '.join(cell.split())}" for heading, cell in pairs if cell.strip()]
        yield from (Text(f"  {line}") for line in wrap("; ".join(said), width - 2))
        if row.detail:
            yield from (Text(f"    {line}", "dim") for line in wrap(row.detail, width - 4))
    if table.rest:
        yield from (Text(line, "dim") for line in wrap(table.rest, width))


# ---- findings -----------------------------------------------------------------------------------


def _finding(part: ShownDiagnostic, width: int) -> Iterator[Text]:
    style = SEVERITY_STYLE[part.severity]
    yield Text.assemble((f"{part.severity}[{part.code}]", style), (f": {part.title}", "bold"))
    digits = max((len(str(line.number)) for e in part.excerpts for line in e.lines), default=1)
    gutter = " " * (digits + 1)
    for number, excerpt in enumerate(part.excerpts):
        arrow = "-->" if number == 0 else ":::"
        scope = f"  in {excerpt.scope}" if excerpt.scope else ""
        yield Text.assemble((f"{' ' * digits}{arrow} ", "cyan"), excerpt.place, (scope, "dim"))
        yield from _excerpt(excerpt, digits, style)
    if part.excerpts:
        yield Text(f"{gutter}|", "cyan")
    if part.rule:
        yield Text.assemble((f"{gutter}= ", "cyan"), ("rule", "bold"), f": {part.rule}")
        yield from _indented(_rule_rows(part), gutter + "    ")
    for note in part.notes:
        yield from _remark(gutter, "note", note, "", width)
    for helped in part.helps:
        yield from _remark(gutter, "help", helped.text, helped.price, width)
    yield from _remark(gutter, "more", part.more, "", width)


def _excerpt(excerpt: Excerpt, digits: int, style: str) -> Iterator[Text]:
    gutter = " " * (digits + 1)
    yield Text(f"{gutter}|", "cyan")
    for line in excerpt.lines:
        shown = "(no source at hand)" if line.text is None else line.text.expandtabs(4)
        yield Text.assemble((f"{line.number:>{digits}} | ", "cyan"), shown)
        for mark in line.marks:
            text = line.text or ""
            start = cell_len(text[: mark.start].expandtabs(4))
            length = max(1, cell_len(text[: mark.end].expandtabs(4)) - start)
            under = ("^" if mark.primary else "-") * length
            said = f" {mark.text}" if mark.text else ""
            yield Text.assemble(
                (f"{gutter}| ", "cyan"),
                " " * start,
                (under + said, style if mark.primary else "cyan"),
            )


def _rule_rows(part: ShownDiagnostic) -> Iterator[Text]:
    """The rule's rows in columns: operands, results, remark."""
    ins, outs = (
        _column_widths([r.inputs for r in part.rows]),
        _column_widths([r.outputs for r in part.rows]),
    )
    for row in part.rows:
        left = "".join(_fit(cell, w + 4) for cell, w in zip(row.inputs, ins, strict=False))
        right = "".join(_fit(cell, w + 4) for cell, w in zip(row.outputs, outs, strict=False))
        line = Text.assemble(f"{left}->  {right}", (row.remark, "italic"))
        line.rstrip()
        yield line


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    count = max((len(row) for row in rows), default=0)
    return [max(cell_len(row[i]) for row in rows if i < len(row)) for i in range(count)]


def _remark(gutter: str, kind: str, text: str, price: str, width: int) -> Iterator[Text]:
    """A note or help after `= kind:`, with its price at the right edge."""
    head = f"{gutter}= {kind}: "
    room = width - cell_len(head)
    lines = wrap(text, room)
    if price and cell_len(lines[-1]) + len(GAP) + cell_len(price) > room:
        lines.append("")
    for number, line in enumerate(lines):
        shown = (
            Text.assemble((f"{gutter}= ", "cyan"), (kind, "bold"), ": ")
            if number == 0
            else Text(" " * cell_len(head))
        )
        shown.append(line)
        if price and number + 1 == len(lines):
            shown.append(_fit(price, room - cell_len(line), right=True), "bold")
        yield shown
