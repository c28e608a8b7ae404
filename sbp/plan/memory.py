"""Peak memory of a plan in bytes on one device, by liveness of its registers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sbp import _jax
from sbp.infer.space import local_shape
from sbp.infer.typing import Typing
from sbp.plan.ir import Apply, Block, Box, Instruction, Loop, Register
from sbp.signatures import traits_of
from sbp.trace.graph import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The fullest moment of a plan.

    Arguments:
      bytes: arguments + outputs - aliased + temporaries of one device.
      temporaries: the temporaries that are live then, in program order; those of nested regions
          after their own.
    """

    bytes: float
    temporaries: tuple[Register, ...]


def peak_memory(typing: Typing, block: Block, aliased: tuple[int, ...]) -> Peak:
    """The fullest moment of a plan: arguments + outputs - aliased + live temporaries."""
    sizes = typing.mesh.sizes

    def size(register: Register) -> float:
        aval = typing.graph.avals[register.value]
        return math.prod(local_shape(aval.shape, register.codes, sizes)) * _jax.itemsize(aval.dtype)

    arguments = sum(size(r) for r in block.inputs)
    outputs = sum(size(s) for s in block.outputs if isinstance(s, Register))
    donated = sum(size(block.inputs[i]) for i in aliased)
    held, live = _temporaries(block, size, top=True)
    return Peak(bytes=arguments + max(0.0, outputs - donated) + held, temporaries=live)


def _is_inlined(node: Node) -> bool:
    """Whether XLA hardly ever stores the results of a node: its readers compute them again."""
    return traits_of(node.op).fusion == "inlined"


def _inner(
    instruction: Instruction, size: Callable[[Register], float]
) -> tuple[float, tuple[Register, ...]]:
    """Bytes that an instruction takes besides its operands and results, and the registers that are
    live inside it."""
    if isinstance(instruction, Loop):
        return max(
            (_temporaries(b, size, top=False) for b in instruction.blocks),
            key=lambda found: found[0],
            default=(0.0, ()),
        )
    return (instruction.scratch_bytes if isinstance(instruction, Apply) else 0.0), ()


def _temporaries(
    block: Block, size: Callable[[Register], float], *, top: bool
) -> tuple[float, tuple[Register, ...]]:
    last: dict[Register, int] = {}
    for at, instruction in enumerate(block.instructions):
        sources = (instruction.source,) if isinstance(instruction, Box) else instruction.ins
        for source in sources:
            if isinstance(source, Register):
                last[source] = at
    kept = {s for s in block.outputs if isinstance(s, Register)}
    live, peak = 0.0, 0.0
    fullest: tuple[Register, ...] = ()
    held: dict[Register, float] = {}
    inputs = set(block.inputs)
    for at, instruction in enumerate(block.instructions):
        inner, within = _inner(instruction, size)
        outs = (instruction.target,) if isinstance(instruction, Box) else instruction.outs
        fused = isinstance(instruction, Apply) and _is_inlined(instruction.node)
        for register in outs:
            bytes_ = 0.0 if fused or (top and register in kept) else size(register)
            if register in last or register in kept:
                held[register] = bytes_
                live += bytes_
        if live + inner > peak:
            peak, fullest = live + inner, (*(r for r, b in held.items() if b), *within)
        sources = (instruction.source,) if isinstance(instruction, Box) else instruction.ins
        for source in dict.fromkeys(s for s in sources if isinstance(s, Register)):
            if last.get(source) == at and source not in kept and source not in inputs:
                live -= held.pop(source, 0.0)
    return peak, fullest
