"""The registry as pages: the primitives that have signatures, and the rows of one primitive."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from sbp.errors import SbpError, bytes_text
from sbp.plan.text import shape_text
from sbp.report.parts import Page, Paragraph, Section, Table, table
from sbp.report.wording import counted
from sbp.signatures import Op, Row, Rule, kernel_named, known_primitives, rule_for
from sbp.signatures.examples import sample
from sbp.signatures.laws.proofs import row_status
from sbp.trace.graph import Graph, Node

AXIS_SIZE = 4
"""Size of the mesh axis of the shown rows. It divides every dim of the samples."""

KNOWN = {
    "proved": "Z3 proves the scalar law behind it",
    "enumerated": "it holds on small tensors that are cut into adversarial parts",
    "assumed": "it holds on small tensors, and Z3 has not decided its scalar law",
}
"""How a row is known to hold."""


def signatures_page() -> Page:
    """All primitives with signatures, by family."""
    rules = [rule for rule in map(rule_for, known_primitives()) if rule is not None]
    families = sorted({family(rule) for rule in rules})
    sections = tuple(_family(name, [r for r in rules if family(r) == name]) for name in families)
    return Page(
        title=f"signatures of {counted(len(rules), 'primitive')} in {len(families)} families",
        parts=sections,
    )


def _family(name: str, rules: list[Rule]) -> Section:
    """The primitives of one family, with the reason of each whose only row is all B."""
    parts: list[Paragraph | Table] = []
    if split := [r.name for r in rules if not r.reason]:
        parts.append(Paragraph(text=", ".join(split)))
    if whole := [(r.name, r.reason) for r in rules if r.reason]:
        parts.append(table(("all B", "because"), whole))
    return Section(title=f"{name}: {counted(len(rules), 'primitive')}", parts=tuple(parts))


def family(rule: Rule) -> str:
    """The name of the module with a rule: elementwise, contraction, reduction, .."""
    rows: Any = rule.rows
    while isinstance(rows, functools.partial):
        rows = rows.args[0] if rows.args and callable(rows.args[0]) else rows.func
    found = str(getattr(rows, "__module__", "")).rsplit(".", 1)[-1]
    return "replicated" if rule.reason and found == "rule" else found


def signature_page(primitive: str) -> Page:
    """The rows of one primitive on its sample.

    Raises:
      SbpError: `unknown-option` for a primitive without a rule, with the nearest name.
    """
    rule = rule_for(primitive)
    if rule is None:
        near = suggestion(primitive, known_primitives())
        raise SbpError(f"no signature for a primitive {primitive!r}{near}", code="unknown-option")
    parts = [Paragraph(text=f"held B on every mesh axis: {rule.reason}")] if rule.reason else []
    title = f"{primitive}: {family(rule)}"
    found = sample(primitive)
    if found is None:
        return Page(
            title=title, parts=(*parts, Paragraph(text="there is no sample to show its rows on"))
        )
    op = op_of(*found)
    rows = rule.rows(op)
    head = f"{counted(len(rows), 'row')} on one mesh axis of size {AXIS_SIZE}, on a sample"
    return Page(
        title=title,
        parts=(*parts, Section(title=head, parts=(_rows_table(op, rows),)), *_legend(op, rows)),
    )


def op_of(graph: Graph, node: Node) -> Op:
    """A node of a graph as rules see it, on a mesh axis of `AXIS_SIZE` devices."""
    ins, outs = tuple(map(graph.aval, node.inputs)), tuple(graph.avals[o] for o in node.outputs)
    return Op(node.op, node.params, ins, outs, AXIS_SIZE)


def _rows_table(op: Op, rows: Sequence[Row]) -> Table:
    """A table of rows: atoms, the kernel, the bytes that it sends, and how the row is known. Empty
    columns are left out."""
    cells = [
        (*map(repr, r.ins), "->", *map(repr, r.outs), *_kernel_cells(op, r), row_status(op, r))
        for r in rows
    ]
    headings = [*map(shape_text, op.ins), "", *map(shape_text, op.outs)]
    headings += ["kernel", ">sends", "known"]
    shown = [
        k for k in range(len(headings)) if k < len(headings) - 3 or any(row[k] for row in cells)
    ]
    return table((headings[k] for k in shown), ([row[k] for k in shown] for row in cells))


def _kernel_cells(op: Op, row: Row) -> tuple[str, str]:
    kernel = kernel_named(row.kernel)
    sent = sum(s.bytes for s in kernel.sends(op, row)) if kernel.sends else 0.0
    return "" if row.kernel == "local" else row.kernel, (
        bytes_text(sent) if kernel.communicates else ""
    )


def _legend(op: Op, rows: Sequence[Row]) -> tuple[Table, ...]:
    """The meaning of the names of kernels and proofs in a table of rows."""
    kernels = sorted({r.kernel for r in rows} - {"local"})
    statuses = {row_status(op, r) for r in rows}
    runs = [(name, kernel_named(name).summary) for name in kernels]
    known = [(name, because) for name, because in KNOWN.items() if name in statuses]
    legends = (("kernel", "what runs on the shards"), runs), (("known", "because"), known)
    return tuple(table(headings, pairs) for headings, pairs in legends if pairs)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest name, else the command that lists all primitives.

    Arguments:
      name: a name that nothing has.
      known: the names that there are.
    """
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    if close:
        return f'; did you mean "{close[0]}"?'
    return "; `sbp signatures` lists those that have one"
