"""Parts -> lines of a terminal; the plain text is the same lines without styles. Also progress of
work that takes seconds."""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain, repeat, zip_longest

from rich import get_console
from rich.cells import cell_len
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sbp.errors import RuleRow
from sbp.report.parts import (
    Cell,
    Excerpt,
    Facts,
    Page,
    Part,
    Picture,
    Section,
    Share,
    ShownDiagnostic,
    Table,
    plain,
    words,
)

MIN_WIDTH = 40
BAR_WIDTH = 8
GAP = "  "
SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def page_lines(page: Page, width: int) -> Iterator[Text]:
    """A page as lines of at most `width` cells. Source lines and single words may be longer."""
    width = max(width, MIN_WIDTH)
    yield from _lines(page.title, width, "bold")
    for before, part in zip((page.title or None, *page.parts), page.parts, strict=False):
        is_apart = isinstance(before, ShownDiagnostic) or not isinstance(part, str | Facts)
        if before is not None and is_apart:
            yield Text()
        yield from _part(part, width)


def _part(part: Part, width: int) -> Iterator[Text]:
    match part:
        case Section():
            yield from _lines(part.title, width, "bold")
            for number, leaf in enumerate(part.parts):
                if number:
                    yield Text()
                yield from (Text("  ") + line for line in _part(leaf, width - 2))
        case str():
            yield from _lines(part, width)
        case Facts():
            room = max(cell_len(name) for name, _ in part.pairs)
            yield from (
                Text.assemble((_fit(name, room), "dim"), GAP, (value, "bold"))
                for name, value in part.pairs
            )
        case Table():
            yield from _table(part, width)
        case Picture():
            for plain_part in (part.caption, *part.instead):
                yield from _part(plain_part, width)
        case _:
            yield from _finding(part, width)


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


def _widths(rows: Sequence[Sequence[str]], fixed: Set[int], width: int) -> list[int]:
    """Widths of the columns of texts, the headings first. Where they have no room, columns get
    narrower, the one with most room first, but not those in `fixed`. They may add up to more than
    there is."""
    columns = list(zip(*rows, strict=True))
    wanted = [max(map(cell_len, column)) for column in columns]
    least = [
        wanted[i] if i in fixed else max(map(cell_len, [heading, *" ".join(cells).split()]))
        for i, (heading, *cells) in enumerate(columns)
    ]
    spare = width - len(GAP) * (len(columns) - 1)
    while sum(wanted) > spare and wanted != least:
        room = [w - m for w, m in zip(wanted, least, strict=True)]
        wanted[room.index(max(room))] -= 1
    return wanted


def _table(table: Table, width: int) -> Iterator[Text]:
    """A table in columns; where these have no room, without its bars, or row by row."""
    shares = {i for row in table.rows for i, c in enumerate(row.cells) if isinstance(c, Share)}
    for bars in (True, False):
        rows = [[_cell(cell, bars=bars) for cell in row.cells] for row in table.rows]
        widths = _widths([table.headings, *rows], table.right | shares, width)
        if sum(widths) + len(GAP) * (len(widths) - 1) <= width:
            break
    else:
        yield from _records(table, width)
        return
    yield Text(_join(table, table.headings, widths), "dim")
    for row, texts in zip(table.rows, rows, strict=True):
        columns = [
            [text] if i in table.right | shares else wrap(text, w)
            for i, (text, w) in enumerate(zip(texts, widths, strict=True))
        ]
        for cells in zip_longest(*columns, fillvalue=""):
            line = Text(_join(table, cells, widths))
            line.stylize("bold", 0, len(cells[0]))
            line.highlight_regex(f"[{_EIGHTHS.strip()}]+", "cyan")  # bars
            yield line
        yield from _lines(row.detail, width, "dim", 4)
    yield from _lines(table.rest, width, "dim")


