"""The typing: the chosen type of every value and the chosen row of every node.

The options of a decision are the rows of a node, or the types of a value that no row makes. The
chooser takes one of them, and the certificate checks that it did.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.errors import SbpInternalError
from sbp.infer.accumulation import Sums
from sbp.infer.cost import allowed_rows
from sbp.infer.flow import Decision, End, Flow, Place
from sbp.infer.pins import pinned_codes
from sbp.infer.request import Request
from sbp.infer.rows import EMPTY, Choice, NdRow
from sbp.infer.space import Codes, TypeSpace, is_even, needs_of, stack, to_type
from sbp.machine.mesh import MeshSpec
from sbp.trace.graph import Graph
from sbp.types import NdSbp

OPTIMAL_GAP = 1e-6
"""Gap, as a share of the cost, up to which a typing counts as proved cheapest, and two plans as
equally cheap. Rounding and `choose.DEFERRAL` may leave a gap of that size."""


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
        kind, key, *_ = decision.place
        return self.rows[key] if kind == "row" else self.codes_at(decision.place)

    def codes_at(self, place: Place) -> Codes:
        """The type that is stored at a place.

        Raises:
          SbpInternalError: for a row, which is more than one type.
        """
        match place:
            case "operand", node_id, operand:
                return self.rows[node_id].ins[operand]
            case "value", value:
                return self.values[value]
            case "result", node_id, region, output:
                return self.region_outputs[node_id, region][output]
            case "output", position:
                return self.outputs[position]
            case _:
                raise SbpInternalError(f"{place} is not one type")

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


# ---- options of a decision -----------------------------------------------------------------------


class Options:
    """The options of a program's decisions.

    Arguments:
      request: the program with its mesh, demand, policies and limits.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.sizes = request, request.mesh.sizes
        # Asked for once: to find them hashes the whole mesh.
        self.spaces, self.native = request.spaces, request.native

    def types(self, decision: Decision) -> tuple[Codes, ...]:
        """The types of a decision on a value."""
        if decision.kind == "predicate":
            return ((0,) * len(self.sizes),)
        wanted = self._pinned_codes(decision)
        return tuple(
            t for t in self._space(decision, wanted).types if self._fits(decision, wanted, t)
        )

    def has(self, decision: Decision, choice: Choice) -> bool:
        """Whether a choice is one of the options of a decision. Rows that the policies or budgets
        forbid are none."""
        if isinstance(choice, NdRow):
            node, request = decision.node, self.request
            assert node is not None
            rules = request.rules(node, in_loop=decision.in_loop)
            return choice in request.rows_of(node) and bool(
                allowed_rows(request.graph, node, (choice,), rules, request.mesh)
            )
        if decision.kind == "predicate":
            return choice in self.types(decision)
        wanted = self._pinned_codes(decision)
        return choice in self._space(decision, wanted).index and self._fits(
            decision, wanted, choice
        )

    def _pinned_codes(self, decision: Decision) -> tuple[int | None, ...]:
        """The code that a pin asks on each mesh axis; None where the axis is free."""
        demand, free = self.request.demand, (None,) * len(self.sizes)
        match decision.kind:
            case "input":
                return demand.inputs[decision.position] or free
            case "output":
                return demand.outputs[decision.position] or free
            case "annotation" if decision.node and (pin := decision.node.params["pin"]):
                return pinned_codes(pin, self.request.mesh)
            case _:
                return free

    def _space(self, decision: Decision, wanted: tuple[int | None, ...]) -> TypeSpace:
        """The types of the value of a decision, with the pinned ones among them."""
        pinned = tuple(c or 0 for c in wanted)
        forced, partial = needs_of(decision.aval.shape, (pinned,), self.sizes)
        boundary = decision.kind in ("input", "output")
        monoids = EMPTY if boundary else decision.monoids(self.native)
        return self.spaces.of(decision.aval, monoids | partial, forced)

    def _fits(self, decision: Decision, wanted: tuple[int | None, ...], codes: Codes) -> bool:
        """Whether a type agrees with the pin of a decision. On a free axis an input or output has
        an even split unless it is held padded, and it is partial only where pinned."""
        node, boundary = decision.node, decision.kind in ("input", "output")
        pin = node.params["pin"] if node and decision.kind == "annotation" else None
        whole = pin.whole if pin else ()
        return all(
            c == want if want is not None else c - 1 not in whole and not (boundary and c < 0)
            for c, want in zip(codes, wanted, strict=True)
        ) and (
            not boundary
            or is_even(decision.aval.shape, codes, self.sizes)
            or (
                self.request.demand.is_padded(decision.kind, decision.position)
                and 0 not in decision.aval.shape
            )
        )


def typing_fields(flow: Flow, choices: Sequence[Choice]) -> dict[str, Any]:
    """The fields of a `Typing` that follow from its decisions.

    Arguments:
      flow: the decisions of the program.
      choices: one for each decision.
    """

    def at(end: End) -> Codes:
        chosen = choices[end.variable]
        if isinstance(chosen, NdRow):
            return chosen.at(end.column)
        return stack(chosen) if end.column else chosen

    values = {value: at(end) for value, end in flow.makers.items()}
    rows = {
        d.node.id: chosen
        for d, chosen in zip(flow.decisions, choices, strict=True)
        if isinstance(chosen, NdRow) and d.node is not None
    }
    reads = flow.reads()
    for node in flow.graph.walk():
        if node.id not in rows:
            ins = tuple(at(reads["operand", node.id, i].end) for i in range(len(node.inputs)))
            rows[node.id] = NdRow(ins, tuple(values[v] for v in node.outputs))
    return {
        "values": values,
        "rows": rows,
        "region_outputs": {
            (node.id, number): tuple(
                at(reads["result", node.id, number, k].end) for k in range(len(region.outputs))
            )
            for node in flow.graph.walk()
            for number, region in enumerate(node.regions)
        },
        "outputs": tuple(at(e.end) for e in flow.edges if e.kind == "output"),
    }
