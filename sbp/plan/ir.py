"""The instructions of a plan: local operations, conversions and regions.

Every collective is a conversion, or runs inside the kernel of an operation. All instructions read
the registers `ins` and write the registers `outs`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sbp.infer.rows import NdRow
from sbp.infer.space import Codes, Step
from sbp.signatures import Sent, kernel_named
from sbp.trace.graph import Constant, Node


@dataclass(frozen=True, slots=True)
class Register:
    """A value in one type, on a device the part that the type gives it."""

    value: int
    codes: Codes


@dataclass(frozen=True, slots=True, eq=False)
class ConstantRegister:
    """A constant in one type."""

    constant: Constant
    codes: Codes


Source = Register | ConstantRegister


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Apply:
    """An operation: the node's kernels on the shards.

    Arguments:
      node: the node.
      row: the row of its rule that was chosen.
      ins: operands in the types that the row takes.
      outs: results.
      sends: the collectives inside the row's kernels, each with the position of its mesh axis.
    """

    node: Node
    row: NdRow
    ins: tuple[Source, ...]
    outs: tuple[Register, ...]
    sends: tuple[tuple[int, Sent], ...] = ()

    @property
    def bytes_sent(self) -> float:
        """Bytes one device sends each time the operation runs."""
        return sum(sent.bytes for _, sent in self.sends)

    @property
    def scratch_bytes(self) -> float:
        """Bytes that the kernels need while they run, for what other devices send. Of the operand
        with the largest shards among those that travel around a ring, two shards count."""
        rings = [s for p, s in self.sends if kernel_named(self.row.kernels[p]).gathers is not None]
        around = max(rings, key=lambda s: s.bytes / s.rounds, default=None)
        return sum(2 * s.bytes / s.rounds if s is around else s.bytes for _, s in self.sends)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A conversion of one value to another type.

    Arguments:
      source: the value in the type that it has.
      target: the value in the type that its reader takes.
      steps: the cheapest sequence of collectives and local steps.
      reader: the first node that reads `target`; None where the program or a region returns it.
      maker: the node that made the value; None for an argument of the program or of a region.
    """

    source: Register
    target: Register
    steps: tuple[Step, ...]
    reader: Node | None
    maker: Node | None

    @property
    def ins(self) -> tuple[Register, ...]:
        """The register that it reads."""
        return (self.source,)

    @property
    def outs(self) -> tuple[Register, ...]:
        """The register that it writes."""
        return (self.target,)

    @property
    def bytes_sent(self) -> float:
        """Bytes one device sends each time the conversion runs."""
        return sum(s.bytes_sent for s in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loop:
    """A `scan`, `while` or `cond` over blocks.

    Arguments:
      node: the node.
      ins: operands in the types in which the blocks take them.
      outs: results.
      blocks: the bodies, in the order of the node's regions.
      trips: how often each body runs when the node runs once; 1 for branches.
    """

    node: Node
    ins: tuple[Source, ...]
    outs: tuple[Register, ...]
    blocks: "tuple[Block, ...]"
    trips: int


Instruction = Apply | Box | Loop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Instructions in order, from input registers to outputs."""

    inputs: tuple[Register, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Source, ...]


def blocks(block: Block) -> Iterator[Block]:
    """A block and the blocks of its regions, outer ones first."""
    yield block
    for loop in block.instructions:
        for inner in loop.blocks if isinstance(loop, Loop) else ():
            yield from blocks(inner)


def walk(
    block: Block, trips: int = 1, regions: tuple[tuple[Node, int], ...] = ()
) -> Iterator[tuple[Apply | Box, int, tuple[tuple[Node, int], ...], Block]]:
    """All operations and conversions of a block and of its regions, in program order, each with its
    executions per call, the regions around it, outermost first, and its block.

    Arguments:
      block: the instructions.
      trips: executions of the block per call.
      regions: the regions around the block: each node and the number of its body.
    """
    for instruction in block.instructions:
        if isinstance(instruction, Loop):
            for number, inner in enumerate(instruction.blocks):
                yield from walk(
                    inner, trips * instruction.trips, (*regions, (instruction.node, number))
                )
        else:
            yield instruction, trips, regions, block
