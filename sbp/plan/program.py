"""The plan of a program: instructions with boundary types and cost. `sbp.jit(..).plan(..)` runs it,
prints it and prices it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sbp import _jax
from sbp.infer.request import Request
from sbp.infer.space import to_type
from sbp.infer.typing import Typing
from sbp.machine.mesh import MeshSpec
from sbp.plan.ir import Apply, Block, Box, Loop, Register, Source, walk
from sbp.plan.lower import ORDERED_TYPES, lower, types_read
from sbp.plan.memory import DeviceMemory, reused_inputs
from sbp.plan.saving import Repeat
from sbp.plan.text import plan_lines
from sbp.plan.verify import verify, verify_budgets
from sbp.trace.collectives import SHARD_MAP, handwritten_bytes
from sbp.trace.graph import Graph, Node, amount
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one call.

    Arguments:
      bytes_per_device: bytes that one device sends, each collective by its ring optimum, with loop
          trips and padding counted.
      seconds: modelled time of compute and communication on the mesh's hardware.
      peak_memory_bytes: bytes on one device at the fullest moment
        (`sbp.plan.memory.DeviceMemory.fullest`).
      host_memory_bytes: bytes that one device has in host memory at the fullest moment there.
    """

    bytes_per_device: float
    seconds: float
    peak_memory_bytes: float
    host_memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBox:
    """A conversion with its place in the plan.

    Arguments:
      box: the conversion.
      trips: executions per call.
      regions: the regions around it, outermost first: each node and the number of its body.
      block: the block that it is an instruction of.
    """

    box: Box
    trips: int
    regions: tuple[tuple[Node, int], ...]
    block: Block

    @property
    def bytes_per_device(self) -> float:
        """Bytes one device sends per call for this conversion."""
        return self.box.bytes_sent * self.trips

    def readers(self) -> list[tuple[Node, int]]:
        """The nodes that read the converted value, each with the position of the operand."""
        target: Source = self.box.target
        reading = (i for i in self.block.instructions if isinstance(i, Apply | Loop))
        return [(i.node, n) for i in reading for n, source in enumerate(i.ins) if source == target]

    def result_positions(self) -> list[int]:
        """The positions at which the block returns the converted value."""
        return [n for n, source in enumerate(self.block.outputs) if source == self.box.target]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A typed program written out as instructions.

    Arguments:
      typing: types and rows.
      block: the instructions.
      cost: the cost of one call.
      fullest: the temporaries that are live when memory is fullest.
      before: the plan before repeated conversions were removed; None where none were.
      removed: the repeated conversions that were removed from it.
      declined: the repeated conversions that run again, since their first results would take too
        much memory.
      memory_prices: how many prices per byte of memory types were chosen at, to hold less than the
          fastest plan does; 0 for that plan.
      faster: the cost of a faster plan that holds more than it is worth, where no memory limit
          forbids it.
    """

    typing: Typing = field(repr=False)
    block: Block = field(repr=False)
    cost: Cost
    fullest: tuple[Register, ...] = field(default=(), repr=False)
    before: Program | None = field(default=None, repr=False)
    removed: tuple[Repeat, ...] = field(default=(), repr=False)
    declined: tuple[Repeat, ...] = field(default=(), repr=False)
    memory_prices: int = 0
    faster: Cost | None = None

    @property
    def request(self) -> Request:
        """The program as it was traced, with everything that its plan was chosen by."""
        return self.typing.request

    @property
    def graph(self) -> Graph:
        """The program that runs: the traced one, or `plan.saving`'s without repeated
        conversions."""
        return self.typing.graph

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.typing.mesh

    @property
    def reused(self) -> frozenset[int]:
        """The positions of the donated inputs whose buffers outputs take."""
        return frozenset(reused_inputs(self.typing, self.block))

    @property
    def input_types(self) -> tuple[NdSbp, ...]:
        """The type of each flat input."""
        return tuple(to_type(r.codes, self.mesh) for r in self.block.inputs)

    @property
    def output_types(self) -> tuple[NdSbp, ...]:
        """The type of each flat output."""
        return tuple(to_type(c, self.mesh) for c in self.typing.outputs)

    def output_sum(self, position: int) -> str | None:
        """The `reduce_dtype` of an output, by its position; None for none."""
        operand = self.graph.outputs[position]
        chosen = self.typing.sums.get(operand) if isinstance(operand, int) else None
        return chosen or self.request.reduce_dtype

    @property
    def unordered_values(self) -> int:
        """The number of values that are read in more than `lower.ORDERED_TYPES` other types. One
        order of their conversions was priced."""
        return sum(
            len(types - {self.typing.values[value]}) > ORDERED_TYPES
            for value, types in types_read(self.typing).items()
        )

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    def boxes(self) -> Iterator[PlannedBox]:
        """All conversions in program order, with their trips."""
        for box, trips, regions, block in walk(self.block):
            if isinstance(box, Box):
                yield PlannedBox(box=box, trips=trips, regions=regions, block=block)

    def kernels(self) -> Iterator[tuple[Apply, int]]:
        """All operations whose kernels send something, in program order, each with its executions
        per call."""
        return ((i, n) for i, n, *_ in walk(self.block) if isinstance(i, Apply) and i.sends)

    def written_by_hand(self) -> list[Node]:
        """The regions written by hand, in program order."""
        return [node for node in self.graph.walk() if node.op == SHARD_MAP]


def resolve(typing: Typing) -> Program:
    """Typing -> Program: lowers, verifies and prices a typing.

    Raises:
      SbpInternalError: where the instructions do not agree with the typing, or a budget forbids a
          collective.
    """
    block = lower(typing)
    verify(block)
    verify_budgets(block, typing.graph_request)
    held, fullest = DeviceMemory(typing, in_host=False).fullest(block)
    any_in_host = any(map(_jax.in_host, typing.graph.avals.values()))
    in_host = DeviceMemory(typing, in_host=True).fullest(block)[0] if any_in_host else 0.0
    cost = Cost(
        bytes_per_device=bytes_sent(block),
        seconds=typing.seconds - typing.saved_seconds,
        peak_memory_bytes=held,
        host_memory_bytes=in_host,
    )
    return Program(typing=typing, block=block, cost=cost, fullest=fullest)


def bytes_sent(block: Block) -> float:
    """Bytes one device sends when a block runs once, with loop trips counted. Of the branches of a
    `cond`, the one that sends most counts."""
    total = 0.0
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            total += instruction.bytes_sent
        elif isinstance(instruction, Loop):
            total += amount(instruction.node, [bytes_sent(b) for b in instruction.blocks])
        elif instruction.node.op == SHARD_MAP:
            total += handwritten_bytes(instruction.node)
        else:
            total += instruction.bytes_sent
    return total
