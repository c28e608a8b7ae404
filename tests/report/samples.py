"""Diagnostics on a source that only linecache knows, as of a notebook's cell."""

import linecache

from sbp.errors import Diagnostic, Help, Label, RuleRow, SourceEdit, Span

FILE, OTHER = "moe/ffn.py", "moe/layout.py"
SOURCE = """import sbp

def expert_mlp(x, w_in, w_out):
    w_in = sbp.split(w_in, 1, "tensor")
    d_ff = w_in.shape[1]

    x = sbp.split(x, 1, "tensor")
    norm = (x * x).mean(
        axis=-1,
    )

    h = x @ w_in
\té = h + h
"""


def remember_sources():
    for file, text in (
        (FILE, SOURCE),
        (OTHER, "def split(x):\n    return sbp.split(x, 0, 'data')\n"),
    ):
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def span(line, column, end_column, end_line=0, file=FILE):
    return Span(file=file, line=line, column=column, end_column=end_column, end_line=end_line)


STYLE_EXAMPLE = Diagnostic(
    code="no-signature",
    severity="error",
    title="`x @ w_in` has no SBP signature on mesh axis `tensor`",
    scope="ffn/expert_mlp, forward",
    labels=(
        Label(span=span(12, 9, 17), text="these two cannot meet here", primary=True),
        Label(span=span(4, 12, 40), text="w_in is S(1) on `tensor`: d_ff, not contracted"),
        Label(span=span(7, 9, 34), text="x is S(1) on `tensor`: d_model, the contracted dim"),
    ),
    rule="dot_general on one mesh axis (x, w_in -> h)",
    rows=(
        RuleRow(inputs=("B", "S(1)"), outputs=("S(1)",), remark="w_in fits, x does not"),
        RuleRow(inputs=("S(1)", "S(0)"), outputs=("P(sum)",), remark="x fits, w_in does not"),
    ),
    notes=('both operands are pinned and boxing is "explicit", so neither may be resharded here',),
    helps=(
        Help(
            text='sbp.replicate(x, "tensor") before line 12; h becomes S(1)',
            edits=(
                SourceEdit(span=span(12, 5, 5), replacement='x = sbp.replicate(x, "tensor")\n    '),
            ),
            bytes_per_device=6 * 2**20,
            peak_memory_bytes=64 * 2**20,
            clears_all_errors=True,
        ),
        Help(
            text="split w_in on dim 0 at line 4; h becomes P(sum), reduced later",
            edits=(SourceEdit(span=span(4, 29, 30), replacement="0"),),
            bytes_per_device=24 * 2**20,
            peak_memory_bytes=48 * 2**20,
            clears_all_errors=True,
        ),
    ),
)
DIAGNOSTICS = (
    STYLE_EXAMPLE,
    Diagnostic(
        code="annotation-conflict",
        severity="error",
        title="`x` cannot be S(0) and S(1) on mesh axis `data` <here & now>",
        labels=(
            Label(
                span=span(8, 12, 6, end_line=10), text="an expression of three lines", primary=True
            ),
            Label(span=span(13, 7, 12), text="behind a tab and a letter of two bytes"),
            Label(span=span(2, 12, 34, file=OTHER), text="pinned in another file"),
        ),
    ),
    Diagnostic(
        code="missing-rule", severity="warning", title="primitive `frobnicate` has no signature"
    ),
    Diagnostic(
        code="costly-annotation",
        severity="note",
        title="a line without source",
        labels=(Label(span=span(99, 5, 9, file="gone.py"), text="who knows", primary=True),),
    ),
)
