"""The typing: the chosen type of every value and the chosen row of every node."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

from sbp.errors import SbpInternalError
from sbp.infer.accumulation import Sums
from sbp.infer.flow import Decision
from sbp.infer.request import Request
from sbp.infer.rows import Choice, NdRow
from sbp.infer.space import Codes, to_type
from sbp.machine.mesh import MeshSpec
from sbp.trace.graph import Graph
from sbp.types import NdSbp

OPTIMAL_GAP = 1e-6
"""Gap, as a share of the cost, up to which a typing counts as proved cheapest. Rounding and
`problem.DEFERRAL` may leave a gap of that size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Typing:
    """A program with types.

    Arguments:
      request: the program as it was traced, with its mesh, demand, policies and limits.
      graph: the program that has these types: the graph of the request, or the graph that
        `plan.saving` made from it.
      values: the type in which each value is made, in codes.
      rows: for each node id, the types in which it takes its operands and gives its results, nodes
          with regions included.
      region_outputs: for (node id, region), the types in which the region returns its results.
      outputs: the types in which the program returns its results.
      sums: the values with a `reduce_dtype`, and that dtype.
      seconds: the modelled seconds of the program.
      lower_bound: seconds. No typing takes fewer in the model.
      saved_seconds: the modelled seconds of the conversions that `plan.saving` removed; `seconds`
        includes them.
      bounds_reuse: whether `lower_bound` bounds `seconds - saved_seconds`; otherwise it bounds
        `seconds`.
    """

    request: Request
    graph: Graph
    values: dict[int, Codes] = field(repr=False)
    rows: dict[int, NdRow] = field(repr=False)
    region_outputs: dict[tuple[int, int], tuple[Codes, ...]] = field(repr=False)
    outputs: tuple[Codes, ...]
    seconds: float
    lower_bound: float
    saved_seconds: float = 0.0
    bounds_reuse: bool = True
    sums: Sums = field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> MeshSpec:
        """The mesh."""
        return self.request.mesh

    @functools.cached_property
    def graph_request(self) -> Request:
        """The request with `graph` as its program, for the rules and rows of its nodes."""
        if self.graph is self.request.graph:
            return self.request
        return dataclasses.replace(self.request, graph=self.graph, given_sums=self.sums)

    def choice(self, decision: Decision) -> Choice:
        """The row or type of a decision."""
        kind, key = decision.place
        return self.rows[key] if kind == "row" else self.decided(decision)

    def decided(self, decision: Decision) -> Codes:
        """The type of a decision on a value.

        Raises:
          SbpInternalError: for a decision on a row; rows are in `rows`.
        """
        kind, key = decision.place
        match kind:
            case "value":
                return self.values[key]
            case "read":
                node_id, operand = key
                return self.rows[node_id].ins[operand]
            case "returned":
                node_id, region, output = key
                return self.region_outputs[node_id, region][output]
            case "output":
                return self.outputs[key]
            case "row":
                raise SbpInternalError("a row is more than one type")

    def type_of(self, value: int) -> NdSbp:
        """The ND type of a value."""
        return to_type(self.values[value], self.mesh)

    @property
    def gap(self) -> float:
        """The distance of the typing from the lower bound, as a share of its cost; 0 is optimal in
        the model."""
        seconds = self.seconds - self.saved_seconds if self.bounds_reuse else self.seconds
        return max(0.0, (seconds - self.lower_bound) / seconds) if seconds > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the bound proves that no typing is cheaper in the model."""
        return self.gap <= OPTIMAL_GAP
