"""A fault of a program with the texts that its diagnostic is made of."""

from __future__ import annotations

from dataclasses import dataclass

from sbp.explain.edits import pinned_value
from sbp.explain.names import BATCHED, Names, asked_text, behind_vmap
from sbp.explain.trials import Trials
from sbp.infer.check import CheckResult
from sbp.infer.constraints import Constraint
from sbp.infer.request import Request
from sbp.signatures import traits_of
from sbp.source.reader import source_text, users_span
from sbp.trace.graph import Node


@dataclass(frozen=True, slots=True)
class BlamedFault:
    """A fault with the trials on its program.

    Arguments:
      trials: the program and its faults.
      found: the fault.
      names: the names of the program's values.
      shown: the number of faults that are shown.
    """

    trials: Trials
    found: CheckResult
    names: Names
    shown: int

    @property
    def request(self) -> Request:
        """The program, and what its types are chosen by."""
        return self.trials.request

    @property
    def axis(self) -> str:
        """The mesh axis."""
        return self.found.mesh_axis

    @property
    def position(self) -> int:
        """The position of the mesh axis."""
        return self.request.mesh.names.index(self.axis)

    def subject(self, node: Node) -> str:
        """A node as a title names it: by the user's expression."""
        text = f"`{source_text(users_span(node)) or node.name}`"
        return f"the gradient of {text}" if node.in_gradient else text

    def direct(self, node: Node, pin: Constraint, operand: int | None = None) -> bool:
        """Whether a pin is on a value that the node itself reads.

        Arguments:
          node: the node.
          pin: the pin.
          operand: the operand that is asked about; None for any operand at which the fault ends.
        """
        if pin.site is None or node.regions:
            return False
        pinned = {n.outputs[0] for n in pin.site.nodes}
        if pin.site.source == "input":
            pinned = {self.request.graph.inputs[pin.site.position]}
        return any(
            node.inputs[c.operand] in pinned
            for c in self.found.sink
            if operand is None or c.operand == operand
        )

    def pin_text(self, pin: Constraint, node: Node) -> str:
        """The atom that a pin asks, and the role of a split dim in the node."""
        assert pin.site is not None
        asked = asked_text(pin.site, pin.code)
        text = f"{self.names.site(pin.site)} is {asked} on `{self.axis}`"
        if pin.code > 0:
            shape = self.request.graph.aval(pinned_value(self.request.graph, pin.site)).shape
            behind = behind_vmap(pin.site, pin.code)
            text += " under vmap" if behind != 0 else ""
            sizes = "x".join(map(str, shape[behind or 0 :]))
            dim = f": dim {pin.code - 1 - (behind or 0)} of {sizes}"
            text += self.role(pin, node) or dim + (f" {BATCHED}" if behind is None else "")
        return text

    def role(self, pin: Constraint, node: Node) -> str:
        """The role of a pinned dim in the contraction that reads it; empty for other nodes."""
        numbers = node.params.get("dimension_numbers", ())
        if not traits_of(node.op).contracts or len(numbers) != 2 or pin.site is None:
            return ""
        contract, batch = numbers
        for c in self.found.sink:
            if self.direct(node, pin, c.operand):
                if pin.code - 1 in contract[c.operand]:
                    return ", the contracted dim"
                return ", a batch dim" if pin.code - 1 in batch[c.operand] else ", not contracted"
        return ""
