"""What one loop stacks for a later one: in the matrices that fill tiles of a TPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.machine.lanes import fills_tiles
from sbp.machine.scatters import TILE
from sbp.plan.ir import Block, Loop, Register
from sbp.trace.regions import interface_of


class Stacks:
    """The stacks of a program that are held as stacks of matrices.

    The TPU compiler lays out an array whose dim before the last is short in tiles of few rows, of
    which padding takes a part: half of each tile for the tokens of two slots in bfloat16. A matrix
    with the same rows, one below the other, has no padding.

    Arguments:
      block: the program, written out.
      kept: the values that are stacked for a later loop and that the user's program has not.
    """

    def __init__(self, block: Block, kept: frozenset[int]) -> None:
        made: set[Register] = set()
        others = {s for s in block.outputs if isinstance(s, Register)}
        for instruction in block.instructions:
            sliced: set[int] = set()
            if isinstance(instruction, Loop):
                interface = interface_of(instruction.node)
                sliced = {e.operand for e in interface.entering("slice")}
                stacked = {e.result for e in interface.exits if e.kind == "stacked"}
                outs = enumerate(instruction.outs)
                made |= {r for n, r in outs if n in stacked and r.value in kept}
            ins = enumerate(instruction.ins)
            others |= {s for n, s in ins if isinstance(s, Register) and n not in sliced}
        self.registers = frozenset(made - others)

    def inputs(self, loop: Loop, values: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
        """The inputs of a scan's body, each in its own shape.

        Arguments:
          loop: the scan.
          values: the inputs, with slices of the stacks as they are held.
          shapes: of the inputs.
        """
        narrow = {
            position
            for entry in interface_of(loop.node).entering("slice")
            if loop.ins[entry.operand] in self.registers
            for _, position in entry.inputs
        }
        return [
            x.reshape(shapes[position]) if position in narrow else x
            for position, x in enumerate(values)
        ]

    def outputs(self, loop: Loop, values: Sequence[Any]) -> list[Any]:
        """The outputs of a scan's body, with those that are stacked as they are held."""
        narrow = {
            e.output
            for e in interface_of(loop.node).leaving(0)
            if e.kind == "stacked" and loop.outs[e.result] in self.registers
        }
        return [_matrix(x) if n in narrow else x for n, x in enumerate(values)]


def _matrix(x: Any) -> Any:
    """An array with all dims before the last as one, where those fill tiles and the last two of
    them would not."""
    matrix = (x.size // x.shape[-1], x.shape[-1]) if x.ndim > 2 and x.size else x.shape
    short = x.ndim > 2 and x.shape[-2] < TILE[0]
    return x.reshape(matrix) if short and fills_tiles(matrix) else x
