"""Less memory for more time, where the user gives no memory limit.

The fastest plan of a loop over microbatches gathers split weights once, before the loop, and holds
them whole, with a whole gradient for each. Who splits weights does so to hold less. A plan that
gathers them in every turn is taken where it is worth the time: 1 % less memory may take
`reuse.WORTH` % more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from sbp import _jax
from sbp.infer.space import local_shape
from sbp.plan.ir import Block, Loop, Register
from sbp.plan.priced import Priced
from sbp.plan.program import Program
from sbp.plan.reuse import WORTH
from sbp.trace.regions import LOOPS

FREED = 0.1
"""Share of the fastest plan's peak that another one has to hold less. Where loops hold less than
that, no other types are looked for."""

NOTED = 0.01
"""Share of the device's memory that the other plan has to hold less, too."""

ROUNDS = 5
"""Prices of memory that are tried. Each plan is fullest at another moment, and the values that are
live then are charged from the next price on."""


def thrifty(program: Program) -> Program:
    """The fastest plan, or one that holds so much less that it is worth the time.

    Arguments:
      program: the fastest plan.
    """
    peak = program.cost.peak_memory_bytes
    enough = max(FREED * peak, NOTED * program.mesh.hardware.hbm_bytes)
    if held_for_loops(program) < enough:
        return program
    priced, tried = Priced(program), [program]
    for _ in range(ROUNDS):
        last = tried[-1].cost
        priced.watch(tried[-1])
        # Values that are live at different moments are charged as if they were live together. So
        # the price is the one at which memory would weigh as much as time.
        found = priced.at(last.seconds / last.peak_memory_bytes)
        if found is None or found.cost == last:
            break
        tried.append(found)
    best = min(tried, key=_weighed)
    if best.cost.peak_memory_bytes > peak - enough:
        return program
    faster = program.faster or program.cost
    return dataclasses.replace(best, memory_prices=priced.tried, faster=faster)


def _weighed(program: Program) -> float:
    """What is least for the better plan: a share of memory weighs `WORTH` times as much as the same
    share of time."""
    return program.cost.seconds * program.cost.peak_memory_bytes**WORTH


def held_for_loops(program: Program) -> float:
    """Bytes on one device by which values around loops are larger, at the fullest moment, than the
    inputs of their shapes: gathered weights, gradients that are not reduced yet. Values around a
    loop are its operands, what it carries, and what it returns.

    Arguments:
      program: a plan.
    """
    graph, sizes = program.request.graph, program.mesh.sizes

    def elements(register: Register) -> int:
        return math.prod(local_shape(graph.avals[register.value].shape, register.codes, sizes))

    split: dict[tuple[int, ...], int] = {}
    for register in program.block.inputs:
        shape, size = graph.avals[register.value].shape, elements(register)
        split[shape] = min(size, split.get(shape, size))
    found = 0.0
    for register in set(_around_loops(program.block)).intersection(program.fullest):
        # What the backward pass reuses is no value of the traced program: `reuse` has judged it.
        aval = graph.avals.get(register.value)
        if aval is not None and aval.shape in split:
            more = elements(register) - split[aval.shape]
            found += max(0, more) * _jax.itemsize(aval.dtype)
    return found


def _around_loops(block: Block) -> Iterator[Register]:
    """The registers that loops take and return, in regions too."""
    for instruction in block.instructions:
        if isinstance(instruction, Loop):
            if instruction.node.op in LOOPS:
                yield from (s for s in instruction.ins if isinstance(s, Register))
                yield from instruction.outs
            for inner in instruction.blocks:
                yield from _around_loops(inner)
