"""The resolved plan: instructions with boundary types and cost. What `sbp.jit(..).plan(..)` runs,
prints and prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sbp.handwritten.traffic import handwritten_bytes
from sbp.infer.request import Request
from sbp.infer.space import to_type
from sbp.infer.typing import Typing
from sbp.machine.mesh import MeshSpec
from sbp.plan.ir import Apply, Block, Box, Loop, Register
from sbp.plan.lower import lower
from sbp.plan.memory import peak_memory
from sbp.plan.text import listing
from sbp.plan.verify import verify, verify_budgets
from sbp.trace.graph import Graph
from sbp.trace.regions import amount
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one call costs.

    Arguments:
      bytes_per_device: bytes one device sends (ring optimum, loop trips counted, padding counted).
      seconds: modelled time of compute and communication on the mesh's hardware.
      peak_memory_bytes: arguments + outputs - aliased + temporaries of one device, by liveness of
          the plan.
    """

    bytes_per_device: float
    seconds: float
    peak_memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBox:
    """A box with how often it runs and where it stands.

    Arguments:
      box: the conversion.
      trips: executions per call.
      depth: how many loops it is inside of.
    """

    box: Box
    trips: int
    depth: int

    @property
    def bytes_per_device(self) -> float:
        """Bytes one device sends per call for this box."""
        return self.box.bytes_sent * self.trips


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A typed program written out as instructions.

    Arguments:
      typing: types and rows.
      block: the instructions.
      cost: what a call costs.
      fullest: the temporaries that are live when memory is fullest.
    """

    typing: Typing = field(repr=False)
    block: Block = field(repr=False)
    cost: Cost
    fullest: tuple[Register, ...] = field(default=(), repr=False)

    @property
    def request(self) -> Request:
        """The program as it was traced, and what its plan was chosen by."""
        return self.typing.request

    @property
    def graph(self) -> Graph:
        """The program that is run: as traced, or with repeated conversions taken out."""
        return self.typing.graph

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.typing.mesh

    @property
    def input_types(self) -> tuple[NdSbp, ...]:
        """The type of each flat input."""
        return tuple(to_type(r.codes, self.mesh) for r in self.block.inputs)

    @property
    def output_types(self) -> tuple[NdSbp, ...]:
        """The type of each flat output."""
        return tuple(to_type(c, self.mesh) for c in self.typing.outputs)

    def __str__(self) -> str:
        return str(listing(self))

    def boxes(self) -> Iterator[PlannedBox]:
        """All conversions in program order, those in loops with their trips."""
        yield from _boxes(self.block, 1, 0)

    def kernels(self) -> Iterator[tuple[Apply, int]]:
        """All operations whose kernels send something, in program order, with how often each runs
        per call."""
        yield from sending(self.block, 1)


def resolve(typing: Typing) -> Program:
    """Typing -> Program: lowers, verifies and prices a complete typing."""
    block = lower(typing)
    verify(block, typing.mesh)
    verify_budgets(block, typing.graph_request)
    peak = peak_memory(typing, block, typing.request.aliased)
    cost = Cost(
        bytes_per_device=bytes_sent(block),
        seconds=typing.seconds - typing.saved_seconds,
        peak_memory_bytes=peak.bytes,
    )
    return Program(typing=typing, block=block, cost=cost, fullest=peak.temporaries)


def bytes_sent(block: Block) -> float:
    """Bytes one device sends when a block runs once, loop trips counted; of a cond's branches the
    dearest."""
    total = 0.0
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            total += instruction.bytes_sent
        elif isinstance(instruction, Loop):
            inner = [bytes_sent(b) for b in instruction.blocks]
            total += amount(instruction.node, inner)
        elif instruction.node.op == "shard_map":
            total += handwritten_bytes(instruction.node)
        else:
            total += instruction.bytes_sent
    return total


def sending(block: Block, trips: int) -> Iterator[tuple[Apply, int]]:
    """The operations of a block whose kernels send something, with how often each runs, when the
    block runs so many times."""
    for instruction in block.instructions:
        if isinstance(instruction, Apply) and instruction.sends:
            yield instruction, trips
        elif isinstance(instruction, Loop):
            for inner in instruction.blocks:
                yield from sending(inner, trips * instruction.trips)


def _boxes(block: Block, trips: int, depth: int) -> Iterator[PlannedBox]:
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            yield PlannedBox(box=instruction, trips=trips, depth=depth)
        elif isinstance(instruction, Loop):
            for inner in instruction.blocks:
                yield from _boxes(inner, trips * instruction.trips, depth + 1)
