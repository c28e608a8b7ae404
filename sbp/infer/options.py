"""The options of each decision of a program: the rows of a node, or the types of a value that no
row makes. The chooser takes one of them, and the certificate checks that it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.infer.flow import Decision, End, Flow
from sbp.infer.pins import pinned_codes
from sbp.infer.request import Request
from sbp.infer.rows import EMPTY, Choice, NdRow
from sbp.infer.sends import allowed_rows
from sbp.infer.space import Codes, TypeSpace, is_even, stack
from sbp.infer.value_space import needs_of


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
        wanted = self._wanted(decision)
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
        wanted = self._wanted(decision)
        return choice in self._space(decision, wanted).index and self._fits(
            decision, wanted, choice
        )

    def _wanted(self, decision: Decision) -> tuple[int | None, ...]:
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
        ) and (not boundary or self._held(decision, codes))

    def _held(self, decision: Decision, codes: Codes) -> bool:
        shape: Sequence[int] = decision.aval.shape
        padded = self.request.demand.is_padded(decision.kind, decision.position)
        return is_even(shape, codes, self.sizes) or (padded and 0 not in shape)


def typed(flow: Flow, choices: Sequence[Choice]) -> dict[str, Any]:
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
    operands = flow.operands()
    for node in flow.graph.walk():
        if node.id not in rows:
            ins = tuple(at(operands[node.id][i].end) for i in range(len(node.inputs)))
            rows[node.id] = NdRow(ins, tuple(values[v] for v in node.outputs))
    return {
        "values": values,
        "rows": rows,
        "region_outputs": {
            key: tuple(at(e.end) for e in edges) for key, edges in flow.returned().items()
        },
        "outputs": tuple(at(e.end) for e in flow.edges if e.kind == "output"),
    }
