"""Graph -> Program: the cheapest plan, what gradients keep counted once; under a memory limit held
bytes get dearer until it fits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Protocol

from sbp.infer.check import certify
from sbp.infer.choose import choose
from sbp.infer.problem import Demand
from sbp.infer.regime import regime_of
from sbp.infer.rows import Tables
from sbp.infer.typing import Typing
from sbp.limits import Policy
from sbp.machine.mesh import MeshSpec
from sbp.plan.program import Program, resolve
from sbp.plan.saving import repeats, save
from sbp.plan.verify import over_budget
from sbp.trace.collector import collecting_less
from sbp.trace.graph import Graph
from sbp.trace.numbering import twins

PRICES = tuple(10.0**n for n in range(-14, -6))
"""Seconds per byte held, tried in turn. At 1e-11 a gigabyte weighs 10 ms; at 1e-7 nothing else
counts."""

LARGE, AXIS_FACTOR = 6000, 8
"""Nodes of a program on one mesh axis up to which types are chosen with what gradients keep, and by
how much another axis counts."""

HALVINGS = 3
"""Prices that are tried between the last one that was too low and the first that was high
enough."""


@collecting_less()
def fit(
    graph: Graph,
    mesh: MeshSpec,
    demand: Demand,
    *,
    boxing: Policy = "auto",
    memory_limit: float | None = None,
    aliased: tuple[int, ...] = (),
    keeping: bool = True,
    tables: Tables | None = None,
) -> tuple[Program | None, Program | None]:
    """The cheapest program that fits.

    Arguments:
      graph: the program.
      mesh: the mesh and its hardware.
      demand: types asked of inputs and outputs.
      boxing: which conversions may move data.
      memory_limit: bytes per device; None for no limit.
      aliased: positions of donated inputs.
      keeping: whether types are chosen with what gradients keep from the forward pass in mind,
          which takes up to three times as long.
      tables: the rows of the mesh, when they are at hand.

    Returns:
      The program or None, and the program of least memory that was found (None when there is no
      typing at all).
    """
    tables = tables or Tables(mesh)
    if demand.budgets:
        # What is sent for one reader may serve another, for which it might not have been sent: so
        # first without, and a look at the plan.
        unlimited = dataclasses.replace(demand, budgets=())
        program, _ = fit(
            graph,
            mesh,
            unlimited,
            boxing=boxing,
            memory_limit=memory_limit,
            aliased=aliased,
            keeping=keeping,
            tables=tables,
        )
        regime = regime_of(graph, mesh, boxing, demand)
        if program is not None and next(over_budget(program.block, regime), None) is None:
            return program, program
    choosing = functools.partial(choose, graph, mesh, demand, boxing=boxing, tables=tables)
    program = least = cheapest(
        choosing, graph, demand, tables, memory_limit=memory_limit, aliased=aliased, keeping=keeping
    )
    if program is None or least is None:
        return None, None
    if memory_limit is None or program.cost.peak_memory_bytes <= memory_limit:
        return program, program
    held: set[tuple[int, bool]] = set()
    again = bool(twins(graph).again)

    def at(price: float) -> Program | None:
        typing = choose(
            graph,
            mesh,
            demand,
            boxing=boxing,
            byte_price=price,
            held=frozenset(held),
            tables=tables,
        )
        if typing is None:
            return None
        typing = dataclasses.replace(typing, keeps=not again)
        certify(typing, demand, tables=tables)
        return without_repeats(
            resolve(typing, demand, aliased=aliased), demand, tables, memory_limit
        )

    too_low = PRICES[0] / 10
    for price in PRICES:
        # What fills the memory is charged, too; cut points found at one price stay charged at the
        # next.
        held |= {
            (r.value, r.codes != program.typing.values.get(r.value))
            for r in program.fullest
            if r.value in graph.avals
        }
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


class Choosing(Protocol):
    """What chooses types for the shares of `sbp.infer.choose.choose`, under any conditions of its
    own."""

    def __call__(self, *, shares: Mapping[int, float]) -> Typing | None: ...


def cheapest(
    choosing: Choosing,
    graph: Graph,
    demand: Demand,
    tables: Tables,
    *,
    memory_limit: float | None,
    aliased: tuple[int, ...],
    keeping: bool = True,
) -> Program | None:
    """The cheapest program, what gradients keep from the forward pass counted once.

    Whether a conversion has been made before is a matter of three types, and costs are of two. So
    types are chosen in three ways: as though all that gradients make again had been kept, which
    bounds every plan; with a share of each such conversion charged where it is made first, and a
    share where it is made again; and as though nothing were kept. What is best as a plan is taken.
    """

    def chosen(shares: Mapping[int, float]) -> Program | None:
        typing = choosing(shares=shares)
        if typing is None:
            return None
        certify(typing, demand, tables=tables)
        return without_repeats(
            resolve(typing, demand, aliased=aliased), demand, tables, memory_limit
        )

    def order(program: Program) -> tuple[bool, float]:
        return (
            memory_limit is not None and program.cost.peak_memory_bytes > memory_limit,
            program.cost.seconds,
        )

    found = twins(graph)
    if not found.again:
        return chosen({})
    if (
        not keeping
        or sum(1 for _ in graph.walk()) * AXIS_FACTOR ** (len(tables.mesh.sizes) - 1) > LARGE
    ):
        program = chosen({})
        return program and dataclasses.replace(
            program, typing=dataclasses.replace(program.typing, keeps=False)
        )
    bounding = chosen(dict.fromkeys(found.again, 0.0))
    if bounding is None or (bounding.typing.optimal and not order(bounding)[0]):
        return bounding
    others = chosen({v: 1 / n for v, n in found.times.items()}), chosen({})
    best = min((bounding, *(p for p in others if p is not None)), key=order)
    return dataclasses.replace(
        best, typing=dataclasses.replace(best.typing, lower_bound=bounding.typing.lower_bound)
    )


def without_repeats(
    program: Program, demand: Demand, tables: Tables, memory_limit: float | None
) -> Program:
    """The program with conversions that an earlier loop has made kept from there, as many as the
    memory holds."""
    limit = program.mesh.hardware.hbm_bytes if memory_limit is None else memory_limit
    regime = regime_of(program.graph, program.mesh, program.typing.boxing, demand)
    chosen = sorted(
        repeats(program.typing, program.block, regime),
        key=lambda r: (-r.seconds / max(1.0, r.bytes_held), r.value),
    )
    while chosen:
        typing = save(program.typing, tuple(chosen), regime)
        certify(typing, demand, tables=tables)
        saved = resolve(typing, demand, aliased=program.aliased)
        if (
            saved.cost.peak_memory_bytes <= limit
            and saved.cost.bytes_per_device < program.cost.bytes_per_device
        ):
            return saved
        chosen = chosen[: len(chosen) // 2]
    return program
