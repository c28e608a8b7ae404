"""Casts of tables of which few rows are read: the rows are cast instead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sbp.infer.space import local_shape
from sbp.plan.ir import Apply, Block, Box, Loop, Register
from sbp.signatures.casts import looks_up, rounds
from sbp.trace.graph import Graph


def late_casts(graph: Graph, block: Block, sizes: Sequence[int]) -> frozenset[Register]:
    """The results of casts that nothing but lookups of fewer elements reads, in the type of the
    cast.

    Arguments:
      graph: the program, for shapes and dtypes.
      block: a block of it.
      sizes: of the mesh axes.
    """
    cast = {
        i.outs[0]
        for i in block.instructions
        if isinstance(i, Apply) and rounds(graph, i.node) and isinstance(i.ins[0], Register)
    }
    return frozenset(cast.difference(_read_otherwise(graph, block, sizes))) if cast else frozenset()


def _read_otherwise(graph: Graph, block: Block, sizes: Sequence[int]) -> Iterator[Register]:
    """The registers that something else reads."""

    def elements(register: Register) -> int:
        return math.prod(local_shape(graph.avals[register.value].shape, register.codes, sizes))

    yield from (s for s in block.outputs if isinstance(s, Register))
    for instruction in block.instructions:
        match instruction:
            case Box():
                yield instruction.source
            case Apply() | Loop():
                for position, source in enumerate(instruction.ins):
                    if isinstance(source, Register) and not (
                        isinstance(instruction, Apply)
                        and looks_up(instruction.node, position)
                        and elements(instruction.outs[0]) <= elements(source)
                    ):
                        yield source
