"""Which values a loop finds computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax import numpy as jnp

from sbp import _jax
from sbp.plan.ir import Block, Box, Instruction, Loop, Register
from sbp.plan.memory import DeviceMemory, stored_values


def computed_before(memory: DeviceMemory, block: Block) -> dict[int, tuple[Register, ...]]:
    """For each loop, by the id of its node: the values that are computed before it and read after
    it, and an array that it reads. A barrier over them puts their computation before the loop.

    The TPU compiler may compute a value that a loop does not read behind the loop, where it is
    read. What it is computed from lies in memory while the loop runs: the whole gradient, of which
    a device keeps a shard (`tests/tpu/test_compiled_memory.py`), or the logits, for the loss. So
    this is done for values with fewer bytes than an array that the plan needs no more when the loop
    starts, and that is there before the loop anyway: something else reads it, too, or it is what a
    collective makes smaller. What is computed for one value alone may wait with it: a lookup's
    gradient needs more memory while it is added up than what it is made of
    (`python -m benchmarks.gshard_bytes`). Of a collective, the smaller one of its operand and its
    result is computed before the loop: what it sends can wait, where that is less.

    Arguments:
      memory: the device's own memory.
      block: the instructions of the program, or of a region.
    """
    loops = [(at, i) for at, i in enumerate(block.instructions) if isinstance(i, Loop)]
    if not loops:
        return {}
    before = _Before(memory, block)
    found: dict[int, tuple[Register, ...]] = {}
    for start, (at, loop) in zip([0, *(n + 1 for n, _ in loops)], loops, strict=False):
        held = [r for r in before.held(start, at) if r not in loop.ins]
        read = [s for s in loop.ins if isinstance(s, Register) and _is_tied(memory.avals[s.value])]
        if held and read:
            found[loop.node.id] = (*held, *read[:1])
    return found


class _Before:
    """What is computed between two loops.

    Arguments:
      memory: the device's own memory.
      block: the instructions.
    """

    def __init__(self, memory: DeviceMemory, block: Block) -> None:
        self.size, self.block = memory.size, block
        found = stored_values(block, memory.avals, memory.elements)
        self.stored, end = found.registers, len(block.instructions)
        self.readers = Counter(s for i in block.instructions for s in i.ins)
        outputs = {s: end for s in block.outputs if isinstance(s, Register)}
        self.last = {**found.last, **outputs}

    def held(self, start: int, loop: int) -> list[Register]:
        """The values to compute before a loop.

        Arguments:
          start: the position behind the loop before.
          loop: the position of the loop.
        """
        needed: dict[Register, float] = {}  # bytes that a value frees
        found: dict[Register, None] = {}
        for instruction in self.block.instructions[start:loop]:
            sources = [s for s in instruction.ins if isinstance(s, Register)]
            ending = [s for s in sources if self.last.get(s, 0) < loop]
            freed = (max(self.freed_bytes(instruction, s), needed.get(s, 0.0)) for s in ending)
            most = max(freed, default=0.0)
            for register in instruction.outs:
                needed[register] = most
                if self.last.get(register, 0) > loop and register in self.stored:
                    kept = self.smaller(instruction, register)
                    if needed.get(kept, 0.0) > self.size(kept):
                        found[kept] = None
        return list(found)

    def freed_bytes(self, instruction: Instruction, source: Register) -> float:
        """Bytes that an instruction frees, as the last reader of a value that would be there
        without it, or as a collective that makes it smaller."""
        if source not in self.stored:
            return 0.0
        if isinstance(instruction, Box):
            is_freed = self.size(instruction.target) < self.size(source)
        else:
            is_freed = self.readers[source] > 1
        return self.size(source) if is_freed else 0.0

    def smaller(self, instruction: Instruction, register: Register) -> Register:
        """A result, or of a collective its operand, if that has fewer bytes."""
        if isinstance(instruction, Box) and self.size(instruction.source) <= self.size(register):
            return instruction.source
        return register


def _is_tied(aval: Any) -> bool:
    """Whether a barrier may hold an operand of a loop: floats in device memory. Of a counter, XLA
    would no longer see that it starts at a constant."""
    return (
        not _jax.is_extended(aval.dtype)
        and not _jax.in_host(aval)
        and bool(jnp.issubdtype(aval.dtype, jnp.floating))
        and 0 not in aval.shape
    )
