"""What `sbp.check_shard_map` read of a program and what it did not, as parts of a page."""

from __future__ import annotations

from sbp.errors import Span
from sbp.plan.text import place
from sbp.report.parts import Column, Paragraph, Section, Table, TableRow
from sbp.report.wording import bytes_text, counted
from sbp.shardmap.coverage import Coverage
from sbp.shardmap.run_words import run_text
from sbp.shardmap.words import why_text


def coverage_parts(read: Coverage) -> tuple[Section, ...]:
    """A section on what was checked, and one on what was not where there is such a thing."""
    sent = sum(c.bytes_per_device for c in read.collectives)
    checked = (
        f"{counted(read.regions, 'region')} with {counted(read.values, 'value')},"
        f" {counted(len(read.collectives), 'collective')}: {bytes_text(sent)} per device"
    )
    parts = (_collectives(read),) if read.collectives else ()
    first = Section(title=f"checked: {checked}", parts=parts)
    if not (read.unread or read.unshown):
        return (first,)
    return first, Section(title="not checked: values without a reading", parts=_unread(read))


def _collectives(read: Coverage) -> Table:
    return Table(
        columns=(
            Column(heading="collective", wraps=True),
            Column(heading="at"),
            Column(heading="mesh axes"),
            Column(heading="runs", right=True),
            Column(heading="per device", right=True),
            Column(heading="operand"),
        ),
        rows=tuple(
            TableRow(
                cells=(
                    f"`{c.text}`",
                    _at(c.span),
                    ", ".join(c.mesh_axes),
                    f"{c.runs:,}",
                    bytes_text(c.bytes_per_device),
                    "checked" if c.read else "not checked",
                )
            )
            for c in read.collectives
        ),
    )


def _unread(read: Coverage) -> tuple[Table | Paragraph, ...]:
    values = Table(
        columns=(
            Column(heading="value", wraps=True),
            Column(heading="at"),
            Column(heading="mesh axes"),
            Column(heading="why", wraps=True),
        ),
        rows=tuple(
            TableRow(cells=(f"`{u.text}`", _at(u.span), ", ".join(u.mesh_axes), why_text(u)))
            for u in read.unread
        ),
    )
    parts: list[Table | Paragraph] = [values] if read.unread else []
    if read.dependent:
        verb = "depends" if read.dependent == 1 else "depend"
        more = f"{counted(read.dependent, 'further value')} without a reading {verb} on these"
        parts.append(Paragraph(text=more))
    parts += [Paragraph(text=run_text(run)) for run in read.runs]
    for span, result, mesh_axis in read.unshown:
        where = f" of the region at {place(span)}" if span else ""
        text = f"result {result}{where}: its type on `{mesh_axis}` is claimed and not checked"
        parts.append(Paragraph(text=text))
    return tuple(parts)


def _at(span: Span | None) -> str:
    return place(span) if span else ""
