"""Graph -> Program under a memory limit: raise the price of held bytes until the lowered plan's liveness fits."""

from __future__ import annotations

from sbp.infer.check import certify
from sbp.infer.choose import choose
from sbp.infer.problem import Demand
from sbp.limits import Policy
from sbp.mesh import MeshSpec
from sbp.plan.program import Program, resolve
from sbp.trace.graph import Graph

PRICES = (1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7)
"""Seconds per byte held, tried in turn. At 1e-11 a gigabyte weighs 10 ms; at 1e-7 nothing else counts."""


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
    typing = choose(graph, mesh, demand, boxing=boxing)
    if typing is None:
        return None, None
    certify(typing, demand)
    program = least = resolve(typing, demand, aliased=aliased)
    if memory_limit is None or program.cost.peak_memory_bytes <= memory_limit:
        return program, program
    for price in PRICES:
        typing = choose(graph, mesh, demand, boxing=boxing, byte_price=price)
        if typing is None:
            break
        certify(typing, demand)
        program = resolve(typing, demand, aliased=aliased)
        if program.cost.peak_memory_bytes <= memory_limit:
            return program, program
        if program.cost.peak_memory_bytes < least.cost.peak_memory_bytes:
            least = program
    return None, least
