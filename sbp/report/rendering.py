"""Parts -> lines of a terminal, and HTML; the plain text is the same lines without styles. Also
progress of work that takes seconds."""

import base64
import bisect
import contextlib
import html
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import accumulate, chain, repeat, starmap, zip_longest

from rich import get_console
from rich.cells import cell_len
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sbp.errors import RuleRow
from sbp.report.parts import (
    FILE_ATTRIBUTES,
    Cell,
    Facts,
    Page,
    Part,
    Picture,
    Section,
    ShownDiagnostic,
    SourceLine,
    Table,
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
    return plain(cell) if isinstance(cell, str) else bar(cell) if bars else f"{cell:.0%}"


def bar(share: float) -> str:
    """A share as a bar of eighths and in percent."""
    full, rest = divmod(max(round(share * BAR_WIDTH * 8), int(share > 0)), 8)
    return _fit("█" * full + (_EIGHTHS[rest] if rest else ""), BAR_WIDTH) + f" {share:>5.0%}"


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
    shares = {i for row, _ in table.rows for i, c in enumerate(row) if isinstance(c, float)}
    for bars in (True, False):
        rows = [[_cell(cell, bars=bars) for cell in row] for row, _ in table.rows]
        widths = _widths([table.headings, *rows], table.right | shares, width)
        if sum(widths) + len(GAP) * (len(widths) - 1) <= width:
            break
    else:
        yield from _records(table, width)
        return
    yield Text(_join(table, table.headings, widths), "dim")
    for (_, detail), texts in zip(table.rows, rows, strict=True):
        columns = [
            [text] if i in table.right | shares else wrap(text, w)
            for i, (text, w) in enumerate(zip(texts, widths, strict=True))
        ]
        for cells in zip_longest(*columns, fillvalue=""):
            line = Text(_join(table, cells, widths))
            line.stylize("bold", 0, len(cells[0]))
            line.highlight_regex(f"[{_EIGHTHS.strip()}]+", "cyan")  # bars
            yield line
        yield from _lines(detail, width, "dim", 4)
    yield from _lines(table.rest, width, "dim")


def _join(table: Table, cells: Sequence[str], widths: Sequence[int]) -> str:
    """The cells of a line of a table, each on its side."""
    return GAP.join(
        _fit(cell, w, right=i in table.right)
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()


def _lines(text: str, width: int, style: str = "", indent: int = 0) -> Iterator[Text]:
    """A text in lines; none for an empty text."""
    lines = wrap(text, width - indent) if text else ()
    return (Text(" " * indent + line, style) for line in lines)


def _records(table: Table, width: int) -> Iterator[Text]:
    """A table that is too wide for columns: each row by itself, its first cell above the others,
    which stand behind the headings of their columns."""
    yield Text(table.headings[0], "dim")
    for row, detail in table.rows:
        first, *others = (_cell(cell, bars=False) for cell in row)
        yield from _lines(first, width, "bold")
        pairs = zip(table.headings[1:], others, strict=True)
        said = [f"{heading} {' '.join(cell.split())}" for heading, cell in pairs if cell.strip()]
        yield from _lines("; ".join(said), width, indent=2)
        yield from _lines(detail, width, "dim", 4)
    yield from _lines(table.rest, width, "dim")


# ---- findings -----------------------------------------------------------------------------------


def _finding(part: ShownDiagnostic, width: int) -> Iterator[Text]:
    found, style = part.diagnostic, SEVERITY_STYLE[part.diagnostic.severity]
    first, *rest = wrap(f"{found.severity}[{found.code}]: {found.title}", width)
    head, _, said = first.partition(":")
    yield Text.assemble((head, style), (f":{said}", "bold"))
    yield from (Text(line, "bold") for line in rest)
    digits = max(
        (len(str(number)) for *_, lines in part.excerpts for number, *_ in lines), default=1
    )
    gutter = " " * (digits + 1)
    for number, (where, scope, lines) in enumerate(part.excerpts):
        arrow = f"{' ' * digits}{':::' if number else '-->'} "
        place = Text.assemble((arrow, "cyan"), where)
        within = Text(f"  in {scope}" if scope else "", "dim")
        beside = place.cell_len + within.cell_len <= width
        yield from [place + within] if beside else [place, Text(" " * digits) + within]
        yield from _excerpt(lines, digits, style, width)
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


def _excerpt(lines: Sequence[SourceLine], digits: int, style: str, width: int) -> Iterator[Text]:
    gutter, room = " " * (digits + 1), width - digits - 3
    yield Text(f"{gutter}|", "cyan")
    for number, text, marks in lines:
        source = text or ""
        ends = [[cell_len(source[:c].expandtabs(4)) for c in columns] for *columns, _ in marks]
        shown = Text("(no source at hand)" if text is None else text.expandtabs(4))
        # Of a line that is too long, the part with the marks is shown.
        last = max((end + 1 for _, end in ends), default=0)
        left_out = min([min(last, shown.cell_len) - room, *(start - 1 for start, _ in ends)])
        widths = [0, *accumulate(map(cell_len, shown.plain))]
        cut = bisect.bisect_left(widths, left_out)
        left_out = widths[cut]
        if cut:
            shown = Text("…".ljust(widths[cut + 1] - left_out)) + shown[cut + 1 :]
        shown.truncate(room, overflow="ellipsis")
        yield Text.assemble((f"{number:>{digits}} | ", "cyan"), shown)
        for (*_, label), columns in zip(marks, ends, strict=True):
            start, end = (max(0, min(room, column - left_out)) for column in columns)
            sign, color = ("^", style) if label.primary else ("-", "cyan")
            mark = sign * max(1, end - start)
            said = [(start, f"{mark} {label.text}".rstrip(" "))]
            if label.text and start + cell_len(said[0][1]) > room:  # it stands below the mark
                left = min(start, max(0, room - MIN_WIDTH // 2))
                said = [(start, mark), *((left, line) for line in wrap(label.text, room - left))]
            yield from (
                Text.assemble((f"{gutter}| ", "cyan"), " " * indent, (line, color))
                for indent, line in said
            )


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
# Every element has its own `style`, pictures are images, and there is no style sheet and no script:
# JupyterLab and Notebook 7 drop `<style>` and `<svg>` from the outputs of a notebook that this
# user has not run. It is readable on light and dark pages, and without color.


_MONOSPACED = "font:12px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
_CELL = (
    "padding:.15em .9em .15em 0;text-align:left;vertical-align:top;border:0;background:none;"
    "line-height:1.5;white-space:normal;max-width:none"
)
_TABLE = (
    "border-collapse:collapse;border-spacing:0;border:0;margin:0 0 0 1em;table-layout:auto;"
    "background:none;font-size:12px"
)
_GRAY, _LIGHT_GRAY = "rgba(136,136,136,.5)", "rgba(136,136,136,.13)"
# JupyterLab's style sheet floats `dt` and `dd`, aligns cells right and wraps `pre` inside words. So
# every property that it sets on an element used here is set here (tests/report/test_jupyterlab.py).
STYLES = {
    "div.sbp": "font:13px/1.5 system-ui,sans-serif;max-width:72em;text-align:left;direction:ltr;"
    "overflow-x:auto;overflow-wrap:break-word",
    "h1": "font:bold 15px/1.5 system-ui,sans-serif;margin:.2em 0 .6em",
    "p": "margin:.3em 0;text-align:left",
    "p.title": "font:bold 15px/1.5 system-ui,sans-serif;margin:.2em 0 .6em;text-align:left",
    "code": f"{_MONOSPACED};background:{_LIGHT_GRAY};border:0;border-radius:3px;padding:0 .25em;"
    "white-space:normal;overflow-wrap:break-word",
    "dl": "display:flex;flex-wrap:wrap;gap:.6em;margin:0 0 .6em;padding:0;width:auto;"
    "overflow:visible",
    "div.fact": f"border:1px solid {_GRAY};border-radius:6px;padding:.3em .8em;max-width:100%;"
    "box-sizing:border-box",
    "dt": "display:block;float:none;width:auto;margin:0;padding:0;opacity:.7;font-size:11px;"
    "font-weight:400",
    "dd": "display:block;float:none;width:auto;margin:0;padding:0;font-weight:600",
    "details": f"border-top:1px solid {_GRAY};padding:.35em 0",
    "summary": "cursor:pointer;font-weight:600",
    "details.more": "padding:.35em 0",
    "summary.more": "cursor:pointer;font-weight:400;opacity:.75",
    "div.wide": "overflow-x:auto;margin:.3em 0",
    "div.picture": "overflow-x:auto;margin:.3em 0",
    "img": "display:block;max-width:none;height:auto",
    "table": _TABLE,
    "table.rest": _TABLE,
    "thead": "border:0;vertical-align:top",
    "tr": _CELL,
    "th": f"{_CELL};font-weight:400;opacity:.7;font-size:11px;white-space:nowrap",
    "td": _CELL,
    "th.number": f"{_CELL};font-weight:400;opacity:.7;font-size:11px;text-align:right;"
    "white-space:nowrap",
    "td.number": f"{_CELL};text-align:right;white-space:nowrap",
    "td.atom": f"{_CELL};{_MONOSPACED}",
    "td.detail": f"{_CELL};padding:0 0 .5em 1.2em;opacity:.75;font-size:12px",
    "div.error": "border-left:3px solid #d9433b;padding:.1em 0 .1em .9em;margin:.6em 0",
    "div.warning": "border-left:3px solid #b7791f;padding:.1em 0 .1em .9em;margin:.6em 0",
    "div.note": "border-left:3px solid #2f7fd0;padding:.1em 0 .1em .9em;margin:.6em 0",
    "b.error": "background:#b3261e;color:#ffffff;border-radius:3px;padding:0 .3em",
    "b.warning": "background:#8a5a00;color:#ffffff;border-radius:3px;padding:0 .3em",
    "b.note": "background:#1d5fa8;color:#ffffff;border-radius:3px;padding:0 .3em",
    "div.place": f"{_MONOSPACED}",
    "div.help": "display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 2em",
    "pre": f"{_MONOSPACED};margin:.4em 0;padding:.4em .6em;background:{_LIGHT_GRAY};border:0;"
    "overflow-x:auto;overflow-y:hidden;white-space:pre;word-break:normal;"
    "overflow-wrap:normal",
    "b.mark": "font-weight:bold",
    "i.mark": "font-style:normal",
    "span.unseen": "visibility:hidden",
    "span.bar": f"display:inline-block;width:72px;height:9px;background:{_LIGHT_GRAY};"
    "border-radius:2px",
    "span.full": "display:block;height:9px;background:#3b82f6;border-radius:2px",
}
"""The style of an element, by its tag, or by its tag and a word for its kind."""
_ISOLATED = 'dir="ltr"'
"""Keeps text that is written from right to left out of the order of its line."""
BAR_PIXELS = 72


def page_html(page: Page, *, standalone: bool = False) -> str:
    """A page as an HTML fragment, or as a whole document, whose pictures show a text under the
    pointer."""
    # No heading in a fragment: hosts number headings, and list them as the notebook's own.
    title = _tag("h1" if standalone else "p.title", _text(page.title)) if page.title else ""
    body = "\n".join(_part_html(part, standalone) for part in page.parts)
    fragment = _tag("div.sbp", f"\n{title}\n{body}\n") + "\n"
    return (
        fragment
        if not standalone
        else (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>sbp report</title>'
            "<style>:root{color-scheme:light dark;background:Canvas;color:CanvasText}"
            f"body{{margin:1.5em}}</style></head><body><main>\n{fragment}</main></body></html>\n"
        )
    )


def _tag(kind: str, inside: str, attributes: str = "") -> str:
    """An element with its style.

    Arguments:
      kind: a key of `STYLES`.
      inside: its HTML.
      attributes: further ones.
    """
    tag, _, name = kind.partition(".")
    named = f' class="{name}"' if name else ""
    extra = f" {attributes}" if attributes else ""
    return f'<{tag}{named}{extra} style="{STYLES[kind]}">{inside}</{tag}>'


def _text(text: str) -> str:
    """Escaped text with `code`."""
    return "".join(
        _tag("code", html.escape(part, quote=False), _ISOLATED)
        if is_code
        else html.escape(part, quote=False)
        for part, is_code in pieces(text)
    )


def _part_html(part: Part, standalone: bool) -> str:
    match part:
        case Section():
            leaves = "\n".join(_part_html(leaf, standalone) for leaf in part.parts)
            inside = f"{_tag('summary', _text(part.title))}\n{leaves}\n"
            return _tag("details", inside, "open" if part.opened else "")
        case str():
            return _tag("p", _text(part))
        case Facts():
            pairs = (f"{_tag('dt', _text(k))} {_tag('dd', _text(v))}" for k, v in part.pairs)
            return _tag("dl", "".join(f"{_tag('div.fact', pair)}\n" for pair in pairs))
        case Table():
            return _table_html(part)
        case Picture():
            words = "\n".join(_part_html(leaf, standalone) for leaf in part.instead)
            picture = _tag("div.picture", _drawn(part, standalone), 'tabindex="0"')
            folded = _folded("in words", words) if part.instead else ""
            return f"{_tag('p', _text(part.caption))}\n{picture}{folded}"
        case _:
            return _finding_html(part)


def _drawn(picture: Picture, standalone: bool) -> str:
    """A picture as a part of the page; in a fragment as an image."""
    if standalone:
        return picture.svg.replace(FILE_ATTRIBUTES, "", 1)
    data = base64.b64encode(picture.svg.encode()).decode()
    alt = html.escape(plain(picture.caption))
    return f'<img alt="{alt}" style="{STYLES["img"]}" src="data:image/svg+xml;base64,{data}">'


def _folded(summary: str, inside: str) -> str:
    return "\n" + _tag("details.more", f"{_tag('summary.more', summary)}\n{inside}")


def _wide(made: str) -> str:
    """What scrolls by itself where the page is narrow, with the keyboard too."""
    return _tag("div.wide", made, 'tabindex="0"')


def _table_html(table: Table) -> str:
    def cell(tag: str, number: int, inside: str) -> str:
        return _tag(f"{tag}.number" if number in table.right else tag, inside)

    def row_text(row: Sequence[Cell], detail: str) -> str:
        cells = " ".join(cell("td", i, _cell_html(c, first=i == 0)) for i, c in enumerate(row))
        below = _tag("td.detail", _text(detail), f'colspan="{len(table.headings)}"')
        return _tag("tr", cells) + (f"\n{_tag('tr', below)}" if detail else "")

    head = _tag("tr", " ".join(cell("th", i, _text(h)) for i, h in enumerate(table.headings)))
    rows, folded = ("\n".join(starmap(row_text, some)) for some in (table.rows, table.folded))
    shown = _wide(_tag("table", f"{_tag('thead', head)}<tbody>\n{rows}\n</tbody>"))
    more = _wide(_tag("table.rest", f"<tbody>\n{folded}\n</tbody>"))
    return shown + (_folded(_text(table.rest), more) if table.rest else "")


def _cell_html(cell: Cell, *, first: bool) -> str:
    if isinstance(cell, str):
        return f"<b>{_text(cell)}</b>" if first else _text(cell)
    length = max(round(cell * BAR_PIXELS), int(cell > 0))
    full = f'<span style="{STYLES["span.full"]};width:{length}px"></span>'
    return f"{_tag('span.bar', full)}&nbsp;{cell:.0%}"


def _finding_html(part: ShownDiagnostic) -> str:
    found = part.diagnostic
    rows = "\n".join(map(_rule_row, found.rows))
    rule = _tag(
        "details.more",
        f"{_tag('summary.more', f'rule: {_text(found.rule)}')}\n{_wide(_tag('table', rows))}",
        "open",
    )
    made = [
        f"{_tag(f'b.{found.severity}', f'{found.severity}[{found.code}]')}:"
        f" <b>{_text(found.title)}</b>",
        *starmap(_excerpt_html, part.excerpts),
        *([rule] if found.rule else []),
        *(f"<div><b>note</b>: {_text(note)}</div>" for note in found.notes),
        *(
            _tag("div.help", f"<span><b>help</b>: {_text(text)}</span> <b>{_text(price)}</b>")
            for text, price in part.helps
        ),
        f"<div><b>more</b>: {_tag('code', f'sbp explain {found.code}')}</div>",
    ]
    return _tag(f"div.{found.severity}", "\n".join(made))


def _rule_row(row: RuleRow) -> str:
    atoms = " ".join(_tag("td.atom", html.escape(t)) for t in (*row.inputs, "->", *row.outputs))
    return _tag("tr", f"{atoms} {_tag('td', _text(row.remark))}")


def _excerpt_html(where: str, scope: str, lines: Sequence[SourceLine]) -> str:
    digits = max((len(str(number)) for number, *_ in lines), default=1)
    made: list[str] = []
    for number, text, marks in lines:
        shown = "(no source at hand)" if text is None else text
        made.append(f"{number:>{digits}} | {html.escape(shown, quote=False)}")
        for start, end, label in marks:
            tag, sign = ("b", "^") if label.primary else ("i", "-")
            said = f"{sign * _cells(text or '', start, end)} {html.escape(label.text, quote=False)}"
            mark = _tag(f"{tag}.mark", said, _ISOLATED)
            made.append(f"{' ' * digits} | {_indent((text or '')[:start])}{mark}")
    within = f" in {_text(scope)}" if scope else ""
    place = _tag("div.place", f"{html.escape(where)}{within}")
    return f"{place}\n" + _tag("pre", "\n".join(made), 'tabindex="0"')


def _cells(text: str, start: int, end: int) -> int:
    """The cells that a part of a line takes; a wide character takes two, and past the end of the
    line one each."""
    return cell_len(text[start:end]) + max(0, end - max(start, len(text)))


def _indent(before: str) -> str:
    """What moves marks below the character behind `before`: blanks and tabs, or `before` itself,
    unseen, where its characters may be wider than others."""
    return (
        "".join(c if c == "\t" else " " for c in before)
        if before.isascii()
        else _tag(
            "span.unseen", html.escape(before, quote=False), f'aria-hidden="true" {_ISOLATED}'
        )
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
