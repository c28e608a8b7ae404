"""Which part of a step each operation belongs to: forward pass, backward pass, or update."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from sbp.infer.policy import late_values
from sbp.plan.ir import Box, Instruction
from sbp.trace.graph import Graph, Node
from sbp.trace.regions import CONTROL_FLOW

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


def first_operation(node: Node | None) -> Node | None:
    """The node itself, or of a loop or branch the first operation in it; None where there is none.

    Arguments:
      node: the node.
    """
    while node is not None and node.op in CONTROL_FLOW:
        node = next((n for region in node.regions for n in region.nodes), None)
    return node


def operation_of(instruction: Instruction) -> Node | None:
    """The operation that an instruction belongs to: a conversion belongs to what reads it, or else
    to what makes it. None for a result that is an argument.

    Arguments:
      instruction: the instruction.
    """
    is_box = isinstance(instruction, Box)
    node = (instruction.reader or instruction.maker) if is_box else instruction.node
    return first_operation(node)


def phases(graph: Graph) -> dict[int, Phase]:
    """The phase of each node, by its id, those of regions included.

    Operations of a gradient, and those that rematerialisation repeats for it, are `backward`. What
    is computed from gradients outside of it, as an optimiser does, is `update`: also the sums of
    gradients over microbatches, and what only such operations read. All else is `forward`; so is a
    program without a gradient.
    """
    found: dict[int, Phase] = {}
    _visit(graph, late_values(graph), found)
    return found


def _visit(graph: Graph, late: Set[int], found: dict[int, Phase]) -> None:
    """Finds the phases of a graph's nodes, the last one first: what only the update reads, such as
    the decay of old moments, belongs to it."""
    readers: dict[int, set[Phase]] = {v: {"forward"} for v in graph.outputs if isinstance(v, int)}
    for node in reversed(graph.nodes):
        reading = {phase for v in node.outputs for phase in readers.get(v, ())}
        is_update = reading == {"update"} or not late.isdisjoint(node.outputs)
        phase: Phase = "backward" if node.backward else "update" if is_update else "forward"
        found[node.id] = phase
        for region in node.regions:
            _visit(region, late, found)
            if phase != "forward" and late.isdisjoint(node.outputs):
                found.update((inner.id, phase) for inner in region.walk())
        for value in node.inputs:
            if isinstance(value, int):
                readers.setdefault(value, set()).add(phase)
