"""Notes of large matrices that are gathered for an operator that takes them whole."""

from __future__ import annotations

from collections.abc import Iterator

from sbp.errors import Diagnostic, Label, bytes_text
from sbp.plan.ir import Apply
from sbp.plan.program import PlannedBox, Program
from sbp.plan.text import shape_text
from sbp.signatures import traits_of
from sbp.source.reader import source_text
from sbp.trace.graph import Node

GATHERED_BYTES = 2**20
"""Bytes per device and call above which a gathered matrix is noted."""


def gathered_matrices(program: Program) -> tuple[Diagnostic, ...]:
    """A note for each matrix that is split, and that a decomposition or a Fourier transform takes
    whole, where more than `GATHERED_BYTES` are sent for it. One that is gathered before a loop and
    read inside has no note; the table of collectives has it."""
    found: dict[int, Diagnostic] = {}
    for planned in program.boxes():
        axes = [
            name
            for name, have, take in zip(
                program.mesh.names, planned.box.source.codes, planned.box.target.codes, strict=True
            )
            if have > 0 and take == 0
        ]
        if not axes or planned.bytes_per_device <= GATHERED_BYTES:
            continue
        for node in _taking_whole(planned):
            found.setdefault(node.id, _note(program, planned, node, axes))
    return tuple(found.values())


def _taking_whole(planned: PlannedBox) -> Iterator[Node]:
    """The operators that take a gathered value whole, as it is or after elementwise operators and
    operators that move elements.

    Arguments:
      planned: the conversion that gathers it.
    """
    target = planned.box.target
    whole = {target}
    for i in planned.block.instructions:
        if not isinstance(i, Apply) or whole.isdisjoint(i.ins):
            continue
        traits = traits_of(i.node.op)
        if traits.whole:
            yield i.node
        elif traits.elementwise or traits.moves:
            whole.update(r for r in i.outs if r.codes == target.codes)


def _note(program: Program, planned: PlannedBox, node: Node, axes: list[str]) -> Diagnostic:
    """The note of one operator.

    Arguments:
      program: the plan.
      planned: the conversion of its operand.
      node: the operator.
      axes: the mesh axes along which the operand is gathered.
    """
    shape = shape_text(program.graph.avals[planned.box.source.value])
    over = " and ".join(f"`{a}`" for a in axes)
    sent = bytes_text(planned.bytes_per_device)
    label = f"takes {shape} whole: gathered on {over}, {sent} per device"
    return Diagnostic(
        code="gathered-matrix",
        severity="note",
        title=f"{node.name} `{source_text(node.span)}` is computed whole on every device of {over}",
        labels=(Label(span=node.span, text=label, primary=True),) if node.span else (),
        notes=(f"{node.name} can be split only along dims before those that it takes whole",),
    )
