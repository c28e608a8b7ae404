"""Facts -> pages: the full report of a plan, the short report for training programs, the report of
a program without a plan, and the annotated source."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sbp import _jax
from sbp.annotations import Pin
from sbp.errors import (
    Diagnostic,
    Label,
    SbpError,
    SbpTypeError,
    counted,
    file_name,
    listed,
    position_text,
    seconds_text,
)
from sbp.explain import change
from sbp.explain.names import recomputed_lines
from sbp.handwritten import check, compared
from sbp.infer import space
from sbp.machine.hardware import HARDWARE
from sbp.plan.ir import ORDERED_TYPES
from sbp.plan.program import Program, place
from sbp.report import device_bytes, facts, flows, shards, timeline
from sbp.report.parts import (
    Facts,
    Mark,
    Page,
    Part,
    Section,
    ShownDiagnostic,
    SourceLine,
    Table,
    sentences,
    table_of,
    table_section,
)
from sbp.report.wording import bytes_text, size_text, trips_text
from sbp.signatures import ROUNDED_PARTS
from sbp.source.reader import character_index, line_text, names_at, shorten, users_span
from sbp.trace.graph import CONTROL_FLOW, Node, group_by

# ---- findings -----------------------------------------------------------------------------------
# Diagnostic -> ShownDiagnostic: adds the source lines with marks.


def finding(diagnostic: Diagnostic) -> ShownDiagnostic:
    """A diagnostic with its source lines: an excerpt of each file, that of the primary label
    first."""
    primary = diagnostic.primary
    labels = [primary, *diagnostic.labels] if primary else []
    return ShownDiagnostic(
        diagnostic=diagnostic,
        excerpts=tuple(
            (
                position_text(file, at.span.line, at.span.column),
                diagnostic.scope if at is primary else "",
                tuple(_lines(file, here[1:] if at is primary else here)),
            )
            for file, here in group_by(labels, lambda label: label.span.file).items()
            for at in here[:1]
        ),
    )


def diagnostics_of(error: SbpError) -> tuple[Diagnostic, ...]:
    """The diagnostics of an error. An error without any becomes one, at the line that it names or
    else at the user's line that raised it."""
    return (
        error.diagnostics
        if isinstance(error, SbpTypeError)
        else (
            Diagnostic(
                code=error.code,
                severity="error",
                title=error.title,
                labels=(
                    *change.labels_at([error.span or _jax.raising_span(error)], ""),
                    *error.related,
                ),
                notes=tuple(f"  {line}" for line in error.details),
            ),
        )
    )


def _lines(file: str, labels: list[Label]) -> Iterator[SourceLine]:
    labels.sort(key=lambda label: (label.span.line, label.primary, label.span))
    for number, here in group_by(labels, lambda label: label.span.line).items():
        text = line_text(file, number)
        yield number, text, tuple(_mark(text or "", label) for label in here)


def _mark(text: str, label: Label) -> Mark:
    """The columns of a label in its line. An expression of several lines is marked to the end of
    its first line."""
    start = character_index(text, label.span.column)
    whole = label.span.end_line in (0, label.span.line)
    end = character_index(text, label.span.end_column) if whole else len(text.rstrip())
    return start, max(end, start + 1), label


# ---- coverage -----------------------------------------------------------------------------------
# What `sbp.check_shard_map` checked of a program, as parts of a page.


def coverage_section(read: check.Coverage) -> Section:
    """The collectives of a program and its comparisons with one device."""
    made = table_of(
        read.collectives,
        {
            "collective": lambda c: f"`{c.text}`",
            "at": lambda c: place(c.span) if c.span else "",
            "mesh axes": lambda c: ", ".join(c.mesh_axes),
            ">runs": lambda c: f"{c.runs:,}",
            ">per device": lambda c: bytes_text(c.bytes_per_device),
        },
    )
    return Section(
        title=f"checked: {counted(read.regions, 'region')} with {counted(read.values, 'value')},"
        f" {counted(len(read.collectives), 'collective')}: {size_text(read.collectives)}"
        " per device",
        parts=(*([made] if made.rows else []), *map(compared.run_text, read.runs)),
    )


# ---- how types were chosen ----------------------------------------------------------------------
# Program -> how its types were chosen: the strategy that they make, how good the choice is, and
# what the search left out.


