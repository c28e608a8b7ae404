"""Which exchanged values meet arguments of the program, element by element."""

from __future__ import annotations

from sbp.plan.ir import Apply, Block, Box, Register
from sbp.signatures import traits_of
from sbp.trace.graph import Graph


def meets_arguments(graph: Graph, block: Block) -> frozenset[Register]:
    """The results of collectives that elementwise operations combine with two or more arguments, or
    with one where the program returns them.

    An argument is laid out row by row if its last two dims fill tiles (`lanes.fills_tiles`). The
    TPU compiler lays the result of a collective out as what it comes from, a gradient of a matrix
    often column by column, and copies every array that meets it into that layout: a weight and its
    moments, from the start of the program to its end. Where it meets one argument only, as with
    SGD, laying the result out by rows takes as long.

    Arguments:
      graph: the program.
      block: the program, written out.
    """
    # What each result of a collective meets: arguments, and itself where it is returned.
    met: dict[Register, set[Register]] = {}
    returned = set(block.outputs)
    arguments: dict[Register, frozenset[Register]] = {r: frozenset([r]) for r in block.inputs}
    received: dict[Register, frozenset[Register]] = {}
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            source, target = instruction.source, instruction.target
            if instruction.bytes_sent:
                received[target], met[target] = frozenset([target]), {target} & returned
            elif source in arguments:
                arguments[target] = arguments[source]
        elif isinstance(instruction, Apply) and traits_of(instruction.node.op).elementwise:
            shape = graph.avals[instruction.outs[0].value].shape
            ins = [
                s
                for s in instruction.ins
                if isinstance(s, Register) and graph.avals[s.value].shape == shape
            ]
            own = frozenset[Register]().union(*(arguments.get(s, ()) for s in ins))
            others = frozenset[Register]().union(*(received.get(s, ()) for s in ins))
            for result in others:
                met[result] |= own
            arguments |= dict.fromkeys(instruction.outs, own) if own else {}
            received |= dict.fromkeys(instruction.outs, others) if others else {}
    return frozenset(result for result, those in met.items() if len(those) > 1)
