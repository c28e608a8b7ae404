"""Parts -> lines of a terminal, and HTML; the plain text is the same lines without styles. Also
progress of work that takes seconds."""

import contextlib
import html
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain, repeat, zip_longest

from rich import get_console
from rich.cells import cell_len
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sbp.errors import RuleRow
from sbp.report.parts import (
    FILE_ATTRIBUTES,
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
    TableRow,
    pieces,
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


# ---- HTML ---------------------------------------------------------------------------------------
# Inline CSS, `<details>` folds, small SVG pictures and no script. It is readable on light and dark
# pages, and without colour.


# Text and background have the colours of the page around the report, light or dark; other colours
# are half transparent, or mixed with that of the text, so that words can be read on both.
# JupyterLab's style sheet floats `dt` and `dd`, aligns cells right and wraps `pre` inside words. So
# every property that it sets on an element used here is set here (tests/report/test_jupyterlab.py),
# by selectors of three classes, which win over its two.
STYLE = """
.sbp{font:13px/1.5 system-ui,sans-serif;max-width:72em;text-align:left;direction:ltr;
overflow-x:auto;overflow-wrap:break-word}
.sbp .c{font:bold 15px/1.5 system-ui,sans-serif;margin:.2em 0 .6em}
.sbp code,.sbp pre,.sbp .m{font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.sbp code{background:#8882;border:0;border-radius:3px;padding:0 .25em;
color:inherit;white-space:inherit;unicode-bidi:isolate}
.sbp dl{display:flex;flex-wrap:wrap;gap:.6em;margin:0 0 .6em;padding:0;
width:auto;overflow:visible}
.sbp dl div{border:1px solid #8886;border-radius:6px;padding:.3em .8em;max-width:100%;
box-sizing:border-box}
.sbp dt,.sbp dd{display:block;float:none;width:auto;margin:0;padding:0}
.sbp dt{opacity:.7;font-size:11px;font-weight:400}.sbp dd{font-weight:600}
.sbp p{margin:.3em 0;text-align:left}
.sbp details{border-top:1px solid #8884;padding:.35em 0}
.sbp details details{border:0}
.sbp summary{cursor:pointer;font-weight:600}
.sbp details details summary{font-weight:400;opacity:.75}
.sbp .p,.sbp .w{overflow-x:auto;margin:.3em 0;scrollbar-width:thin}
.sbp table{border-collapse:collapse;border-spacing:0;border:0;margin:0 0 0 1em;
table-layout:auto;background:none;color:inherit;font-size:12px}
.sbp thead{border:0;vertical-align:inherit}
.sbp tr,.sbp th,.sbp td{padding:.15em .9em .15em 0;text-align:left;vertical-align:top;
border:0;background:none;line-height:inherit;white-space:normal;max-width:none}
.sbp th{font-weight:400;opacity:.7;font-size:11px;white-space:nowrap}
.sbp td.n,.sbp th.n{text-align:right;white-space:nowrap}
.sbp tr.d td{padding:0 0 .5em 1.2em;opacity:.75;font-size:12px}
.sbp .f{border-left:3px solid currentColor;padding:.1em 0 .1em .9em;margin:.6em 0}
.sbp pre{margin:.4em 0;padding:.4em .6em;background:#8881;border:0;color:inherit;
overflow:auto;white-space:pre;word-break:normal;overflow-wrap:normal;tab-size:4}
.sbp .z{visibility:hidden}
.sbp pre b,.sbp pre i,.sbp .z{unicode-bidi:isolate}
.sbp .error>b:first-child,.sbp .error pre b{color:color-mix(in srgb,#d9433b 70%,currentColor)}
.sbp .warning>b:first-child,.sbp .warning pre b{color:color-mix(in srgb,#b7791f 70%,currentColor)}
.sbp .note>b:first-child,.sbp i{color:color-mix(in srgb,#2f7fd0 70%,currentColor);font-style:normal}
.sbp .note{border-color:#2f7fd0}.sbp .error{border-color:#d9433b}.sbp .warning{border-color:#b7791f}
.sbp .h{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 2em}
.sbp .h code{overflow-wrap:anywhere}
.sbp svg{vertical-align:middle;max-width:none;height:revert-layer}
.sbp svg text{font-family:inherit;font-size:inherit}
""".replace(".sbp ", ".sbp.sbp.sbp ")
_PAGE_STYLE = ":root{color-scheme:light dark;background:Canvas;color:CanvasText}body{margin:1.5em}"
BAR_PIXELS = 72


def page_html(page: Page, *, standalone: bool = False) -> str:
    """A page as an HTML fragment, or as a whole document."""
    # No heading in a fragment: hosts number headings, and list them as the notebook's own.
    tag = "h1" if standalone else "p"
    title = f'<{tag} class="c">{_text(page.title)}</{tag}>\n' if page.title else ""
    body = "\n".join(map(_part_html, page.parts))
    fragment = f'<div class="sbp"><style>{STYLE}</style>\n{title}{body}\n</div>\n'
    if not standalone:
        return fragment
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>sbp report</title>'
        f"<style>{_PAGE_STYLE}</style></head><body><main>\n{fragment}</main></body></html>\n"
    )


def _text(text: str) -> str:
    """Escaped text with `code`."""
    return "".join(
        f"<code>{html.escape(part, quote=False)}</code>"
        if is_code
        else html.escape(part, quote=False)
        for part, is_code in pieces(text)
    )