def _choice(program: Program) -> str:
    request, typing = program.request, program.typing
    most = max(0.1, math.ceil(1000 * typing.gap) / 10)
    found = "the cheapest that sbp found; " + (
        f"no others are more than {most:.1f}% cheaper in the cost model"
        if typing.gap < 1
        else "sbp does not know how much cheaper others may be"
    )
    how = "proved cheapest in the cost model" if typing.optimal else found
    before = (
        ""
        if typing.bounds_reuse
        else "; sbp did not count that the backward pass can reuse conversions"
    )
    option = change.boxing_option(request)
    boxing = option if isinstance(option, str) else json.dumps(option, ensure_ascii=False)
    operations = counted(sum(not n.regions for n in program.graph.walk()), "local operation")
    rounded = sum(ROUNDED_PARTS.name in row.kernels for row in typing.rows.values())
    casts = (
        f"; {counted(rounded, 'cast')} of parts before their sum (`reduce_dtype`)"
        if rounded
        else ""
    )
    return f"{operations}; boxing `{boxing}`; the types are {how}{before}{casts}"


def _left_out(program: Program) -> Iterator[str]:
    """What the search for the plan left out, and what it assumes."""
    if trips := trips_text(program):
        yield trips
    if (faster := program.faster) is not None:
        yield (
            f"a faster plan takes {seconds_text(faster.seconds)}, sends"
            f" {bytes_text(faster.bytes_per_device)} and needs"
            f" {bytes_text(faster.peak_memory_bytes)} per device; sbp chose this one because it"
            " needs less memory. Set memory_limit= to the memory that a plan may use, and sbp takes"
            " the fastest plan that fits"
        )
    if (how := program.request.recomputed) is not None:
        kept = ", without the products there" * how.keeps_products
        yield (
            "to fit in memory_limit, the backward pass runs"
            f" {recomputed_lines(program.graph)} of the forward pass again, as jax.checkpoint"
            f" does{kept}. sbp found no plan without recomputation that fits and is as fast. To"
            ' forbid recomputation, pass remat="never"'
        )
    if declined := program.declined:
        why = (
            "; set memory_limit=, and sbp keeps the results that fit"
            if program.request.memory_limit is None
            else ", which does not fit in memory_limit"
        )
        yield (
            f"the backward pass repeats {counted(len(declined), 'conversion')} of the forward pass."
            f" Keeping the results would save {bytes_text(sum(r.bytes_sent for r in declined))} and"
            f" {seconds_text(sum(r.seconds for r in declined))} per call, and need up to"
            f" {bytes_text(sum(r.bytes_kept for r in declined))} more memory per device{why}"
        )
    if program.unordered_values:
        yield (
            "sbp tried only one order for the conversions of"
            f" {counted(program.unordered_values, 'value')} to more than {ORDERED_TYPES} types;"
            " another order may send less"
        )


# ---- hardware -----------------------------------------------------------------------------------


def hardware_page() -> Page:
    """All hardware that has a name. Figures are those of one JAX device, links those of a chip.

    >>> hardware_page().parts[0].rows[1][0][:2]
    ('tpu-v3', '61.5')
    """
    made = table_of(
        HARDWARE.values(),
        {
            "name": lambda h: h.name,
            ">TFLOP/s": lambda h: f"{h.flops_per_second / 1e12:.4g}",
            ">float32": lambda h: f"{h.product_flops_per_second(4) / 1e12:.4g}",
            ">memory": lambda h: bytes_text(h.hbm_bytes),
            ">GB/s": lambda h: f"{h.hbm_bytes_per_second / 1e9:.4g}",
            "network": lambda h: f"{h.torus_dims}-D torus" if h.topology == "torus" else "switch",
            ">link": lambda h: f"{h.link_bytes_per_second / 1e9:.4g}",
            ">joins": lambda h: str(h.joined_devices) if h.beyond else "",
            ">beyond": lambda h: f"{h.beyond.bytes_per_second / 1e9:.4g}" if h.beyond else "",
        },
    )
    return Page(
        title="hardware, per JAX device; link and beyond are in GB/s, one way",
        parts=(made,),
    )


# ---- source -------------------------------------------------------------------------------------
# Program -> annotated source: the user's lines, each with the types that it makes and the bytes
# that it sends.


