"""Peak memory of a plan, by liveness of its registers: bytes of one device's memory, and bytes that
one device has in host memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

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
      bytes: bytes on one device: arguments + outputs - donated inputs whose buffers outputs take +
          temporaries.
      temporaries: the live temporaries, in program order; those inside a region come last.
      host_bytes: bytes that one device has in host memory at the fullest moment there, counted in
          the same way.
    """

    bytes: float
    temporaries: tuple[Register, ...]
    host_bytes: float = 0.0


def reused(typing: Typing, block: Block) -> tuple[int, ...]:
    """The positions of the donated inputs whose buffers outputs take: as in `jax.jit`, each output
    takes that of the first one with its shape, dtype and type.

    Arguments:
      typing: the types.
      block: the plan.
    """
    avals = typing.graph.avals

    def kind(register: Register) -> object:
        aval = avals[register.value]
        return aval.shape, aval.dtype, _jax.in_host(aval), register.codes

    wanted = Counter(kind(s) for s in block.outputs if isinstance(s, Register))
    found: list[int] = []
    for position in typing.request.donated:
        this = kind(block.inputs[position])
        if wanted[this]:
            wanted[this] -= 1
            found.append(position)
    return tuple(found)


def peak_memory(typing: Typing, block: Block) -> Peak:
    """The fullest moment of a plan.

    Arguments:
      typing: the types, for shapes and the mesh.
      block: the plan.
    """
    sizes, avals = typing.mesh.sizes, typing.graph.avals
    taken = reused(typing, block)

    def within(host: bool) -> tuple[float, tuple[Register, ...]]:
        """Bytes in one of the two memories, and the temporaries there."""

        def size(register: Register, *, copied: bool = False) -> float:
            aval = avals[register.value]
            in_host = _jax.in_host(aval)
            if not ((in_host and not copied) if host else in_host == copied):
                return 0.0
            local = local_shape(aval.shape, register.codes, sizes)
            return math.prod(local) * _jax.itemsize(aval.dtype)

        arguments = sum(size(r) for r in block.inputs)
        outputs = sum(size(s) for s in block.outputs if isinstance(s, Register))
        donated = sum(size(block.inputs[i]) for i in taken)
        temporaries, live = _temporaries(block, size, top=True)
        return arguments + max(0.0, outputs - donated) + temporaries, live

    held, live = within(False)
    any_in_host = any(map(_jax.in_host, avals.values()))
    return Peak(bytes=held, temporaries=live, host_bytes=within(True)[0] if any_in_host else 0.0)


def _is_inlined(node: Node) -> bool:
    """Whether XLA hardly ever stores the results of a node: it fuses the node into its readers."""
    return traits_of(node.op).fusion == "inlined"


class RegisterBytes(Protocol):
    """Bytes of a register in one memory of one device: 0 for one in the other memory. `copied` asks
    for the bytes in device memory of a register in host memory, while it is converted."""

    def __call__(self, register: Register, *, copied: bool = False) -> float: ...


def _inner(instruction: Instruction, size: RegisterBytes) -> tuple[float, tuple[Register, ...]]:
    """Bytes that an instruction needs besides its operands and results, and the registers that are
    live inside it when it needs most."""
    match instruction:
        case Loop():
            return max(
                (_temporaries(b, size, top=False) for b in instruction.blocks),
                key=lambda found: found[0],
                default=(0.0, ()),
            )
        case Apply():
            return instruction.scratch_bytes, ()
        case Box(source=source, target=target):
            return size(source, copied=True) + size(target, copied=True), ()


def _temporaries(
    block: Block, size: RegisterBytes, *, top: bool
) -> tuple[float, tuple[Register, ...]]:
    """Most bytes of temporaries that a block has at one moment, and the registers live then.

    Arguments:
      block: the block.
      size: bytes of a register on one device.
      top: whether the block is the program; its outputs are then counted by the caller.
    """
    last: dict[Register, int] = {}
    for at, instruction in enumerate(block.instructions):
        for source in instruction.ins:
            if isinstance(source, Register):
                last[source] = at
    kept = {s for s in block.outputs if isinstance(s, Register)}
    live, peak = 0.0, 0.0
    fullest: tuple[Register, ...] = ()
    sizes: dict[Register, float] = {}
    inputs = set(block.inputs)
    for at, instruction in enumerate(block.instructions):
        inner, within = _inner(instruction, size)
        fused = isinstance(instruction, Apply) and _is_inlined(instruction.node)
        for register in instruction.outs:
            bytes_ = 0.0 if fused or (top and register in kept) else size(register)
            if register in last or register in kept:
                sizes[register] = bytes_
                live += bytes_
        if live + inner > peak:
            peak, fullest = live + inner, (*(r for r, b in sizes.items() if b), *within)
        for source in dict.fromkeys(s for s in instruction.ins if isinstance(s, Register)):
            if last.get(source) == at and source not in kept and source not in inputs:
                live -= sizes.pop(source, 0.0)
    return peak, fullest
