"""Diagnostic -> ShownDiagnostic: adds the source lines with marks, and words the prices."""

from __future__ import annotations

from collections.abc import Iterable

from sbp import _jax
from sbp.errors import Diagnostic, Help, Label, SbpError, SbpTypeError, position_text
from sbp.report.parts import Excerpt, Mark, PricedHelp, ShownDiagnostic, SourceLine
from sbp.report.wording import bytes_text
from sbp.source.reader import character_index
from sbp.source.text import line_text


def finding(diagnostic: Diagnostic) -> ShownDiagnostic:
    """A diagnostic with its source lines."""
    return ShownDiagnostic(
        severity=diagnostic.severity,
        code=diagnostic.code,
        title=diagnostic.title,
        excerpts=tuple(_excerpts(diagnostic)),
        rule=diagnostic.rule,
        rows=diagnostic.rows,
        notes=diagnostic.notes,
        helps=tuple(PricedHelp(text=h.text, price=_price(h)) for h in diagnostic.helps),
    )


def _price(help_: Help) -> str:
    """What a device sends after a help, and its memory where a plan was made."""
    sent = bytes_text(help_.bytes_per_device)
    if help_.peak_memory_bytes is None:
        return f"{sent} per device"
    return f"{sent} sent, {bytes_text(help_.peak_memory_bytes)} memory per device"


def diagnostics_of(error: SbpError) -> tuple[Diagnostic, ...]:
    """The diagnostics of an error. An error without any becomes one, at the line that it names or
    else at the user's line that raised it."""
    if isinstance(error, SbpTypeError):
        return error.diagnostics
    span = error.span or _jax.raising_span(error)
    labels = (Label(span=span, text="", primary=True),) if span else ()
    labels = (*labels, *error.related)
    notes = tuple(f"  {line}" for line in error.details)
    found = Diagnostic(
        code=error.code, severity="error", title=error.title, labels=labels, notes=notes
    )
    return (found,)


def _excerpts(diagnostic: Diagnostic) -> Iterable[Excerpt]:
    """One excerpt for each file, that of the primary label first."""
    primary = diagnostic.primary
    if primary is None:
        return
    files = dict.fromkeys([primary.span.file, *(label.span.file for label in diagnostic.labels)])
    for file in files:
        labels = [label for label in diagnostic.labels if label.span.file == file]
        at = primary if file == primary.span.file else labels[0]
        place = position_text(file, at.span.line, at.span.column)
        yield Excerpt(
            place=place,
            scope=diagnostic.scope if at is primary else "",
            lines=tuple(_lines(file, labels)),
        )


def _lines(file: str, labels: list[Label]) -> Iterable[SourceLine]:
    for number in sorted({label.span.line for label in labels}):
        text = line_text(file, number)
        here = sorted(
            (label for label in labels if label.span.line == number),
            key=lambda label: (label.primary, label.span),
        )
        yield SourceLine(
            number=number, text=text, marks=tuple(_mark(text, label) for label in here)
        )


def _mark(text: str | None, label: Label) -> Mark:
    """The columns of a label in its line. An expression of several lines is marked to the end of
    its first line."""
    if text is None:
        return Mark(start=0, end=1, text=label.text, primary=label.primary)
    start = character_index(text, label.span.column)
    whole = label.span.end_line in (0, label.span.line)
    end = character_index(text, label.span.end_column) if whole else len(text.rstrip())
    return Mark(start=start, end=max(end, start + 1), text=label.text, primary=label.primary)
