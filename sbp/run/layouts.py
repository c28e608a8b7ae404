"""Which exchanged values meet arguments of the program, element by element."""

from __future__ import annotations

from sbp.plan.ir import Apply, Block, Box, Register
from sbp.signatures import traits_of


def meets_arguments(block: Block) -> frozenset[Register]:
    """The results of collectives that elementwise operations combine with arguments.

    An argument is laid out row by row. The TPU compiler lays the result of a collective out as what
    it comes from, a gradient of a matrix often column by column, and copies every array that meets
    it into that layout: a weight and its moments, from the start of the program to its end.

    Arguments:
      block: the program.
    """
    arguments = set(block.inputs)
    received: dict[Register, Register] = {}
    found: set[Register] = set()
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            if instruction.bytes_sent:
                received[instruction.target] = instruction.target
            elif instruction.source in arguments:
                arguments.add(instruction.target)
        elif isinstance(instruction, Apply) and traits_of(instruction.node.op).elementwise:
            ins = [s for s in instruction.ins if isinstance(s, Register)]
            made = [received[s] for s in ins if s in received]
            if arguments.intersection(ins):
                arguments.update(instruction.outs)
                found.update(made)
            elif made:
                received.update(dict.fromkeys(instruction.outs, made[0]))
    return frozenset(found)