SHOWN_CODE = 72
"""Characters of a source line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedLine:
    """A line of the user with what it makes.

    Arguments:
      file, line: where it stands.
      code: its text; None where there is no source.
      makes: names of the values that it makes in the forward pass, each with its type.
      bytes_per_device: bytes that one device sends at the line per call, in all phases.
    """

    file: str
    line: int
    code: str | None
    makes: tuple[tuple[str, str], ...]
    bytes_per_device: float


def annotated_lines(program: Program) -> tuple[AnnotatedLine, ...]:
    """The user's lines that make values, by file and line; files in program order.

    Arguments:
      program: the plan.
    """
    sent = {
        name: sum(s.bytes for s in stops)
        for name, stops in flows.ProgramFlows(program).places.items()
    }
    placed = (
        (node, span)
        for node in program.graph.walk()
        if (span := users_span(node))
        and (node.op not in CONTROL_FLOW or f"{span.file}:{span.line}" in sent)
    )
    nodes = group_by(placed, lambda at: (at[1].file, at[1].line))
    files = list(dict.fromkeys(file for file, _ in nodes))
    return tuple(
        AnnotatedLine(
            file=file,
            line=line,
            code=line_text(file, line),
            makes=_makes(program, [node for node, _ in nodes[file, line]]),
            bytes_per_device=sent.get(f"{file}:{line}", 0.0),
        )
        for file, line in sorted(nodes, key=lambda at: (files.index(at[0]), at[1]))
    )


def _makes(program: Program, nodes: Sequence[Node]) -> tuple[tuple[str, str], ...]:
    """The values of a line with their types: those of its last operation in the forward pass, which
    make its result; the gradient's where it has no other."""
    forward = [n for n in nodes if not n.backward] or nodes
    last, span = forward[-1], users_span(forward[-1])
    names = [name for group in names_at(span) for name in group]
    found = (
        (
            names[k] if len(names) == len(last.outputs) else "",
            repr(space.to_type(program.typing.values[value], program.mesh)) or "B",
        )
        for node in forward
        if node.op == last.op and users_span(node) == span
        for k, value in enumerate(node.outputs)
    )
    return tuple(dict.fromkeys(found))


def source_page(program: Program, title: str) -> Page:
    """The annotated source as a page: a section for each file.

    Arguments:
      program: the plan.
      title: the function's name.
    """
    lines, places = annotated_lines(program), flows.ProgramFlows(program)
    total, own = places.bytes, [a.bytes_per_device for a in lines]
    most, rest = max(own, default=0.0), total - sum(own)
    sent = f" {bytes_text(total)} in all" if total else " none"
    nowhere = f", of which {bytes_text(rest)} is for results or has no line" if rest >= 1 else ""
    head = {
        "each line with the types of its values, and the bytes that a device sends for it per call:"
        f"{sent}{nowhere}": True,
        flows.branches_text(total, places.called): True,
    }
    sections = [
        Section(title=f"source of {file_name(file)}", parts=(_lines_table(here, total, most),))
        for file, here in group_by(lines, lambda a: a.file).items()
    ]
    return Page(
        title=f"source of {f'`{title}`' if title else 'the program'} on mesh {program.mesh}",
        parts=(sentences(head, ". "), *(sections or ["no operation has a line of the user"])),
    )


def _lines_table(lines: Sequence[AnnotatedLine], total: float, most: float) -> Table:
    """A row for each line; the most expensive line of the program is marked."""
    texts = [a.code.expandtabs(4) for a in lines if a.code]
    margin = min((len(t) - len(t.lstrip()) for t in texts), default=0)
    return table_of(
        lines,
        {
            ">line": lambda a: f"{'> ' if 0 < a.bytes_per_device == most else ''}{a.line}",
            "source": lambda a: _code(a.code, margin),
            "makes": lambda a: ", ".join(f"{n}: {made}" if n else made for n, made in a.makes),
            ">sends": lambda a: bytes_text(a.bytes_per_device) if a.bytes_per_device else "",
            "share": lambda a: a.bytes_per_device / total if a.bytes_per_device else "",
        },
    )


def _code(code: str | None, margin: int) -> str:
    """A source line, its indentation kept and its end left out where it is long."""
    if code is None:
        return "(no source at hand)"
    whole = code.expandtabs(4)[margin:].rstrip()
    bare = whole.lstrip()
    return "\N{NO-BREAK SPACE}" * (len(whole) - len(bare)) + shorten(
        bare.replace("`", "'"), SHOWN_CODE
    )


