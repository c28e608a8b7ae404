"""The resolved plan: instructions with boundary types and cost. What `sbp.jit(..).plan(..)` runs, prints and prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sbp import _jax
from sbp.infer.problem import Demand
from sbp.infer.regime import regime_of
from sbp.infer.space import Codes, local_shape, to_type
from sbp.infer.typing import Typing
from sbp.mesh import MeshSpec
from sbp.plan.handwritten import handwritten_bytes
from sbp.plan.ir import Apply, Block, Box, Instruction, Loop, Register
from sbp.plan.lower import lower
from sbp.plan.text import listing
from sbp.plan.verify import verify, verify_budgets
from sbp.trace.graph import Graph
from sbp.types import NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one call costs.

    Arguments:
      bytes_per_device: bytes one device sends (ring optimum, loop trips counted, padding counted).
      seconds: modelled time of compute and communication on the mesh's hardware.
      peak_memory_bytes: arguments + outputs - aliased + temporaries of one device, by liveness of the plan.
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
      aliased: positions of donated inputs.
      cost: what a call costs.
    """

    typing: Typing = field(repr=False)
    block: Block = field(repr=False)
    aliased: tuple[int, ...]
    cost: Cost

    @property
    def graph(self) -> Graph:
        """The traced program."""
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
        """All operations whose kernels send something, in program order, with how often each runs per call."""
        yield from sending(self.block, 1)


def resolve(typing: Typing, demand: Demand | None = None, *, aliased: tuple[int, ...] = ()) -> Program:
    """Typing -> Program: lowers, verifies and prices.

    Arguments:
      typing: a complete typing.
      demand: what was asked, for its policies and budgets; None for nothing.
      aliased: positions of inputs that are donated.
    """
    block = lower(typing, demand)
    verify(block, typing.mesh)
    verify_budgets(block, regime_of(typing.mesh, typing.boxing, demand or Demand(inputs=(), outputs=())))
    sent = bytes_sent(block)
    memory = peak_memory(typing, block, aliased)
    cost = Cost(bytes_per_device=sent, seconds=typing.seconds - typing.saved_seconds, peak_memory_bytes=memory)
    return Program(typing=typing, block=block, aliased=aliased, cost=cost)


def bytes_sent(block: Block) -> float:
    """Bytes one device sends when a block runs once, loop trips counted; of a cond's branches the dearest."""
    total = 0.0
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            total += instruction.bytes_sent
        elif isinstance(instruction, Loop):
            inner = [bytes_sent(b) for b in instruction.blocks]
            total += max(inner) if instruction.node.op == "cond" else instruction.trips * sum(inner)
        elif instruction.node.op == "shard_map":
            total += handwritten_bytes(instruction.node)
        else:
            total += instruction.bytes_sent
    return total


def sending(block: Block, trips: int) -> Iterator[tuple[Apply, int]]:
    """The operations of a block whose kernels send something, with how often each runs, when the block runs so many times."""
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


_FUSED = frozenset(["broadcast_in_dim", "iota", "convert_element_type", "reshape", "squeeze", "expand_dims", "sbp_annotate"])
"""Results that XLA hardly ever keeps: they are recomputed inside their readers."""


def peak_memory(typing: Typing, block: Block, aliased: tuple[int, ...]) -> float:
    """Bytes of one device at the fullest moment: arguments + outputs - aliased + live temporaries."""
    sizes = typing.mesh.sizes

    def size(value: int, codes: Codes) -> float:
        aval = typing.graph.avals[value]
        return math.prod(local_shape(aval.shape, codes, sizes)) * _jax.itemsize(aval.dtype)

    arguments = sum(size(r.value, r.codes) for r in block.inputs)
    outputs = sum(size(s.value, s.codes) for s in block.outputs if isinstance(s, Register))
    donated = sum(size(block.inputs[i].value, block.inputs[i].codes) for i in aliased)
    return arguments + max(0.0, outputs - donated) + _temporaries(block, size, top=True)


def _inner(instruction: Instruction, size: Callable[[int, Codes], float]) -> float:
    """What an instruction holds besides its operands and results."""
    if isinstance(instruction, Loop):
        return max((_temporaries(b, size, top=False) for b in instruction.blocks), default=0.0)
    return instruction.scratch_bytes if isinstance(instruction, Apply) else 0.0


def _temporaries(block: Block, size: Callable[[int, Codes], float], *, top: bool) -> float:
    last: dict[Register, int] = {}
    for at, instruction in enumerate(block.instructions):
        sources = (instruction.source,) if isinstance(instruction, Box) else instruction.ins
        for source in sources:
            if isinstance(source, Register):
                last[source] = at
    kept = {s for s in block.outputs if isinstance(s, Register)}
    live, peak = 0.0, 0.0
    held: dict[Register, float] = {}
    inputs = set(block.inputs)
    for at, instruction in enumerate(block.instructions):
        inner = _inner(instruction, size)
        outs = (instruction.target,) if isinstance(instruction, Box) else instruction.outs
        fused = isinstance(instruction, Apply) and instruction.node.op in _FUSED
        for register in outs:
            bytes_ = 0.0 if fused or (top and register in kept) else size(register.value, register.codes)
            if register in last or register in kept:
                held[register] = bytes_
                live += bytes_
        peak = max(peak, live + inner)
        sources = (instruction.source,) if isinstance(instruction, Box) else instruction.ins
        for source in dict.fromkeys(s for s in sources if isinstance(s, Register)):
            if last.get(source) == at and source not in kept and source not in inputs:
                live -= held.pop(source, 0.0)
    return peak
