"""The instructions of a plan: local operations, conversions and regions. Every collective is an
instruction or a part of one."""

from __future__ import annotations

from dataclasses import dataclass

from sbp.errors import Span
from sbp.infer.rows import NdRow
from sbp.infer.space import Codes, Step
from sbp.signatures import Sent, kernel_named
from sbp.trace.graph import Constant, Node


@dataclass(frozen=True, slots=True)
class Register:
    """A value in one type: what a device holds of it."""

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
    """An operation: the node's kernel on the shards.

    Arguments:
      node: the node.
      row: its signature.
      ins: operands in the types that the row takes.
      outs: results.
      sends: what the row's kernels send themselves, with the position of the mesh axis.
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
        """Memory that kernels hold while they run: what has arrived; of an operand that goes round,
        two shards."""
        rings = [s for p, s in self.sends if kernel_named(self.row.kernels[p]).gathers is not None]
        around = max(rings, key=lambda s: s.bytes / s.rounds, default=None)
        return sum(2 * s.bytes / s.rounds if s is around else s.bytes for _, s in self.sends)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A conversion of one value to another type.

    Arguments:
      source: the value as it is.
      target: the value as it is wanted.
      steps: the collectives and local steps, cheapest sequence.
      reader: the node that needs it so, and forces it here; None at the program's end or a region's
          end.
      maker: the node that made the value; None for an argument.
    """

    source: Register
    target: Register
    steps: tuple[Step, ...]
    reader: Node | None
    maker: Node | None

    @property
    def bytes_sent(self) -> float:
        """Bytes one device sends each time the box runs."""
        return sum(s.bytes_sent for s in self.steps)

    @property
    def span(self) -> Span | None:
        """The user's line that made the value; of the reader when an argument is boxed."""
        for node in (self.maker, self.reader):
            if node is not None and node.span is not None:
                return node.span
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loop:
    """A region: scan, while or cond over blocks.

    Arguments:
      node: the node.
      ins: operands in the types the blocks take them in.
      outs: results.
      blocks: the bodies, in the order of the node's regions.
      trips: how often a body runs each time the region runs (1 for branches).
    """

    node: Node
    ins: tuple[Source, ...]
    outs: tuple[Register, ...]
    blocks: tuple[Block, ...]
    trips: int


Instruction = Apply | Box | Loop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Instructions in order, from input registers to outputs."""

    inputs: tuple[Register, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Source, ...]