def _part_html(part: Part) -> str:
    match part:
        case Section():
            state = " open" if part.opened else ""
            leaves = "\n".join(map(_part_html, part.parts))
            return f"<details{state}><summary>{_text(part.title)}</summary>\n{leaves}\n</details>"
        case str():
            return f"<p>{_text(part)}</p>"
        case Facts():
            pairs = "".join(
                f"<div><dt>{_text(name)}</dt> <dd>{_text(value)}</dd></div>\n"
                for name, value in part.pairs
            )
            return f"<dl>{pairs}</dl>"
        case Table():
            return _table_html(part)
        case Picture():
            return _picture_html(part)
        case _:
            return _finding_html(part)


def _picture_html(picture: Picture) -> str:
    inline = picture.svg.replace(FILE_ATTRIBUTES, "", 1)
    drawn = f'<p>{_text(picture.caption)}</p>\n<div class="p" tabindex="0">{inline}</div>'
    words = "\n".join(map(_part_html, picture.instead))
    return drawn + (_folded("in words", words) if picture.instead else "")


def _folded(summary: str, inside: str) -> str:
    return f"\n<details><summary>{summary}</summary>\n{inside}</details>"


def _scrollable(made: str) -> str:
    """What scrolls by itself where the page is narrow, with the keyboard too."""
    return f'<div class="w" tabindex="0">{made}</div>'


def _table_html(table: Table) -> str:
    def side(number: int) -> str:
        return ' class="n"' if number in table.right else ""

    def row_text(row: TableRow) -> str:
        cells = " ".join(
            f"<td{side(i)}>{_cell_html(c, first=i == 0)}</td>" for i, c in enumerate(row.cells)
        )
        below = f'<td colspan="{len(table.headings)}">{_text(row.detail)}</td>'
        return f"<tr>{cells}</tr>" + (f'\n<tr class="d">{below}</tr>' if row.detail else "")

    head = " ".join(f"<th{side(i)}>{_text(h)}</th>" for i, h in enumerate(table.headings))
    rows, folded = ("\n".join(map(row_text, some)) for some in (table.rows, table.folded))
    shown = _scrollable(f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>")
    more = _scrollable(f'<table class="rest"><tbody>\n{folded}\n</tbody></table>')
    return shown + (_folded(_text(table.rest), more) if table.rest else "")


def _cell_html(cell: Cell, *, first: bool) -> str:
    if isinstance(cell, Share):
        return f"{_bar(cell)}&nbsp;{cell.percent.replace(' ', '&nbsp;')}"
    return f"<b>{_text(cell)}</b>" if first else _text(cell)


def _bar(share: Share) -> str:
    length = max(1, round(share.fraction * BAR_PIXELS)) if share.fraction > 0 else 0
    return (
        f'<svg width="{BAR_PIXELS}" height="9" role="img" aria-label="{share.percent}">'
        f'<rect width="{BAR_PIXELS}" height="9" rx="2" fill="#8883"/>'
        f'<rect width="{length}" height="9" rx="2" fill="#3b82f6"/></svg>'
    )


def _finding_html(part: ShownDiagnostic) -> str:
    found = part.diagnostic
    rows = "\n".join(_rule_row(row.inputs, row.outputs, row.remark) for row in found.rows)
    rule = (
        f"<details open><summary>rule: {_text(found.rule)}</summary>\n"
        f"{_scrollable(f'<table>{rows}</table>')}</details>"
    )
    made = [
        f"<b>{found.severity}[{found.code}]</b>: <b>{_text(found.title)}</b>",
        *map(_excerpt_html, part.excerpts),
        *([rule] if found.rule else []),
        *(f"<div><b>note</b>: {_text(note)}</div>" for note in found.notes),
        *(
            f'<div class="h"><span><b>help</b>: {_text(text)}</span> <b>{_text(price)}</b></div>'
            for text, price in part.helps
        ),
        f"<div><b>more</b>: <code>sbp explain {found.code}</code></div>",
    ]
    return f'<div class="f {found.severity}">' + "\n".join(made) + "</div>"


def _rule_row(inputs: Sequence[str], outputs: Sequence[str], remark: str) -> str:
    atoms = " ".join(f'<td class="m">{html.escape(t)}</td>' for t in (*inputs, "->", *outputs))
    return f"<tr>{atoms} <td>{_text(remark)}</td></tr>"


def _excerpt_html(excerpt: Excerpt) -> str:
    digits = max((len(str(number)) for number, *_ in excerpt.lines), default=1)
    made: list[str] = []
    for number, text, marks in excerpt.lines:
        shown = "(no source at hand)" if text is None else text
        made.append(f"{number:>{digits}} | {html.escape(shown, quote=False)}")
        for start, end, label in marks:
            tag, sign = ("b", "^") if label.primary else ("i", "-")
            made.append(
                f"{' ' * digits} | {_indent((text or '')[:start])}<{tag}>"
                f"{sign * _cells(text or '', start, end)}"
                f" {html.escape(label.text, quote=False)}</{tag}>"
            )
    scope = f" in {_text(excerpt.scope)}" if excerpt.scope else ""
    return (
        f'<div class="m">{html.escape(excerpt.place)}{scope}</div>\n<pre tabindex="0">'
        + "\n".join(made)
        + "</pre>"
    )


def _cells(text: str, start: int, end: int) -> int:
    """The cells that a part of a line takes; a wide character takes two, and past the end of the
    line one each."""
    return cell_len(text[start:end]) + max(0, end - max(start, len(text)))


def _indent(before: str) -> str:
    """What moves marks below the character behind `before`: blanks and tabs, or `before` itself,
    unseen, where its characters may be wider than others."""
    if before.isascii():
        return "".join(c if c == "\t" else " " for c in before)
    return f'<span class="z" aria-hidden="true">{html.escape(before, quote=False)}</span>'


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
