"""Candidates for the repair of a finding, and their parts: calls of collectives, places of new
reductions, reductions that come too late."""

from __future__ import annotations

from dataclasses import dataclass, field

from sbp.errors import Span
from sbp.shardmap.edits import GraphEdit
from sbp.shardmap.rewrites import Edits, after_statement, call_at, called_name, into_call
from sbp.trace.graph import Node

TouchedValue = tuple[int, int, bool]
"""The id of a node, the position of a result or operand, and whether it is a result."""


@dataclass(frozen=True, slots=True)
class RepairCandidate:
    """One repair with its variants: a sum and a mean, where either may be meant.

    Arguments:
      edits: the variants.
      conditions: for each variant, the condition that a help states where the checker accepts
          several variants.
      contrary: edits that are wrong if a variant is right. If the checker accepts one of them, it
          knows too little of the value, and the repair is not offered.
      place: the values that are reduced. Only the first accepted repair of a place is offered.
      spare: whether the repair is offered only if there is no other.
    """

    edits: tuple[GraphEdit, ...]
    conditions: tuple[str, ...] = ("",)
    contrary: tuple[GraphEdit, ...] = ()
    place: object = None
    spare: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call of a collective in the source.

    Arguments:
      text: the call in words.
      span: its place in the source.
      nodes: all operations that the call made.
    """

    text: str
    span: Span
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        """The collective that is called."""
        return called_name(call_at(self.span))


@dataclass(frozen=True, slots=True)
class ReducedPlace:
    """Values that are to be reduced.

    Arguments:
      text: the expression or variable in words.
      values: its values in the program.
      spans: the places of the expression; for a variable, the expression in the statement that
          sets it.
      name: the variable; empty for an expression.
    """

    text: str
    values: tuple[TouchedValue, ...]
    spans: tuple[Span, ...]
    name: str = ""

    def put_through(self, function: str, arguments: str) -> Edits:
        """The edits that put it through a function of `jax.lax`."""
        if self.name:
            return after_statement(self.spans[0], self.name, function, arguments)
        return tuple(e for span in self.spans for e in into_call(span, function, arguments))


@dataclass(frozen=True, slots=True)
class LateReduction:
    """The change of a reduction that comes too late.

    Arguments:
      text: the change in words; empty where the reduction is kept.
      source: the change as edits of the source.
      drop: the mesh axes that it loses, by the id of the node.
      divide: its new divisors, by the id of the node.
      kept: the divisors that a kept sum would need if it still added parts.
    """

    text: str = ""
    source: Edits = ()
    drop: dict[int, tuple[str, ...]] = field(default_factory=dict)
    divide: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
