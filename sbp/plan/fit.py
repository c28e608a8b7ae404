"""Request -> Program: the cheapest plan that fits the memory limit.

Conversions of the forward pass that the backward pass repeats are made once where memory allows.
Under a memory limit the bytes that values take on a device are charged at rising prices until a
plan fits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Protocol

from sbp.infer.certificate import certify
from sbp.infer.choose import choose
from sbp.infer.request import Request
from sbp.infer.typing import Typing
from sbp.plan.program import Program, resolve
from sbp.plan.saving import repeats, save
from sbp.plan.verify import over_budget
from sbp.trace.collector import collecting_less
from sbp.trace.numbering import twins

PRICES = tuple(10.0**n for n in range(-14, -6))
"""Seconds charged per byte that values take on a device, tried in turn. At 1e-11 a gigabyte costs
10 ms; at 1e-7 it costs more than the rest of any plan."""

LARGE, AXIS_FACTOR = 6000, 8
"""Nodes of a program on one mesh axis up to which types are chosen with the reuse of forward
conversions in mind, and the factor by which each further axis lowers that number."""

HALVINGS = 3
"""Prices that are tried between the last price whose plan did not fit and the first whose plan
did."""


@collecting_less()
def fit(request: Request) -> tuple[Program | None, Program | None]:
    """The cheapest program that fits.

    Returns:
      The program or None, and the program of least memory that was found (None when there is no
      typing at all).
    """
    if request.budgets:
        # A collective made for one reader may serve another reader for which it would be forbidden.
        # So the cheapest plan without budgets is looked at first.
        program, _ = fit(dataclasses.replace(request, budgets=()))
        if program is not None and next(over_budget(program.block, request), None) is None:
            typing = dataclasses.replace(program.typing, request=request)
            program = dataclasses.replace(program, typing=typing)
            return program, program
    program = cheapest(functools.partial(choose, request), request)
    if program is None:
        return None, None
    if request.memory_limit is None or program.cost.peak_memory_bytes <= request.memory_limit:
        return program, program
    return _within_memory(program, request.memory_limit)


def best_program(request: Request) -> Program | None:
    """The cheapest program that fits, or None."""
    return fit(request)[0]


def _within_memory(program: Program, limit: float) -> tuple[Program | None, Program]:
    """A cheap program that fits a memory limit, from the cheapest program, which does not; and the
    program of least memory that was found."""
    request, least = program.request, program
    live: set[tuple[int, bool]] = set()
    repeated = bool(twins(request.graph).again)

    def at(price: float) -> Program | None:
        typing = choose(request, byte_price=price, live=frozenset(live))
        if typing is None:
            return None
        typing = dataclasses.replace(typing, bounds_reuse=not repeated)
        certify(typing)
        return without_repeats(resolve(typing))

    too_low = PRICES[0] / 10
    for price in PRICES:
        # The values live at the fullest moment are charged, too. Those found at one price stay
        # charged at the next.
        live |= {
            (r.value, r.codes != program.typing.values.get(r.value))
            for r in program.fullest
            if r.value in request.graph.avals
        }
        found = at(price)
        if found is None:
            break
        program = found
        if program.cost.peak_memory_bytes < least.cost.peak_memory_bytes:
            least = program
        if program.cost.peak_memory_bytes <= limit:
            best, enough = program, price
            for _ in range(HALVINGS):
                middle = math.sqrt(too_low * enough)
                found = at(middle)
                if found is not None and found.cost.peak_memory_bytes <= limit:
                    enough = middle
                    best = min(best, found, key=lambda p: p.cost.seconds)
                else:
                    too_low = middle
            return best, best
        too_low = price
    return None, least


class Choosing(Protocol):
    """Chooses types for the `shares` of `sbp.infer.choose.choose`, under any conditions of its
    own."""

    def __call__(self, *, shares: Mapping[int, float]) -> Typing | None: ...


def cheapest(choosing: Choosing, request: Request) -> Program | None:
    """The cheapest program, with conversions that the backward pass repeats made once.

    A rematerialised block repeats conversions of the forward pass; the plan can reuse their
    results. Whether it can depends on three types (value, first use, second use), but the cost
    graph has pairwise costs. So the chooser runs three times: with repeated conversions priced at 0
    (its bound holds for every plan), at 1/k for k copies, and in full. The cheapest of the three
    plans is taken.

    Arguments:
      choosing: chooses the types.
      request: the program, and what its types are chosen by.
    """
    limit = request.memory_limit

    def chosen(shares: Mapping[int, float]) -> Program | None:
        typing = choosing(shares=shares)
        if typing is None:
            return None
        certify(typing)
        return without_repeats(resolve(typing))

    def order(program: Program) -> tuple[bool, float]:
        over = limit is not None and program.cost.peak_memory_bytes > limit
        return over, program.cost.seconds

    found = twins(request.graph)
    if not found.again:
        return chosen({})
    if not request.reuse or request.size * AXIS_FACTOR ** (len(request.mesh.sizes) - 1) > LARGE:
        program = chosen({})
        return program and dataclasses.replace(
            program, typing=dataclasses.replace(program.typing, bounds_reuse=False)
        )
    bounding = chosen(dict.fromkeys(found.again, 0.0))
    if bounding is None or (bounding.typing.optimal and not order(bounding)[0]):
        return bounding
    others = chosen({v: 1 / n for v, n in found.times.items()}), chosen({})
    best = min((bounding, *(p for p in others if p is not None)), key=order)
    return dataclasses.replace(
        best, typing=dataclasses.replace(best.typing, lower_bound=bounding.typing.lower_bound)
    )


def without_repeats(program: Program) -> Program:
    """The program with repeated conversions replaced by the first result, as many as the memory
    allows."""
    limit = program.request.memory_limit
    limit = program.mesh.hardware.hbm_bytes if limit is None else limit
    chosen = sorted(
        repeats(program.typing, program.block),
        key=lambda r: (-r.seconds / max(1.0, r.bytes_kept), r.value),
    )
    while chosen:
        typing = save(program.typing, tuple(chosen))
        certify(typing)
        saved = resolve(typing)
        if (
            saved.cost.peak_memory_bytes <= limit
            and saved.cost.bytes_per_device < program.cost.bytes_per_device
        ):
            return saved
        chosen = chosen[: len(chosen) // 2]
    return program
