"""Facts -> pages: the full report of a plan, the short report for training programs, and the report
of a program without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp.annotations import Pin
from sbp.errors import Diagnostic, position_text
from sbp.plan.program import Program
from sbp.report import facts
from sbp.report.choice import choice, strategy_line
from sbp.report.collectives import Collective, by_line, collectives, detail
from sbp.report.coverage import coverage_parts
from sbp.report.finding import finding
from sbp.report.flow_picture import brief_picture
from sbp.report.hardware import unmeasured
from sbp.report.memory_picture import memory_picture
from sbp.report.parts import (
    Column,
    Facts,
    Page,
    Paragraph,
    Part,
    Section,
    Share,
    Table,
    TableRow,
)
from sbp.report.precision import precision
from sbp.report.shard_picture import LISTED_SHARDS, shard_picture
from sbp.report.shards import telling_tensor
from sbp.report.timeline_picture import timeline_picture
from sbp.report.traffic_picture import traffic_picture
from sbp.report.wording import bytes_text, counted, listed, place_text, seconds_text, times_text
from sbp.shardmap.coverage import Coverage
from sbp.trace.regions import WHILE_TRIPS

SHOWN_COLLECTIVES = 12
SHOWN_SHORT = 8
SHOWN_TENSORS = 16


def refusal(
    title: str, diagnostics: Sequence[Diagnostic], coverage: Coverage | None = None
) -> Page:
    """The report of a program without a plan.

    Arguments:
      title: the function's name.
      diagnostics: the findings.
      coverage: what was read of it; it is shown where there is no error.
    """
    head = Paragraph(text=_verdict(diagnostics) + (f" in `{title}`" if title else ""))
    wrong = any(d.severity == "error" for d in diagnostics)
    read = coverage_parts(coverage) if coverage is not None and not wrong else ()
    return Page(parts=(*map(finding, diagnostics), head, *read))


def _verdict(diagnostics: Sequence[Diagnostic]) -> str:
    errors = sum(d.severity == "error" for d in diagnostics)
    others = sum(d.severity == "warning" for d in diagnostics)
    if not errors and not others:
        return "no findings"
    return ", ".join(
        ([counted(errors, "error")] if errors else [])
        + ([counted(others, "warning")] if others else [])
    )


def _findings(diagnostics: Sequence[Diagnostic]) -> Section:
    only_notes = all(d.severity == "note" for d in diagnostics)
    title = counted(len(diagnostics), "note") if only_notes else _verdict(diagnostics)
    return Section(title=title, parts=tuple(map(finding, diagnostics)))


def full(
    program: Program, title: str, output_names: tuple[str, ...], diagnostics: Sequence[Diagnostic]
) -> Page:
    """The full report of a plan: cost, tensors, collectives, regions, findings.

    Arguments:
      program: the plan.
      title: the function's name.
      output_names: names of the results.
      diagnostics: the findings.
    """
    found = collectives(program, output_names)
    parts: list[Part] = [_cost(program), *strategy_line(program), *choice(program)]
    parts += [Paragraph(text=text) for text in unmeasured(program)]
    annotated = facts.annotated(program)
    if annotated:
        parts.append(
            Section(title=_heading(annotated, "annotated tensor"), parts=(_annotated(annotated),))
        )
    parts.append(_collectives(program, found, SHOWN_COLLECTIVES, 2))
    if found:
        parts.append(_pictures(program))
    parts += precision(program)
    telling = telling_tensor(program)
    if telling is not None:
        heading = "where a tensor lives; report.where(name) shows others"
        drawn = shard_picture(telling)
        both = (replace(drawn, instead=()), *drawn.instead)
        few = len(telling.shards) <= LISTED_SHARDS
        parts.append(Section(title=heading, parts=both, opened=few))
    parts.append(_tensors("input", facts.inputs(program)))
    parts.append(_tensors("output", facts.outputs(program, output_names)))
    regions = facts.regions(program)
    if regions:
        parts.append(Section(title="regions", parts=(_regions(regions),)))
    if diagnostics:
        parts.append(_findings(diagnostics))
    return Page(title=_title(program, title), parts=tuple(parts))


def short(
    program: Program, title: str, output_names: tuple[str, ...], diagnostics: Sequence[Diagnostic]
) -> Page:
    """The short report of a plan, for training programs: annotated tensors, collectives by source
    line, bytes, memory and time.

    Arguments:
      program: the plan.
      title: the function's name.
      output_names: names of the results.
      diagnostics: the findings.
    """
    found = collectives(program, output_names)
    annotated = facts.annotated(program)
    parts: list[Part] = [_cost(program), *strategy_line(program)]
    if annotated:
        parts.append(
            Section(title=_heading(annotated, "annotated tensor"), parts=(_annotated(annotated),))
        )
    parts.append(_collectives(program, by_line(found), SHOWN_SHORT, 1))
    parts += precision(program)
    if diagnostics:
        parts.append(_findings(diagnostics))
    return Page(title=_title(program, title), parts=tuple(parts))


def _pictures(program: Program) -> Section:
    """Pictures of the program, of what is sent, of time and of memory."""
    others = (traffic_picture(program), timeline_picture(program), memory_picture(program))
    return Section(
        title="pictures; report.picture(), .bytes(), .timeline() and .memory() have them in words",
        parts=(brief_picture(program), *(replace(p, instead=()) for p in others)),
        opened=False,
    )


def _heading(found: Sequence[object], noun: str) -> str:
    return counted(len(found), noun)


def _title(program: Program, title: str) -> str:
    mesh = program.mesh
    name = f"`{title}` " if title else ""
    assumed = " (assumed, since the mesh is abstract; hardware= names another)"
    return (
        f"{name}on mesh {mesh}: {counted(mesh.num_devices, 'device')}, hardware"
        f" {mesh.hardware.name}{assumed if mesh.is_assumed else ''}"
    )


def _cost(program: Program) -> Facts:
    cost = program.cost
    return Facts(
        pairs=(
            ("sent per call", f"{bytes_text(cost.bytes_per_device)} per device"),
            ("peak memory", f"{bytes_text(cost.peak_memory_bytes)} per device"),
            *(
                (("host memory", f"{bytes_text(cost.host_memory_bytes)} per device"),)
                if cost.host_memory_bytes
                else ()
            ),
            ("modelled time", seconds_text(cost.seconds)),
        )
    )


def _annotated(found: Sequence[facts.AnnotatedTensor]) -> Table:
    columns = (
        Column(heading="tensor", wraps=True),
        Column(heading="shape"),
        Column(heading="pinned", wraps=True),
        Column(heading="type", wraps=True),
        Column(heading="per device", right=True),
        Column(heading="line"),
    )
    rows = [
        TableRow(
            cells=(
                f"{a.name} again" if a.is_repeat else a.name,
                a.tensor.shape,
                _pin_text(a.pin),
                repr(a.tensor.type),
                bytes_text(a.tensor.bytes_per_device),
                position_text(a.file, a.line),
            )
        )
        for a in found
    ]
    rest = rows[SHOWN_TENSORS:]
    return Table(
        columns=columns,
        rows=tuple(rows[:SHOWN_TENSORS]),
        folded=tuple(rest),
        rest=f"and {len(rest)} more" if rest else "",
    )


def _pin_text(pin: Pin) -> str:
    """The type that an annotation asks for: a type on all axes without its Bs, another one by the
    axes that it names, and the dims that other axes may not split."""
    if pin.complete:
        return repr(pin.type)
    asked = " ".join(f"{axis}:{atom!r}" for axis, atom in pin.type.items()) or "?"
    whole = ", ".join(map(str, pin.whole))
    return f"{asked}, no other split of dim {whole}" if whole else asked


def _collectives(program: Program, found: Sequence[Collective], shown: int, limit: int) -> Section:
    if not found:
        return Section(
            title="collectives", parts=(Paragraph(text="none: no device sends anything"),)
        )
    total = program.cost.bytes_per_device
    columns = (
        Column(heading="collective"),
        Column(heading="mesh axes", wraps=True),
        Column(heading="change", wraps=True),
        Column(heading="tensor", wraps=True),
        Column(heading="runs", right=True),
        Column(heading="per device", right=True),
        Column(heading="share"),
    )
    rows = tuple(
        TableRow(
            cells=(
                c.kind,
                c.mesh_axes,
                listed(c.changes, 1),
                listed(c.tensors, 1),
                str(c.runs),
                bytes_text(c.bytes_per_device),
                Share(fraction=c.bytes_per_device / total if total else 0.0),
            ),
            detail=detail(c, limit),
        )
        for c in found
    )
    rest = found[shown:]
    text = (
        f"and {len(rest)} more groups: {bytes_text(sum(c.bytes_per_device for c in rest))} per"
        " device"
        if rest
        else ""
    )
    runs = counted(sum(c.runs for c in found), "run")
    return Section(
        title=f"collectives: {runs}, {bytes_text(total)} per device",
        parts=(Table(columns=columns, rows=rows[:shown], folded=rows[shown:], rest=text),),
    )


def _tensors(noun: str, found: Sequence[facts.Tensor]) -> Section:
    """Arguments or results in order; where there are many, the largest, and the rest folded. Leaves
    of numbered layers are one row where they are alike."""
    total = sum(t.bytes_per_device for t in found)
    rows = facts.alike(found)
    sizes = [count * t.bytes_per_device for t, count in rows]
    largest = sorted(range(len(rows)), key=lambda i: (-sizes[i], i))[:SHOWN_TENSORS]
    columns = (
        Column(heading=noun, wraps=True),
        Column(heading="shape"),
        Column(heading="type", wraps=True),
        Column(heading="on one device"),
        Column(heading="per device", right=True),
    )

    def row(i: int) -> TableRow:
        t, count = rows[i]
        marks = [word for word, marked in (("donated", t.donated), ("padded", t.padded)) if marked]
        name = times_text(t.name, count) + (f" ({', '.join(marks)})" if marks else "")
        return TableRow(cells=(name, t.shape, repr(t.type), t.local_shape, bytes_text(sizes[i])))

    rest = [i for i in range(len(rows)) if i not in largest]
    smaller = counted(sum(rows[i][1] for i in rest), "smaller one")
    table = Table(
        columns=columns,
        rows=tuple(map(row, sorted(largest))),
        folded=tuple(map(row, rest)),
        rest=f"and {smaller}: {bytes_text(sum(sizes[i] for i in rest))} per device" if rest else "",
    )
    return Section(
        title=f"{counted(len(found), noun)}: {bytes_text(total)} per device",
        parts=(table,),
        opened=len(rows) <= SHOWN_TENSORS,
    )


def _regions(found: Sequence[facts.RegionFact]) -> Table:
    columns = (
        Column(heading="region"),
        Column(heading="line", wraps=True),
        Column(heading="trips", right=True),
        Column(heading="runs of the body", right=True),
        Column(heading="conversions that send", right=True),
        Column(heading="per device", right=True),
    )
    rows: list[TableRow] = []
    for r in found:
        assumed = (
            f"the trip count of a while loop is not known; {WHILE_TRIPS} are assumed"
            if r.trips_assumed
            else ""
        )
        cells = (
            r.op,
            place_text(r.place),
            str(r.trips),
            str(r.runs),
            str(r.collectives),
            bytes_text(r.bytes_per_device),
        )
        rows.append(TableRow(cells=cells, detail=assumed))
    return Table(columns=columns, rows=tuple(rows))
