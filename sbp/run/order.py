"""Which reductions come before a loop."""

from __future__ import annotations

import numpy as np
from jax import numpy as jnp

from sbp import _jax
from sbp.plan.ir import Block, Box, Loop, Register
from sbp.trace.graph import Graph


def reduced_before(graph: Graph, block: Block) -> dict[int, tuple[Register, ...]]:
    """For each loop, by the id of its node: the scattered sums that are made before it and that it
    does not read, and an array that it reads. A barrier over them puts the sums before the loop.

    A sum that is not reduced yet is as large as the whole value; scattered, it is one shard. The
    plan reduces it where it is made. The TPU compiler would scatter it where the shard is read, and
    the whole value would lie in memory while the loop runs (`tests/tpu/test_reduced_early.py`).

    Arguments:
      graph: the program.
      block: the instructions of the program, or of a region.
    """
    found: dict[int, tuple[Register, ...]] = {}
    scattered: list[Register] = []
    for instruction in block.instructions:
        if isinstance(instruction, Box):
            if any(step.kind == "reduce_scatter" for step in instruction.steps):
                scattered.append(instruction.target)
        elif isinstance(instruction, Loop):
            sums = [r for r in scattered if r not in instruction.ins]
            read = [s for s in instruction.ins if isinstance(s, Register) and _is_tied(graph, s)]
            if sums and read:
                found[instruction.node.id] = (*sums, *read[:1])
            scattered = []
    return found


def _is_tied(graph: Graph, operand: Register) -> bool:
    """Whether a barrier may hold an operand of a loop: floats in device memory. Of a counter, XLA
    would no longer see that it starts at a constant."""
    aval = graph.avals[operand.value]
    return (
        not _jax.is_extended(aval.dtype)
        and not _jax.in_host(aval)
        and bool(jnp.issubdtype(aval.dtype, np.floating))
        and 0 not in aval.shape
    )
