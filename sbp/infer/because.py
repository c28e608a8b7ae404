"""The reasons of constraints, as fields; their text is made from the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sbp.annotations import annotate_p
from sbp.errors import Span
from sbp.infer.space import Code, decode
from sbp.limits import Budget, Policy
from sbp.trace.graph import Node
from sbp.trace.regions import Entry, Exit, interface_of

PinSource = Literal["annotation", "input", "output"]
"""What the user pinned."""


@dataclass(frozen=True, slots=True)
class PinBecause:
    """A pin that the user wrote.

    Arguments:
      source: what it pins.
      span: the annotation's line; None for inputs and outputs.
      position: of the input or output; -1 for an annotation.
      code: the pinned code on the mesh axis.
    """

    source: PinSource
    span: Span | None
    position: int
    code: Code

    @property
    def text(self) -> str:
        """The reason in words."""
        where = f"{self.source} {self.position}" if self.position >= 0 else self.source
        return f"{where} is pinned {decode(self.code)!r}"


@dataclass(frozen=True, slots=True)
class PolicyBecause:
    """The boxing policy of the program."""

    policy: Policy
    span: Span | None = None

    @property
    def text(self) -> str:
        """The reason in words."""
        return f'boxing is "{self.policy}"'


@dataclass(frozen=True, slots=True)
class BudgetBecause:
    """A budget of the program."""

    budget: Budget
    span: Span | None = None

    @property
    def text(self) -> str:
        """The reason in words."""
        return str(self.budget)


@dataclass(frozen=True, slots=True)
class ReadBecause:
    """A read of a value.

    Arguments:
      node: the reader; None for an output of the program.
      number: position of the value among the operands of the node; of an exit, among the outputs of
          its region; of a program's output, among the program's outputs.
      entry, exit: of a read that enters or leaves a region; None for other reads.
    """

    node: Node | None
    number: int
    entry: Entry | None = None
    exit: Exit | None = None

    @property
    def span(self) -> Span | None:
        """The reader's line; None for outputs of the program."""
        return self.node.span if self.node else None

    @property
    def predicate(self) -> bool:
        """Whether the value is the predicate of a cond or while."""
        return "predicate" in [e.kind for e in (self.entry, self.exit) if e is not None]

    @property
    def initial_carry(self) -> bool:
        """Whether the value enters a loop as a carry."""
        return self.entry is not None and self.entry.kind == "carry"

    @property
    def returned_carry(self) -> bool:
        """Whether the body of a loop returns the value as a carry."""
        return self.exit is not None and self.exit.kind == "carry"

    @property
    def carry(self) -> int | None:
        """The number of the carry; None for a value that is not a carry."""
        edge = self.exit if self.returned_carry else self.entry
        return edge.number if edge is not None and edge.kind == "carry" else None

    @property
    def role(self) -> str:
        """The role of the value for its reader, in words: an operand, a carry, the result of a
        branch."""
        if self.node is None:
            return f"output {self.number}"
        if self.node.primitive is annotate_p:
            return "what is annotated"
        if self.entry is not None:
            return _entry_text(self.node, self.entry)
        if self.exit is not None:
            return _exit_text(self.exit)
        return f"operand {self.number}"

    @property
    def text(self) -> str:
        """The reason in words."""
        if self.node is None:
            return f"{self.role} of the program"
        annotated = self.node.primitive is annotate_p
        return self.role if annotated else f"{self.role} of {self.node.name}"


def _entry_text(node: Node, entry: Entry) -> str:
    # With one region, the number counts all operands; with several, the operands of one kind.
    number = entry.operand if len(node.regions) == 1 else entry.number
    match entry.kind:
        case "predicate":
            return "predicate"
        case "constant":
            return f"{'constant' if interface_of(node).loop else 'operand'} {number}"
        case "carry":
            return f"initial carry {number}"
        case "slice":
            return f"scanned operand {number}"


def _exit_text(left: Exit) -> str:
    match left.kind:
        case "predicate":
            return "predicate"
        case "carry":
            return f"carry {left.number}"
        case "stacked":
            return f"stacked result {left.number}"
        case "result":
            return f"result {left.number} of branch {left.region}"


Because = PinBecause | PolicyBecause | BudgetBecause | ReadBecause
"""The reason of a constraint, with the user's line (`span`) and a text."""
