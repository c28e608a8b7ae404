"""What a candidate for a repair consists of: calls, places, reductions that come too late."""

from __future__ import annotations

from dataclasses import dataclass, field

from sbp.errors import Span
from sbp.shardmap.edits import GraphEdit
from sbp.shardmap.rewrites import Edits, after_statement, call_at, called_name, into_call
from sbp.trace.graph import Node

TouchedValue = tuple[int, int, bool]
"""A node, which of its results or operands, and whether it is a result."""


@dataclass(frozen=True, slots=True)
class RepairCandidate:
    """One repair in the ways that it may be meant: a sum, then a mean, where it may be either.

    Arguments:
      edits: the ways.
      conditions: for each way, what has to be so where the checker accepts several.
      contrary: edits that are wrong if the ways are right. If the checker accepts one of them too,
          it does not know enough of the value, and the repair is not offered.
      place: the values that are reduced. Only the first accepted repair of a place is offered.
      spare: whether it is offered only where no other repair is.
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
      span: where it stands.
      nodes: all operations that it made.
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
      values: what it stands for in the program.
      spans: where the expression stands; of a variable, the expression in the statement that sets
          it.
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
    """What becomes of a reduction that comes too late.

    Arguments:
      text: the same in words; empty where it is kept.
      source: the same as edits of the source.
      drop: the mesh axes that it loses, by the id of the node.
      divide: its new divisors, by the id of the node.
      kept: divisors of a kept sum, which would matter if it still added anything up.
    """

    text: str = ""
    source: Edits = ()
    drop: dict[int, tuple[str, ...]] = field(default_factory=dict)
    divide: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
