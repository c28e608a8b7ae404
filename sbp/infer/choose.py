"""Graph -> Typing: the cheapest types on the hardware of the mesh, all mesh axes at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from sbp.infer.problem import Demand, Problem
from sbp.infer.regime import regime_of
from sbp.infer.rows import Tables
from sbp.infer.space import Spaces
from sbp.infer.typing import Typing
from sbp.limits import Policy
from sbp.machine.mesh import MeshSpec
from sbp.trace.graph import Graph

NOTHING: Mapping[int, float] = MappingProxyType({})


def choose(
    graph: Graph,
    mesh: MeshSpec,
    demand: Demand,
    *,
    boxing: Policy = "auto",
    byte_price: float = 0.0,
    held: frozenset[tuple[int, bool]] = frozenset(),
    shares: Mapping[int, float] = NOTHING,
    tables: Tables | None = None,
    cutoff: float = math.inf,
) -> Typing | None:
    """The cheapest typing of a program.

    Arguments:
      graph: the program.
      mesh: the mesh and its hardware.
      demand: types asked of inputs and outputs.
      boxing: which conversions may move data.
      byte_price: seconds charged per byte that inputs, outputs and `held` hold on a device.
      held: values that are charged, too: (value, whether as its readers take it instead of as it is
          made).
      shares: for values that are made more than once, what share of a conversion each pays beyond
          the keeping of its result.
      tables: the rows of the mesh, when they are at hand.
      cutoff: seconds above which typings are of no interest: any of them may be returned when a
          bound shows that there are no others.

    Returns:
      The typing, or None when there is none under the policy.
    """
    table = (tables or Tables(mesh)).of(regime_of(graph, mesh, boxing, demand), graph)
    problem = Problem(graph, mesh, demand, boxing, Spaces(mesh), table, byte_price, held, shares)
    problem.build()
    return problem.solve(cutoff)
