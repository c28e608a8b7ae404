"""Source places, names of values, rows and changes of atoms, as answers quote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp.errors import Span
from sbp.infer.space import Code, Codes, Step
from sbp.plan.ir import Box
from sbp.trace.graph import Node


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A place in the user's source.

    Arguments:
      span: the expression; None in code that no line of the user stands for.
      gradient: whether the backward pass of that expression is meant.
      recomputed: whether it is meant where the backward pass repeats it.
    """

    span: Span | None
    gradient: bool = False
    recomputed: bool = False

    @classmethod
    def of(cls, node: Node) -> SourcePlace:
        """The place of a node."""
        return cls(node.span, node.in_gradient, node.is_recomputed)


@dataclass(frozen=True, slots=True)
class ValueName:
    """The name of a value.

    Arguments:
      name: the user's name or expression, or a description.
      is_source: whether it is the user's own: a name or an expression.
      slices: the number of loops around the value in each of which it is one slice of the named
          value.
    """

    name: str
    is_source: bool = True
    slices: int = 0

    @property
    def is_variable(self) -> bool:
        """Whether the value is called by the name of a variable."""
        return self.is_source and not self.slices and self.name.isidentifier()

    def __str__(self) -> str:
        quoted = f"`{self.name}`" if self.is_source else self.name
        return "a slice of " * self.slices + quoted


@dataclass(frozen=True, slots=True)
class AxisRow:
    """The row of a node on one mesh axis: codes of its operands and of its results."""

    ins: tuple[Code, ...]
    outs: tuple[Code, ...]

    @classmethod
    def of(cls, ins: Sequence[Codes], outs: Sequence[Codes], position: int) -> AxisRow:
        """The part of a row that belongs to one mesh axis.

        Arguments:
          ins, outs: the types of the row's operands and results, in codes.
          position: the position of the mesh axis.
        """
        return cls(tuple(t[position] for t in ins), tuple(t[position] for t in outs))


@dataclass(frozen=True, slots=True)
class AtomChange:
    """The change that a conversion makes on one mesh axis.

    Arguments:
      axis: position of the mesh axis.
      before, after: the codes.
    """

    axis: int
    before: Code
    after: Code

    @classmethod
    def of_box(cls, box: Box) -> AtomChange:
        """The change on the first mesh axis that a conversion changes."""
        axis = changed_axes(box)[0]
        return cls(axis, box.source.codes[axis], box.target.codes[axis])

    @classmethod
    def of_step(cls, step: Step) -> AtomChange:
        """The change on the first mesh axis of a step."""
        axis = step.mesh_axes[0]
        return cls(axis, step.source[axis], step.target[axis])


def changed_axes(box: Box) -> list[int]:
    """Positions of the mesh axes on which a conversion changes the atom."""
    pairs = zip(box.source.codes, box.target.codes, strict=True)
    return [k for k, (before, after) in enumerate(pairs) if before != after]