def _join(table: Table, cells: Sequence[str], widths: Sequence[int]) -> str:
    """The cells of a line of a table, each on its side."""
    fitted = (
        _fit(cell, w, right=i in table.right)
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
    return GAP.join(fitted).rstrip()


def _lines(text: str, width: int, style: str = "", indent: int = 0) -> Iterator[Text]:
    """A text in lines; none for an empty text."""
    lines = wrap(text, width - indent) if text else ()
    return (Text(" " * indent + line, style) for line in lines)


def _records(table: Table, width: int) -> Iterator[Text]:
    """A table that is too wide for columns: each row by itself, its first cell above the others,
    which stand behind the headings of their columns."""
    yield Text(table.headings[0], "dim")
    for row in table.rows:
        first, *others = (_cell(cell, bars=False) for cell in row.cells)
        yield from _lines(first, width, "bold")
        pairs = zip(table.headings[1:], others, strict=True)
        said = [f"{heading} {' '.join(cell.split())}" for heading, cell in pairs if cell.strip()]
        yield from _lines("; ".join(said), width, indent=2)
        yield from _lines(row.detail, width, "dim", 4)
    yield from _lines(table.rest, width, "dim")


# ---- findings -----------------------------------------------------------------------------------


def _finding(part: ShownDiagnostic, width: int) -> Iterator[Text]:
    found, style = part.diagnostic, SEVERITY_STYLE[part.diagnostic.severity]
    yield Text.assemble((f"{found.severity}[{found.code}]", style), (f": {found.title}", "bold"))
    digits = max((len(str(number)) for e in part.excerpts for number, *_ in e.lines), default=1)
    gutter = " " * (digits + 1)
    for number, excerpt in enumerate(part.excerpts):
        arrow = f"{' ' * digits}{':::' if number else '-->'} "
        scope = f"  in {excerpt.scope}" if excerpt.scope else ""
        yield Text.assemble((arrow, "cyan"), excerpt.place, (scope, "dim"))
        yield from _excerpt(excerpt, digits, style)
    if part.excerpts:
        yield Text(f"{gutter}|", "cyan")
    if found.rule:
        yield Text.assemble((f"{gutter}= ", "cyan"), ("rule", "bold"), f": {found.rule}")
        yield from (Text(f"{gutter}    ") + row for row in _rule_rows(found.rows))
    remarks = [
        *(("note", note, "") for note in found.notes),
        *(("help", text, price) for text, price in part.helps),
        ("more", f"sbp explain {found.code}", ""),
    ]
    for kind, text, price in remarks:
        yield from _remark(gutter, kind, text, price, width)


def _excerpt(excerpt: Excerpt, digits: int, style: str) -> Iterator[Text]:
    gutter = " " * (digits + 1)
    yield Text(f"{gutter}|", "cyan")
    for number, text, marks in excerpt.lines:
        shown = "(no source at hand)" if text is None else text.expandtabs(4)
        yield Text.assemble((f"{number:>{digits}} | ", "cyan"), shown)
        for *columns, label in marks:
            start, end = (cell_len((text or "")[:column].expandtabs(4)) for column in columns)
            sign, color = ("^", style) if label.primary else ("-", "cyan")
            said = f"{sign * max(1, end - start)} {label.text}".rstrip(" ")
            yield Text.assemble((f"{gutter}| ", "cyan"), " " * start, (said, color))


def _rule_rows(rows: Sequence[RuleRow]) -> Iterator[Text]:
    """The rule's rows in columns: operands, results, remark."""
    cells = [(*row.inputs, "->", *row.outputs) for row in rows]
    widths = [max(map(cell_len, column)) for column in zip_longest(*cells, fillvalue="")]
    for row, texts in zip(rows, cells, strict=True):
        fitted = "".join(
            _fit(text, w + (2 if text == "->" else 4))
            for text, w in zip(texts, widths, strict=False)
        )
        yield Text.assemble(fitted if row.remark else fitted.rstrip(), (row.remark, "italic"))


def _remark(gutter: str, kind: str, text: str, price: str, width: int) -> Iterator[Text]:
    """A note or help after `= kind:`, with its price at the right edge."""
    head = Text.assemble((f"{gutter}= ", "cyan"), (kind, "bold"), ": ")
    indent, room = Text(" " * head.cell_len), width - head.cell_len
    lines = [Text(line) for line in wrap(text, room)]
    if price and lines[-1].cell_len + len(GAP) + cell_len(price) > room:
        lines.append(Text())
    lines[-1].append(_fit(price, room - lines[-1].cell_len, right=True) if price else "", "bold")
    yield from (
        start + line for start, line in zip(chain([head], repeat(indent)), lines, strict=False)
    )


# ---- progress -----------------------------------------------------------------------------------


@contextlib.contextmanager
def counting_down(what: str, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Shows a bar, in a terminal or a notebook, until the work is done.

    Yields a function that takes how many steps are left, before each step.

    Arguments:
      what: the steps, such as "plans".
      shown: whether the bar shows.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = get_console()
    shown &= console.is_interactive or console.is_jupyter  # elsewhere rich prints an empty line
    with Progress(*columns, TimeElapsedColumn(), transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=None)

        def left(steps: int) -> None:
            total = bar.tasks[task].total or steps
            bar.update(task, total=total, completed=max(0, total - steps))

        yield left
