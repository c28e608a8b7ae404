"""Graph -> Program under a memory limit: raise the price of held bytes until the lowered plan's liveness fits."""

from __future__ import annotations

import dataclasses
import math

from sbp.infer.check import certify
from sbp.infer.choose import choose
from sbp.infer.problem import Demand
from sbp.infer.regime import regime_of
from sbp.limits import Policy
from sbp.mesh import MeshSpec
from sbp.plan.program import Program, resolve
from sbp.plan.saving import repeats, save
from sbp.plan.verify import over_budget
from sbp.trace.graph import Graph

PRICES = tuple(10.0**n for n in range(-14, -6))
"""Seconds per byte held, tried in turn. At 1e-11 a gigabyte weighs 10 ms; at 1e-7 nothing else counts."""

HALVINGS = 3
"""Prices that are tried between the last one that was too low and the first that was high enough."""


def fit(
    graph: Graph,
    mesh: MeshSpec,
    demand: Demand,
    *,
    boxing: Policy = "auto",
    memory_limit: float | None = None,
    aliased: tuple[int, ...] = (),
) -> tuple[Program | None, Program | None]:
    """The cheapest program that fits.

    Arguments:
      graph: the program.
      mesh: the mesh and its hardware.
      demand: types asked of inputs and outputs.
      boxing: which conversions may move data.
      memory_limit: bytes per device; None for no limit.
      aliased: positions of donated inputs.

    Returns:
      The program or None, and the program of least memory that was found (None when there is no typing at all).
    """
    if demand.budgets:
        # What is sent for one reader may serve another, for which it might not have been sent: so first without, and a look at the plan.
        unlimited = dataclasses.replace(demand, budgets=())
        program, _ = fit(graph, mesh, unlimited, boxing=boxing, memory_limit=memory_limit, aliased=aliased)
        regime = regime_of(graph, mesh, boxing, demand)
        if program is not None and next(over_budget(program.block, regime), None) is None:
            return program, program
    typing = choose(graph, mesh, demand, boxing=boxing)
    if typing is None:
        return None, None
    certify(typing, demand)
    program = least = without_repeats(resolve(typing, demand, aliased=aliased), demand, memory_limit)
    if memory_limit is None or program.cost.peak_memory_bytes <= memory_limit:
        return program, program
    held: set[tuple[int, bool]] = set()

    def at(price: float) -> Program | None:
        typing = choose(graph, mesh, demand, boxing=boxing, byte_price=price, held=frozenset(held))
        if typing is None:
            return None
        certify(typing, demand)
        return without_repeats(resolve(typing, demand, aliased=aliased), demand, memory_limit)

    too_low = PRICES[0] / 10
    for price in PRICES:
        # What fills the memory is charged, too; cut points found at one price stay charged at the next.
        held |= {(r.value, r.codes != program.typing.values.get(r.value)) for r in program.fullest if r.value in graph.avals}
        found = at(price)
        if found is None:
            break
        program = found
        if program.cost.peak_memory_bytes < least.cost.peak_memory_bytes:
            least = program
        if program.cost.peak_memory_bytes <= memory_limit:
            best, enough = program, price
            for _ in range(HALVINGS):
                middle = math.sqrt(too_low * enough)
                found = at(middle)
                if found is not None and found.cost.peak_memory_bytes <= memory_limit:
                    enough = middle
                    best = min(best, found, key=lambda p: p.cost.seconds)
                else:
                    too_low = middle
            return best, best
        too_low = price
    return None, least


def without_repeats(program: Program, demand: Demand, memory_limit: float | None) -> Program:
    """The program with conversions that an earlier loop has made kept from there, as many as the memory holds."""
    limit = program.mesh.hardware.hbm_bytes if memory_limit is None else memory_limit
    regime = regime_of(program.graph, program.mesh, program.typing.boxing, demand)
    chosen = sorted(repeats(program.typing, program.block, regime), key=lambda r: (-r.seconds / max(1.0, r.bytes_held), r.value))
    while chosen:
        typing = save(program.typing, tuple(chosen), regime)
        certify(typing, demand)
        saved = resolve(typing, demand, aliased=program.aliased)
        if saved.cost.peak_memory_bytes <= limit and saved.cost.bytes_per_device < program.cost.bytes_per_device:
            return saved
        chosen = chosen[: len(chosen) // 2]
    return program
