"""Peak memory of a plan, by liveness of the values that reach memory: bytes of one device's memory,
and bytes that one device has in host memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sbp import _jax
from sbp.infer.space import local_shape
from sbp.infer.typing import Typing
from sbp.machine.lanes import tiled
from sbp.machine.scatters import TILE
from sbp.plan.ir import Apply, Block, Box, Instruction, Loop, Register, Source
from sbp.plan.stored import fuses, is_one_hot, stored
from sbp.signatures import traits_of
from sbp.trace.regions import interface_of

GAPS = 0.12
"""Share of the temporaries that XLA's allocation leaves unused between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The fullest moment of a plan.

    Arguments:
      bytes: bytes on one device: arguments + outputs - donated inputs whose buffers outputs take +
          temporaries, with the gaps between them.
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
    held, live = DeviceMemory(typing, in_host=False).fullest(block)
    any_in_host = any(map(_jax.in_host, typing.graph.avals.values()))
    in_host = DeviceMemory(typing, in_host=True).fullest(block)[0] if any_in_host else 0.0
    return Peak(bytes=held, temporaries=live, host_bytes=in_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a plan has in memory while one instruction runs, besides arguments and results.

    Arguments:
      instruction: the instruction; a loop for what it has besides its body.
      bytes: of all temporaries.
      scratch: bytes of these that the instruction needs besides its operands and results.
      live: the bytes of each temporary: of the program, then of the body of each loop around the
          instruction. They are right until the next moment is asked for.
    """

    instruction: Instruction
    bytes: float
    scratch: float
    live: tuple[Mapping[Register, float], ...]

    def registers(self) -> tuple[Register, ...]:
        """The temporaries that take bytes, in program order."""
        return tuple(r for sizes in self.live for r, b in sizes.items() if b)


class DeviceMemory:
    """What a plan has in one of a device's two memories.

    Arguments:
      typing: the types, for shapes and the mesh.
      in_host: whether the memory is the host's.
    """

    def __init__(self, typing: Typing, *, in_host: bool) -> None:
        self.typing, self.in_host = typing, in_host
        self.avals, self.sizes = typing.graph.avals, typing.mesh.sizes
        self.on_tpu = typing.mesh.hardware.platform == "tpu" and not in_host

    def fullest(self, block: Block) -> tuple[float, tuple[Register, ...]]:
        """Bytes of the program at its fullest moment, and the temporaries that are live then."""
        peak, live = 0.0, tuple[Register, ...]()
        for moment in self.moments(block):
            if moment.bytes > peak:
                peak, live = moment.bytes, moment.registers()
        held = self.arguments(block) + self.results(block)
        return held + peak + self.gaps(peak), live

    def arguments(self, block: Block) -> float:
        """Bytes of the arguments of the program."""
        return sum(map(self.size, block.inputs))

    def results(self, block: Block) -> float:
        """Bytes of the results that take no buffers of donated arguments."""
        outputs = sum(self.size(s) for s in block.outputs if isinstance(s, Register))
        donated = sum(self.size(block.inputs[i]) for i in reused(self.typing, block))
        return max(0.0, outputs - donated)

    def gaps(self, temporaries: float) -> float:
        """Bytes between temporaries."""
        return 0.0 if self.in_host else GAPS * temporaries

    def elements(self, register: Register) -> int:
        """Elements of a register on one device, in any memory."""
        return math.prod(local_shape(self.avals[register.value].shape, register.codes, self.sizes))

    def size(self, register: Register, *, copied: bool = False) -> float:
        """Bytes of a register in this memory: 0 for one in the other memory. `copied` asks for the
        bytes in device memory of a register in host memory, while it is converted."""
        aval = self.avals[register.value]
        in_host = _jax.in_host(aval)
        if not ((in_host and not copied) if self.in_host else in_host == copied):
            return 0.0
        return self.elements(register) * _jax.itemsize(aval.dtype)

    def scratch(self, instruction: Instruction) -> float:
        """Bytes that an instruction needs besides its operands, its results and its body."""
        match instruction:
            case Loop():
                return 0.0
            case Apply():
                return instruction.scratch_bytes + self.copies(instruction)
            case Box(source=source, target=target):
                return self.size(source, copied=True) + self.size(target, copied=True)

    def copies(self, instruction: Apply) -> float:
        """Bytes of the copies on which XLA sorts or transforms whole lines, or adds up lines."""
        traits = traits_of(instruction.node.op)
        if traits.scatters and self.on_tpu:
            return self.lines(instruction)
        if not (traits.whole or (traits.orderless and traits.moves)):
            return 0.0
        sources = [s for s in instruction.ins if isinstance(s, Register)]
        return sum(map(self.size, (*sources, *instruction.outs)))

    def lines(self, instruction: Apply) -> float:
        """Bytes that a TPU needs to add lines to the places that indices give, besides the lines.

        It has them in whole tiles, and where their tiles are no rows of a matrix, in one as well
        (`python -m benchmarks.steps recommender`: lines of 64 elements in groups of 26).
        """
        *_, updates = instruction.ins
        numbers = instruction.node.params["dimension_numbers"]
        if not isinstance(updates, Register) or is_one_hot(instruction, self.avals):
            return 0.0
        shape = local_shape(self.avals[updates.value].shape, updates.codes, self.sizes)
        if len(shape) < 2 or len(shape) - 1 not in numbers.update_window_dims or 0 in shape:
            return 0.0
        taken = tiled(shape)
        if len(shape) > 2 and shape[-2] % TILE[0]:
            taken += tiled((math.prod(shape[:-1]), shape[-1]))
        itemsize = _jax.itemsize(self.avals[updates.value].dtype)
        return (taken - math.prod(shape)) * itemsize

    def moments(self, block: Block, *, top: bool = True) -> Iterator[Moment]:
        """What a block has in memory as each of its instructions runs, those of loops included.

        Arguments:
          block: the block.
          top: whether the block is the program, whose results are counted beside the moments.
        """
        kept = {s for s in block.outputs if isinstance(s, Register)}
        found = stored(block, self.avals, self.elements)
        ends: dict[int, list[Register]] = defaultdict(list)
        for register, at in found.last.items():
            if register not in kept:
                ends[at].append(register)
        live = 0.0
        sizes: dict[Register, float] = {}
        for at, instruction in enumerate(block.instructions):
            ending = [s for s in ends[at] if s in sizes]
            for register in found.early.get(at, ()):
                sizes[register] = self.size(register)
                live += sizes[register]
            for n, register in enumerate(instruction.outs):
                is_read = register in found.last or register in kept
                if register not in found.registers or register in sizes or not is_read:
                    continue
                bytes_ = 0.0 if top and register in kept else self.size(register)
                for source in self.in_place(instruction, n, ending):
                    if source in ending and sizes[source] == bytes_:
                        ending.remove(source)
                        live -= sizes.pop(source)
                        break
                sizes[register] = bytes_
                live += bytes_
            scratch = self.scratch(instruction)
            yield Moment(
                instruction=instruction, bytes=live + scratch, scratch=scratch, live=(sizes,)
            )
            for inner in instruction.blocks if isinstance(instruction, Loop) else ():
                for one in self.moments(inner, top=False):
                    yield replace(one, bytes=live + one.bytes, live=(sizes, *one.live))
            for source in ending:
                live -= sizes.pop(source)

    def in_place(
        self, instruction: Instruction, position: int, ending: list[Register]
    ) -> list[Source]:
        """The operands whose buffers a result may take, if nothing needs them any more.

        Arguments:
          instruction: the instruction.
          position: of the result.
          ending: what nothing needs after the instruction.
        """
        if isinstance(instruction, Loop):
            entries = interface_of(instruction.node).entries
            carried = [e for e in entries if e.kind == "carry" and e.result == position]
            return [instruction.ins[e.operand] for e in carried]
        if isinstance(instruction, Apply) and traits_of(instruction.node.op).scatters:
            return list(instruction.ins[:1])
        return list(ending) if fuses(instruction, self.avals) else []