# ---- pages --------------------------------------------------------------------------------------


SHOWN_COLLECTIVES, SHOWN_SHORT, SHOWN_TENSORS = 12, 8, 16


def refusal(
    title: str, diagnostics: Sequence[Diagnostic], coverage: check.Coverage | None = None
) -> Page:
    """The report of a program without a plan.

    Arguments:
      title: the function's name.
      diagnostics: the findings.
      coverage: what was checked of it; it is shown where there is no error.
    """
    checked = coverage if all(d.severity != "error" for d in diagnostics) else None
    return Page(
        parts=(
            *map(finding, diagnostics),
            _verdict(diagnostics) + (f" in `{title}`" if title else ""),
            *([coverage_section(checked)] if checked is not None else []),
        )
    )


def _verdict(diagnostics: Sequence[Diagnostic]) -> str:
    counts = Counter(d.severity for d in diagnostics)
    found = (counted(counts[k], k) for k in ("error", "warning") if counts[k])
    unchecked = any(d.code == "not-analysed" for d in diagnostics)
    nothing = "no errors or warnings" if counts["note"] else "no findings"
    return ", ".join(found) or ("not fully checked" if unchecked else nothing)


def _findings(diagnostics: Sequence[Diagnostic]) -> Iterator[Section]:
    only_notes = all(d.severity == "note" for d in diagnostics)
    title = counted(len(diagnostics), "note") if only_notes else _verdict(diagnostics)
    if diagnostics:
        yield Section(title=title, parts=tuple(map(finding, diagnostics)))


def plan_page(
    program: Program,
    title: str,
    output_names: tuple[str, ...],
    diagnostics: Sequence[Diagnostic],
    *,
    short: bool = False,
) -> Page:
    """The report of a plan: cost, tensors, collectives, findings.

    Arguments:
      program: the plan.
      title: the function's name.
      output_names: names of the results.
      diagnostics: the findings.
      short: whether it is that for training programs: annotated tensors, collectives by source
        line, bytes, memory and time.
    """
    mesh, name = program.mesh, f"`{title}` " if title else ""
    assumed = " (assumed, since the mesh is abstract; hardware= names another)"
    sliced = f" in {mesh.slices} slices" if mesh.slices > 1 else ""
    most = max((factor for _, factor in mesh.detours), default=1.0)
    apart = f", up to {most:.1f} times as far apart as with jax.make_mesh" if most > 1 else ""
    return Page(
        title=f"{name}on mesh {mesh}: {counted(mesh.num_devices, 'device')}{sliced}{apart},"
        f" hardware {mesh.hardware.name}{assumed if mesh.is_assumed else mesh.measured}",
        parts=(*_parts(program, output_names, short=short), *_findings(diagnostics)),
    )


def _parts(program: Program, output_names: tuple[str, ...], *, short: bool) -> Iterator[Part]:
    yield _cost(program)
    ends = (facts.inputs(program), facts.outputs(program, output_names))
    for odd, common, count in next(filter(None, map(facts.exceptions, ends)), ()):
        names = listed(f"`{t.name}`" for t in odd)
        yield (
            f"layers differ: {names} {'are' if odd[1:] else 'is'} {odd[0].type!r}; in"
            f" {counted(count, 'other layer')} {'they are' if odd[1:] else 'it is'} {common!r}"
        )
    if found := facts.strategy(program):
        yield "; ".join(f"`{axis}`: {text}" for axis, text in found.items())
    if not short:
        yield from (_choice(program), *_left_out(program))
    if annotated := facts.annotated_tensors(program):
        yield table_section(
            counted(len(annotated), "annotated tensor"),
            annotated,
            {
                "tensor": lambda t: f"{t.name} again" if t.is_repeat else t.name,
                "shape": lambda t: t.shape,
                "pinned": lambda t: _pin_text(t.pin) if t.pin else "",
                "type": lambda t: repr(t.type),
                ">per device": lambda t: bytes_text(t.bytes_per_device),
                "line": lambda t: t.where,
            },
            shown=SHOWN_TENSORS,
        )
    sent = facts.collectives(program, output_names)
    yield _collectives(program, facts.by_line(sent) if short else sent, short=short)
    if sent and not short:
        others = (
            timeline.timeline_picture(program),
            device_bytes.memory_picture(program),
        )
        yield Section(
            title="picture of the program; report.picture() shows all of it",
            parts=(flows.program_picture(program, brief=True),),
        )
        yield Section(
            title="pictures of time and memory; report.timeline(), .memory() and .bytes() have the"
            " numbers",
            parts=tuple(replace(p, instead=()) for p in others),
            opened=False,
        )
    if short:
        return
    if telling := shards.telling_tensor(program):
        drawn = shards.shard_picture(telling)
        yield Section(
            title="where a tensor lives; report.where(name) shows others",
            parts=(replace(drawn, instead=()), *drawn.instead),
            opened=len(telling.shards) <= shards.LISTED_SHARDS,
        )
    yield _tensors("input", facts.inputs(program))
    yield _tensors("output", facts.outputs(program, output_names))


