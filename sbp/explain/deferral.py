"""The cost of a program with a conversion deferred: without the pin that asks for it, with the
value carried or returned unconverted, read by another row, or reduced one consumer later."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.explain.alternatives import Refusal, planned
from sbp.explain.origins import Origins
from sbp.explain.pinning import pin_subject, unpin_subject
from sbp.explain.places import changed_axes
from sbp.explain.reasons import ConversionNeed
from sbp.explain.subjects import Subject
from sbp.infer.conditioned import EndCondition, choose_under
from sbp.infer.constraints import pin_sites
from sbp.infer.request import Request
from sbp.infer.space import Code, Codes
from sbp.plan.fit import cheapest
from sbp.plan.program import PlannedBox, Program
from sbp.trace.graph import Node
from sbp.trace.regions import bodies_of, interface_of


@dataclass(frozen=True, slots=True)
class Deferral:
    """Plans the program with one conversion deferred.

    Arguments:
      request: the program as it was asked for.
      origins: of the plan.
      group: the conversion at all places that are alike.
    """

    request: Request
    origins: Origins
    group: Sequence[PlannedBox]

    @property
    def _changed(self) -> list[int]:
        return changed_axes(self.group[0].box)

    @property
    def _before(self) -> Codes:
        return self.group[0].box.source.codes

    def plan(self, need: ConversionNeed) -> Program | Refusal:
        """The plan in which a need is met otherwise, or why there is none.

        Arguments:
          need: a need of the conversion that is not forced.
        """
        match need.kind:
            case "pin":
                return self._without_pin(need)
            case "carry" | "body" if need.is_read:
                return self._holding([self._entering(need)])
            case "carry" | "body":
                return self._holding([self._returned(need)])
            case "row":
                return self._holding(self._other_rows(need))
            case "partners" | "choice":
                return self._one_consumer_later(need)
            case _:
                return self._returned_unconverted(need)

    def _on_changed(self, codes: Codes) -> tuple[Code | None, ...]:
        """Codes on the mesh axes that the conversion changes, None on the others."""
        return tuple(c if k in self._changed else None for k, c in enumerate(codes))

    def _entering(self, need: ConversionNeed) -> EndCondition:
        """A body that takes the operand as it is; of a slice, the type of one slice."""
        assert need.node is not None
        body, position = bodies_of(need.node, need.number)[0]
        is_slice = interface_of(need.node).entries[need.number].kind == "slice"
        codes = tuple(c - 1 if is_slice and c > 0 else c for c in self._before)
        return EndCondition(end="made", at=(body.inputs[position],), codes=self._on_changed(codes))

    def _returned(self, need: ConversionNeed) -> EndCondition:
        """A body that returns the value as it is."""
        assert need.node is not None
        at = (need.node.id, need.region, need.number)
        return EndCondition(end="returned", at=at, codes=self._on_changed(self._before))

    def _other_rows(self, need: ConversionNeed) -> list[EndCondition]:
        """A reader that takes another type than the converted one, at every copy of the value."""
        assert need.node is not None
        codes = self._on_changed(self.group[0].box.target.codes)
        places = dict.fromkeys(
            (node.id, number)
            for planned_box in self.group
            for node, number in planned_box.readers()
            if number == need.number and _same_expression(node, need.node)
        )
        return [EndCondition(end="operand", at=at, codes=codes, differs=True) for at in places]

    def _holding(self, holds: Sequence[EndCondition]) -> Program | Refusal:
        """The cheapest plan in which conditions on ends of values hold."""
        request = self.request
        if not {h.at[0] for h in holds if h.end != "made"} <= {n.id for n in request.graph.walk()}:
            return Refusal(kind="not there")
        program = cheapest(functools.partial(choose_under, request, holds), request)
        if program is None:
            return Refusal(kind="no row")
        limit = request.memory_limit
        if limit is not None and program.cost.peak_memory_bytes > limit:
            return Refusal(kind="exceeds memory")
        return program

    def _one_consumer_later(self, need: ConversionNeed) -> Program | Refusal:
        """With the results of the reader pinned partial, wherever its line was traced."""
        assert need.node is not None and need.result is not None
        nodes = {
            node.id
            for planned_box in self.group
            for node, _ in planned_box.readers()
            if _same_expression(node, need.node)
        }
        graph = self.request.graph
        outputs = tuple(v for n in graph.walk() if n.id in nodes for v in n.outputs)
        results = Subject(label="", kind="made", values=outputs)
        return planned(pin_subject(self.request, results, {need.change.axis: need.result}))

    def _without_pin(self, need: ConversionNeed) -> Program | Refusal:
        assert need.node is not None
        request = self.request
        nodes = [
            n
            for site in pin_sites(request)
            if any(n.id == need.node.id for n in site.nodes)
            for n in site.nodes
        ]
        subject = Subject(label="", kind="annotation", values=tuple(n.outputs[0] for n in nodes))
        for k in self._changed:
            request = unpin_subject(request, subject, k)
        return planned(request)

    def _returned_unconverted(self, need: ConversionNeed) -> Program | Refusal:
        """With a result of the program pinned to the type it is made in."""
        source = self.group[0].box.source
        output = Subject(label="", kind="output", values=(source.value,), position=need.number)
        wanted = {k: source.codes[k] for k in self._changed}
        return planned(pin_subject(self.request, output, wanted))


def _same_expression(node: Node, other: Node) -> bool:
    return (node.op, node.span, node.backward) == (other.op, other.span, other.backward)
