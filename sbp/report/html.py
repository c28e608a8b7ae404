"""Parts -> HTML with inline CSS, `<details>` folds, small SVG pictures and no script.

It is readable on light and dark pages, and without colour.
"""

import html
from collections.abc import Sequence

from rich.cells import cell_len

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
    TableRow,
    pieces,
)
from sbp.report.svg import FILE_ATTRIBUTES

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
    body = "\n".join(map(_part, page.parts))
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


def _part(part: Part) -> str:
    match part:
        case Section():
            state = " open" if part.opened else ""
            leaves = "\n".join(map(_part, part.parts))
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
            return _table(part)
        case Picture():
            return _picture(part)
        case _:
            return _finding(part)


def _picture(picture: Picture) -> str:
    inline = picture.svg.replace(FILE_ATTRIBUTES, "", 1)
    drawn = f'<p>{_text(picture.caption)}</p>\n<div class="p" tabindex="0">{inline}</div>'
    words = "\n".join(map(_part, picture.instead))
    return drawn + (_folded("in words", words) if picture.instead else "")


def _folded(summary: str, inside: str) -> str:
    return f"\n<details><summary>{summary}</summary>\n{inside}</details>"


def _scrollable(made: str) -> str:
    """What scrolls by itself where the page is narrow, with the keyboard too."""
    return f'<div class="w" tabindex="0">{made}</div>'


def _table(table: Table) -> str:
    def side(number: int) -> str:
        return ' class="n"' if number in table.right else ""

    def row_text(row: TableRow) -> str:
        cells = " ".join(
            f"<td{side(i)}>{_cell(c, first=i == 0)}</td>" for i, c in enumerate(row.cells)
        )
        below = f'<td colspan="{len(table.headings)}">{_text(row.detail)}</td>'
        return f"<tr>{cells}</tr>" + (f'\n<tr class="d">{below}</tr>' if row.detail else "")

    head = " ".join(f"<th{side(i)}>{_text(h)}</th>" for i, h in enumerate(table.headings))
    rows, folded = ("\n".join(map(row_text, some)) for some in (table.rows, table.folded))
    shown = _scrollable(f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>")
    more = _scrollable(f'<table class="rest"><tbody>\n{folded}\n</tbody></table>')
    return shown + (_folded(_text(table.rest), more) if table.rest else "")


def _cell(cell: Cell, *, first: bool) -> str:
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


def _finding(part: ShownDiagnostic) -> str:
    found = part.diagnostic
    rows = "\n".join(_rule_row(row.inputs, row.outputs, row.remark) for row in found.rows)
    rule = (
        f"<details open><summary>rule: {_text(found.rule)}</summary>\n"
        f"{_scrollable(f'<table>{rows}</table>')}</details>"
    )
    made = [
        f"<b>{found.severity}[{found.code}]</b>: <b>{_text(found.title)}</b>",
        *map(_excerpt, part.excerpts),
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


def _excerpt(excerpt: Excerpt) -> str:
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
