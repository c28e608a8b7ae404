"""Program -> annotated source: the user's lines, each with the types that it makes and the bytes
that it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp.errors import file_name
from sbp.infer.space import to_type
from sbp.plan.program import Program
from sbp.report.flows import program_flows
from sbp.report.parts import Page, Paragraph, Section, Share, Table, table
from sbp.report.wording import branches_text, bytes_text
from sbp.source.reader import names_at, shortened, users_span
from sbp.source.text import line_text
from sbp.trace.graph import Node
from sbp.trace.regions import CONTROL_FLOW

SHOWN_CODE = 72
"""Characters of a source line."""

_INDENT = "\N{NO-BREAK SPACE}"


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
        name: sum(s.bytes for s in stops) for name, stops in program_flows(program).places.items()
    }
    nodes: dict[tuple[str, int], list[Node]] = {}
    for node in program.graph.walk():
        span = users_span(node)
        if span and (node.op not in CONTROL_FLOW or f"{span.file}:{span.line}" in sent):
            nodes.setdefault((span.file, span.line), []).append(node)
    files = list(dict.fromkeys(file for file, _ in nodes))
    return tuple(
        AnnotatedLine(
            file=file,
            line=line,
            code=line_text(file, line),
            makes=_makes(program, nodes[file, line]),
            bytes_per_device=sent.get(f"{file}:{line}", 0.0),
        )
        for file, line in sorted(nodes, key=lambda at: (files.index(at[0]), at[1]))
    )


def _makes(program: Program, nodes: Sequence[Node]) -> tuple[tuple[str, str], ...]:
    """The values of a line with their types: those of its last operation in the forward pass, which
    make its result; the gradient's where it has no other."""
    forward = [n for n in nodes if not n.backward] or list(nodes)
    last = forward[-1]
    targets = names_at(users_span(last))
    names = [name for group in targets for name in group]
    found = dict.fromkeys(
        (
            names[k] if len(names) == len(last.outputs) else "",
            repr(to_type(program.typing.values[value], program.mesh)) or "B",
        )
        for node in forward
        if node.op == last.op and users_span(node) == users_span(last)
        for k, value in enumerate(node.outputs)
    )
    return tuple(found)


def source_page(program: Program, title: str) -> Page:
    """The annotated source as a page: a section for each file.

    Arguments:
      program: the plan.
      title: the function's name.
    """
    lines, flows = annotated_lines(program), program_flows(program)
    total = flows.bytes
    most = max((a.bytes_per_device for a in lines), default=0.0)
    name = f"`{title}`" if title else "the program"
    rest = total - sum(a.bytes_per_device for a in lines)
    head = (
        "each line with the types that it makes, and the bytes that a device sends for it per call:"
    )
    head += f" {bytes_text(total)} in all" if total else " none"
    head += f", {bytes_text(rest)} of them for results or at no line" if rest >= 1 else ""
    head += f". {branches_text(total, flows.called)}".removesuffix(". ")
    sections = [
        Section(
            title=f"source of {file_name(file)}",
            parts=(_table([a for a in lines if a.file == file], total, most),),
        )
        for file in dict.fromkeys(a.file for a in lines)
    ]
    empty = () if sections else (Paragraph(text="no operation has a line of the user"),)
    return Page(
        title=f"source of {name} on mesh {program.mesh}",
        parts=(Paragraph(text=head), *empty, *sections),
    )


def _table(lines: Sequence[AnnotatedLine], total: float, most: float) -> Table:
    """A row for each line; the most expensive line of the program is marked."""
    texts = [a.code.expandtabs(4) for a in lines if a.code]
    margin = min((len(t) - len(t.lstrip()) for t in texts), default=0)
    rows = (
        (
            f"{'> ' if a.bytes_per_device and a.bytes_per_device == most else ''}{a.line}",
            _code(a.code, margin),
            ", ".join(f"{name}: {made}" if name else made for name, made in a.makes),
            bytes_text(a.bytes_per_device) if a.bytes_per_device else "",
            Share(fraction=a.bytes_per_device / total) if a.bytes_per_device else "",
        )
        for a in lines
    )
    return table((">line", "source", "makes", ">sends", "share"), rows)


def _code(code: str | None, margin: int) -> str:
    """A source line, its indentation kept and its end left out where it is long."""
    if code is None:
        return "(no source at hand)"
    whole = code.expandtabs(4)[margin:].rstrip()
    bare = whole.lstrip()
    return _INDENT * (len(whole) - len(bare)) + shortened(bare.replace("`", "'"), SHOWN_CODE)