def _cost(program: Program) -> Facts:
    cost = program.cost
    figures = {
        "sent per call": cost.bytes_per_device,
        "peak memory": round(cost.peak_memory_bytes),
        **({"host memory": cost.host_memory_bytes} if cost.host_memory_bytes else {}),
    }
    pairs = ((name, f"{bytes_text(figure)} per device") for name, figure in figures.items())
    return Facts(pairs=(*pairs, ("modelled time", seconds_text(cost.seconds))))


def _pin_text(pin: Pin) -> str:
    """The type that an annotation asks for: a type on all axes without its Bs, another one by the
    axes that it names, and the dims that other axes may not split."""
    if pin.complete:
        return repr(pin.type)
    asked = " ".join(f"{axis}:{atom!r}" for axis, atom in pin.type.items()) or "?"
    whole = ", ".join(map(str, pin.whole))
    return f"{asked}, no other split of dim {whole}" if whole else asked


def _collectives(program: Program, found: Sequence[facts.Collective], *, short: bool) -> Section:
    if not found:
        return Section(title="collectives", parts=("none: no device sends anything",))
    total = sum(c.bytes_per_device for c in found)
    runs = counted(sum(c.runs for c in found), "run")
    section = table_section(
        f"collectives: {runs}, {bytes_text(total)} per device",
        found,
        {
            "collective": lambda c: c.kind,
            "mesh axes": lambda c: c.mesh_axes,
            "change": lambda c: listed(c.changes, 1),
            "tensor": lambda c: listed(c.tensors, 1),
            ">runs": lambda c: str(c.runs),
            ">per device": lambda c: bytes_text(c.bytes_per_device),
            "share": lambda c: c.bytes_per_device / total if total else 0.0,
        },
        detail=lambda c: facts.detail(c, 1 if short else 2),
        shown=SHOWN_SHORT if short else SHOWN_COLLECTIVES,
        rest=lambda left: f"and {counted(len(left), 'more group')}: {size_text(left)} per device",
    )
    branches = flows.branches_text(total, program.cost.bytes_per_device)
    return replace(section, parts=(*section.parts, *filter(None, (branches,))))


def _tensors(noun: str, found: Sequence[facts.Tensor]) -> Section:
    """Arguments or results in order; where there are many, the largest, and the rest folded. Leaves
    of numbered layers are one row where they are alike."""

    def name(t: facts.Tensor, count: int) -> str:
        marks = sentences({"donated": t.donated, "padded": t.padded}, ", ")
        return facts.times_text(t.name, count) + (f" ({marks})" if marks else "")

    rows = facts.alike(found)
    largest = sorted(rows, key=lambda row: -facts.counted_bytes([row]))[:SHOWN_TENSORS]
    return table_section(
        f"{counted(len(found), noun)}: {bytes_text(facts.counted_bytes(rows))} per device",
        sorted(rows, key=lambda row: row not in largest),
        {
            noun: lambda row: name(*row),
            "shape": lambda row: row[0].shape,
            "type": lambda row: repr(row[0].type),
            "on one device": lambda row: row[0].local_shape,
            ">per device": lambda row: bytes_text(facts.counted_bytes([row])),
        },
        shown=len(largest),
        rest=lambda left: (
            f"and {counted(sum(count for _, count in left), 'smaller one')}:"
            f" {bytes_text(facts.counted_bytes(left))} per device"
        ),
        opened=len(rows) <= SHOWN_TENSORS,
    )
