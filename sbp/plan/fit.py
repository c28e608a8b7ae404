"""Request -> Program: the cheapest plan that fits the memory limit.

Conversions of the forward pass that the backward pass repeats run once where that is worth its
memory (`reuse.py`). Under a memory limit, types are chosen with a price on each byte that values
take on a device. The price rises until a plan fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Protocol

from sbp import _jax
from sbp.infer.certificate import Certificate
from sbp.infer.choose import choose
from sbp.infer.request import Request
from sbp.infer.space import local_shape
from sbp.infer.typing import Typing
from sbp.plan.ir import Block, Loop, Register
from sbp.plan.priced import Priced
from sbp.plan.program import Program, resolve
from sbp.plan.reuse import WORTH, room_of, without_repeats
from sbp.plan.verify import over_budget
from sbp.trace.collector import collecting_less
from sbp.trace.numbering import twins
from sbp.trace.regions import LOOPS

# ---- less memory for more time ------------------------------------------------------------------
# Less memory for more time, where the user gives no memory limit.
#
# The fastest plan of a loop over microbatches gathers split weights once, before the loop, and
# holds them whole, with a whole gradient for each. Who splits weights does so to hold less. A plan
# that gathers them in every turn is taken where it is worth the time: 1 % less memory may take
# `reuse.WORTH` % more.


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


# ---- the cheapest plan that fits ----------------------------------------------------------------


PRICES = tuple(10.0**n for n in range(-14, -6))
"""Prices of memory, in seconds per byte on one device, tried in turn. At 1e-11 a gigabyte costs
10 ms; at 1e-7 it costs more than the rest of any plan."""

LARGE, AXIS_FACTOR = 6000, 8
"""Nodes of a program up to which the reuse of forward conversions counts when types are chosen on
one mesh axis, and the factor by which each further axis lowers that number."""

HALVINGS = 3
"""Prices of memory that are tried between the last price whose plan does not fit and the first
whose plan fits. `Program.memory_prices` counts all prices, for the report."""


@collecting_less()
def fit(request: Request) -> tuple[Program | None, Program | None]:
    """The cheapest program that fits.

    Returns:
      The program, or None where none fits; and the program of least memory that was found, or None
      where there is no typing at all.
    """
    if request.budgets:
        # A reader for which a collective is forbidden may use the result of the same collective
        # for another reader. So the cheapest plan without budgets is tried first.
        program, _ = fit(dataclasses.replace(request, budgets=()))
        if program is not None and next(over_budget(program.block, request), None) is None:
            typing = dataclasses.replace(program.typing, request=request)
            program = dataclasses.replace(program, typing=typing)
            return program, program
    program = cheapest(functools.partial(choose, request), request)
    if program is None:
        return None, None
    if request.memory_limit is None:
        program = thrifty(program)
        return program, program
    if program.cost.peak_memory_bytes <= request.memory_limit:
        return program, program
    return _within_memory(program, request.memory_limit)


def best_program(request: Request) -> Program | None:
    """The cheapest program that fits, or None."""
    return fit(request)[0]


def _within_memory(program: Program, limit: float) -> tuple[Program | None, Program]:
    """A cheap program that fits a memory limit, and the program of least memory that was found.

    Arguments:
      program: the cheapest program, which does not fit.
      limit: bytes on one device.

    Returns:
      As `fit`.
    """
    priced, least = Priced(program), program
    too_low = PRICES[0] / 10
    for price in PRICES:
        priced.watch(program)
        found = priced.at(price)
        if found is None:
            break
        program = found
        if program.cost.peak_memory_bytes < least.cost.peak_memory_bytes:
            least = program
        if program.cost.peak_memory_bytes <= limit:
            best, enough = program, price
            for _ in range(HALVINGS):
                middle = math.sqrt(too_low * enough)
                found = priced.at(middle)
                if found is not None and found.cost.peak_memory_bytes <= limit:
                    enough = middle
                    best = min(best, found, key=lambda p: p.cost.seconds)
                else:
                    too_low = middle
            best = dataclasses.replace(best, memory_prices=priced.tried)
            return best, best
        too_low = price
    return None, least


class Choosing(Protocol):
    """Chooses types with the `shares` of `sbp.infer.choose.choose`; everything else is the
    chooser's own."""

    def __call__(self, *, shares: Mapping[int, float]) -> Typing | None: ...


def cheapest(choosing: Choosing, request: Request) -> Program | None:
    """The cheapest program, with one run of conversions that the backward pass repeats.

    A rematerialised block repeats conversions of the forward pass; the plan can reuse their
    results. Whether it can depends on three types (value, first use, second use), but the cost
    graph has pairwise costs. So the chooser runs three times: with repeated conversions priced at 0
    (its bound holds for every plan), at 1/k for k copies, and in full. Of the three plans the
    cheapest is taken, with `reuse.room_of` saying what memory costs.

    Arguments:
      choosing: chooses the types.
      request: the program, with everything that its types are chosen by.
    """
    certificate = Certificate(request)

    def chosen(shares: Mapping[int, float]) -> Program | None:
        typing = choosing(shares=shares)
        if typing is None:
            return None
        certificate.certify(typing)
        return resolve(typing)

    def finished(*programs: Program | None) -> Program | None:
        """The best of some plans, with the reuses that they have room for."""
        known = [p for p in programs if p is not None]
        if not known:
            return None
        room = room_of(known)
        made = [without_repeats(p, room) for p in known]
        best, fastest = (
            min(made, key=key) for key in (room.order, lambda p: (not _fits(p), p.cost.seconds))
        )
        slower = best.cost.seconds > fastest.cost.seconds
        return dataclasses.replace(best, faster=fastest.cost) if slower else best

    found = twins(request.graph)
    if not found.again:
        return finished(chosen({}))
    if not request.reuse or request.size * AXIS_FACTOR ** (len(request.mesh.sizes) - 1) > LARGE:
        program = finished(chosen({}))
        return program and dataclasses.replace(
            program, typing=dataclasses.replace(program.typing, bounds_reuse=False)
        )
    bounding = chosen(dict.fromkeys(found.again, 0.0))
    best = finished(bounding)
    if bounding is None or best is None or (best.typing.optimal and _fits(best)):
        return best
    others = chosen({v: 1 / n for v, n in found.times.items()}), chosen({})
    best = finished(bounding, *others)
    return best and dataclasses.replace(
        best, typing=dataclasses.replace(best.typing, lower_bound=bounding.typing.lower_bound)
    )


def _fits(program: Program) -> bool:
    """Whether a plan fits the memory limit."""
    limit = program.request.memory_limit
    return limit is None or program.cost.peak_memory_bytes <= limit
