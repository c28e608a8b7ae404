"""Casts of what a loop slices: they stay in the turns of the loop."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from sbp.annotations import annotate_p
from sbp.plan.ir import Apply, Block, Box, Loop, Register, Source
from sbp.signatures import traits_of
from sbp.signatures.casts import rounds
from sbp.trace.graph import Graph, Node
from sbp.trace.regions import interface_of


def kept_casts(graph: Graph, loop: Loop, number: int, received: Set[Source]) -> frozenset[Register]:
    """The results of casts from float32 to bfloat16 of what a body gets as slices, moved but not
    sent.

    The TPU compiler moves such a cast ahead of the loop. There it casts the whole stack: that takes
    about three times as long as its bytes, and the result lies in memory as long as the loop runs.
    In the loop, a product casts a slice as it reads it (`python -m benchmarks.scan_loops`). The
    compiler does not move `lax.reduce_precision`, and a cast of its result gives the same number.

    This is for a loop in no other loop. Where a loop runs once for each microbatch, the cast of its
    weights ahead of all loops serves all of them. And it is not for a stack that comes from a
    collective: the compiler moves the cast ahead of that, too, and half of the bytes are sent.

    Arguments:
      graph: the program, for dtypes.
      loop: a loop.
      number: of the body among its blocks.
      received: the values around the loop that come from a collective.
    """
    sliced = {
        position
        for entry in interface_of(loop.node).entering("slice")
        for region, position in entry.inputs
        if region == number and loop.ins[entry.operand] not in received
    }
    block = loop.blocks[number]
    moved = {r for position, r in enumerate(block.inputs) if position in sliced}
    found: set[Register] = set()
    for instruction in block.instructions if moved else ():
        passed = zip(instruction.ins, instruction.outs, strict=False)
        if isinstance(instruction, Box):
            moved |= {r for s, r in passed if s in moved and not instruction.bytes_sent}
        elif isinstance(instruction, Apply) and not moved.isdisjoint(instruction.ins):
            node = instruction.node
            if _to_bfloat16(graph, node):
                found.update(instruction.outs)
            elif node.is_barrier or _moves(node):
                moved |= {r for s, r in passed if s in moved}
    return frozenset(found)


def received_values(block: Block) -> frozenset[Register]:
    """The values of a block that come from a collective, also where they were moved afterwards."""
    found: set[Register] = set()
    for instruction in block.instructions:
        match instruction:
            case Box(source=source, target=target):
                found |= {target} if instruction.bytes_sent or source in found else set()
            case Apply(node=node) if _moves(node) and not found.isdisjoint(instruction.ins):
                found.update(instruction.outs)
            case _:
                pass
    return frozenset(found)


def _moves(node: Node) -> bool:
    """Whether a node changes no number of its operand."""
    return node.op == annotate_p.name or traits_of(node.op).carries in ("arranged", "copied")


def _to_bfloat16(graph: Graph, node: Node) -> bool:
    """Whether a node casts float32 to bfloat16, which has as many exponents: there are no numbers
    that one of the two operations makes zero and the other does not."""
    return (
        rounds(graph, node)
        and graph.aval(node.inputs[0]).dtype == np.float32
        and graph.avals[node.outputs[0]].dtype == jnp.bfloat16
    )


def rounded_to_bfloat16(x: Any) -> Any:
    """The nearest numbers that bfloat16 has, in float32."""
    info = jnp.finfo(jnp.bfloat16)
    return lax.reduce_precision(x, info.nexp, info.nmant)
