"""What a plan sends: one list of its collectives, which every report, comparison and benchmark
groups; and the pass of a step that each instruction belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, Literal, NamedTuple

from sbp.infer.cost import step_sends, step_stages
from sbp.infer.memory_shares import late_values
from sbp.infer.space import Codes, Step
from sbp.plan.ir import Box, Instruction, walk
from sbp.plan.program import PlannedBox, Program, change_text
from sbp.signatures import Sent
from sbp.trace.collectives import KINDS, SENT_AS, SHARD_MAP, collective_runs
from sbp.trace.graph import CONTROL_FLOW, Graph, Node, Operand

Phase = Literal["forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "update")


class Send(NamedTuple):
    """A collective of a plan, with all its runs.

    Attributes:
      kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `broadcast`.
      mesh_axes: names of the mesh axes that it runs over.
      change: the atoms before and after a conversion; of another collective, where it runs.
      runs: per call.
      bytes: that one device sends per call.
      node: the operation that it belongs to; None for a result that is an argument.
      phase: the pass of that operation.
      maker: the operation that makes the value, or that sends it; None for an argument.
      reader: the first operation that reads the converted value; None where it is returned.
      regions: the loops and branches around it, outermost first.
      planned, step: the conversion and its step; None for other collectives.
      kernel: the kernel that sends; empty for other collectives.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    change: str
    runs: int
    bytes: float
    node: Node | None
    phase: Phase
    maker: Node | None
    reader: Node | None
    regions: tuple[Node, ...]
    planned: PlannedBox | None = None
    step: Step | None = None
    kernel: str = ""

    @property
    def axes(self) -> str:
        """The mesh axes in words."""
        return ", ".join(self.mesh_axes)

    @property
    def is_returned(self) -> bool:
        """Whether it converts a result of the program."""
        return self.planned is not None and self.reader is None and not self.regions

    @property
    def reduces(self) -> bool:
        """Whether it ends a partial value."""
        return self.step is not None and _reduces(self.step.source, self.step.target)


def sends(program: Program) -> tuple[Send, ...]:
    """The collectives of a plan in program order: of conversions, of kernels, and of regions
    written by hand. All branches of a `cond` are there.

    Arguments:
      program: the plan.
    """
    return tuple(send for send in _sends(program) if send.bytes or not send.runs)


def _sends(program: Program) -> Iterator[Send]:
    names, mesh, phases = program.mesh.names, program.mesh, Phases(program.graph)
    for i, runs, regions, block in walk(program.block):
        around = tuple(node for node, _ in regions)
        node, phase = phases.place(i, around)
        maker, reader = (i.maker, i.reader) if isinstance(i, Box) else (i.node, None)
        here = Send("", (), "", runs, 0.0, node, phase, maker, reader, around)
        if isinstance(i, Box):
            planned = PlannedBox(box=i, trips=runs, regions=regions, block=block)
            aval = program.graph.avals[i.target.value]
            for step in i.steps:
                change = change_text(step, step_stages(step, aval, mesh))
                over = tuple(names[k] for k in step.mesh_axes)
                for sent in step_sends(step, aval, mesh):
                    yield _collective(here, sent, over, change, planned=planned, step=step)
        elif i.node.op == SHARD_MAP:
            for run in collective_runs(i.node):
                sent = Sent(SENT_AS[KINDS[run.node.op]], run.bytes_per_device, run.runs)
                yield _collective(here, sent, run.mesh_axes, "in a manual region")
        else:
            for k, sent in i.sends:
                inside, kernel = f"inside {i.node.name}", i.row.kernels[k]
                yield _collective(here, sent, (names[k],), inside, kernel=kernel)


def _collective(
    here: Send, sent: Sent, mesh_axes: tuple[str, ...], change: str, **more: Any
) -> Send:
    """A collective at the place of `here`, which runs as often."""
    return here._replace(
        kind=sent.kind,
        mesh_axes=mesh_axes,
        change=change,
        runs=here.runs * sent.rounds,
        bytes=here.runs * sent.bytes,
        **more,
    )


class Phases:
    """The passes of a step.

    Operations of a gradient, and those that rematerialisation repeats for it, are `backward`. What
    is computed from gradients outside of it, as an optimiser does, is `update`: also the sums of
    gradients over microbatches, and what only such operations read. All else is `forward`; so is a
    program without a gradient.

    Attributes:
      of: the pass of each node, by its id, those of regions included.
    """

    def __init__(self, graph: Graph) -> None:
        self.of: dict[int, Phase] = {}
        self._visit(graph, late_values(graph))

    def place(
        self, instruction: Instruction, around: Sequence[Node] = ()
    ) -> tuple[Node | None, Phase]:
        """The operation that an instruction belongs to, and its pass.

        A conversion belongs to what reads it, or else to what makes it, or to the region that
        returns it; the reduction of a gradient for the update belongs to the gradient. A loop or
        branch has the pass of its first operation.

        Arguments:
          instruction: the instruction.
          around: the loops and branches around it, outermost first.
        """
        if not isinstance(instruction, Box):
            return instruction.node, self._first(instruction.node)
        maker, reduces = (
            instruction.maker,
            _reduces(instruction.source.codes, instruction.target.codes),
        )
        node = instruction.reader or maker or next(reversed(around), None)
        if node is None:
            return None, "forward"
        phase = self._first(node)
        if reduces and phase == "update" and maker is not None and _has_gradient(maker):
            return maker, "backward"
        return node, phase

    def _first(self, node: Node) -> Phase:
        first = node
        while first.op in CONTROL_FLOW:
            inner = next((n for region in first.regions for n in region.nodes), None)
            if inner is None:
                return self.of[node.id]
            first = inner
        return self.of[first.id]

    def _visit(self, graph: Graph, late: Set[int]) -> None:
        """Finds the passes of a graph's nodes, the last one first: what only the update reads, such
        as the decay of old moments, belongs to it."""
        readers: dict[Operand, set[Phase]] = {v: {"forward"} for v in graph.outputs}
        for node in reversed(graph.nodes):
            reading = {phase for v in node.outputs for phase in readers.get(v, ())}
            is_update = reading == {"update"} or not late.isdisjoint(node.outputs)
            phase: Phase = "backward" if node.backward else "update" if is_update else "forward"
            self.of[node.id] = phase
            for region in node.regions:
                self._visit(region, late)
                if phase != "forward" and late.isdisjoint(node.outputs):
                    self.of.update((inner.id, phase) for inner in region.walk())
            for operand in node.inputs:
                readers.setdefault(operand, set()).add(phase)


def _has_gradient(node: Node) -> bool:
    return node.backward or any(n.backward for region in node.regions for n in region.walk())


def _reduces(before: Codes, after: Codes) -> bool:
    return any(a < 0 <= b for a, b in zip(before, after, strict=True))
