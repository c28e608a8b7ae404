"""Where an annotation that a help adds to the source stands in the traced program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sbp.errors import SourceEdit, Span
from sbp.source.editing import statement_span
from sbp.trace.graph import Graph, Node, Operand


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """New annotations in a program. All that follows reads what is annotated.

    Arguments:
      before: by node id, the values that are annotated before the node.
      after: the values that are annotated where they are made.
    """

    before: Mapping[int, tuple[Operand, ...]]
    after: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """Finds the places of an annotation, one for each time that its line is traced: in unrolled
    layers, in rematerialisation.

    A statement before the line annotates all that the line reads, also in the functions that it
    calls. Any other edit annotates the expression that it replaces.

    Arguments:
      graph: the program.
      makers: for each value, the node that makes it.
      line: the expression that reads the value.
      edit: the first edit of the annotation.
    """

    graph: Graph
    makers: Mapping[int, Node]
    line: Span
    edit: SourceEdit

    def of(self, values: Iterable[Operand]) -> Placed:
        """The places of an annotation of some values.

        Arguments:
          values: what the line reads.
        """
        before, after = dict[int, dict[Operand, None]](), set[int]()
        for value in values:
            self.place(value, before, after)
        return Placed(before={n: tuple(v) for n, v in before.items()}, after=frozenset(after))

    def place(
        self, value: Operand, before: dict[int, dict[Operand, None]], after: set[int]
    ) -> None:
        """Adds the places of one value.

        Arguments:
          value: the value.
          before: by node id, the values that are annotated before the node, in order.
          after: the values that are annotated where they are made.
        """
        nodes = [n for n in self.graph.walk() if not n.in_gradient and self.frame(n) is not None]
        reading = [n for n in nodes if value in n.inputs]
        # Other expressions of a comprehension may read the value, too.
        first = next((n for n in reading if self.line in n.stack), reading[0])
        number, depth = first.inputs.index(value), self.frame(first)
        assert depth is not None
        path = first.stack[: depth + 1]
        readers = {first.id} | {
            n.id
            for n in nodes
            if (n.op, len(n.inputs), n.stack[: depth + 1]) == (first.op, len(first.inputs), path)
            and not self.made_by(n.inputs[number], path[-1])
        }
        for graph in self.graph.graphs():
            for k, node in enumerate(graph.nodes):
                if node.id not in readers:
                    continue
                operand = node.inputs[number]
                maker = self.makers.get(operand) if isinstance(operand, int) else None
                if self.inserts:
                    before.setdefault(self.start(graph.nodes, k, maker).id, {})[operand] = None
                elif maker is not None and self.frame(maker) is not None:
                    after.update(v for v in maker.outputs if v == operand)
                else:
                    before.setdefault(node.id, {})[operand] = None

    @property
    def inserts(self) -> bool:
        """Whether the edit is a statement before the line."""
        span = self.edit.span
        return (span.line, span.column) == (span.end_line, span.end_column)

    def frame(self, node: Node) -> int | None:
        """The position in a node's stack of the frame that reads what is annotated."""
        start = self.edit.span if self.inserts else self.line
        found = (
            k
            for k, s in enumerate(node.stack)
            if (s.file, s.function) == (self.line.file, self.line.function)
            and (s.line, s.column) >= (start.line, start.column)
        )
        return next(found, None)

    def made_by(self, operand: Operand, expression: Span) -> bool:
        """Whether an expression makes an operand that it reads itself."""
        maker = self.makers.get(operand) if isinstance(operand, int) else None
        return maker is not None and expression in maker.stack

    def start(self, siblings: tuple[Node, ...], reader: int, maker: Node | None) -> Node:
        """The first node of the statement that a node belongs to, after what makes the value.

        Arguments:
          siblings: the nodes of one region, in order.
          reader: the position of the node that reads the value.
          maker: what makes the value.
        """
        statement = statement_span(self.line)
        depth = self.frame(siblings[reader])
        assert depth is not None
        caller = siblings[reader].stack[depth + 1 :]
        first = reader
        while statement is not None and first > 0:
            node = siblings[first - 1]
            k = self.frame(node)
            inside = k is not None and _before_end(node.stack[k], statement)
            if not inside or k is None or node.stack[k + 1 :] != caller:
                break
            # By its id: edits of the program, such as dropping another fault's pins, copy nodes.
            if maker is not None and node.id == maker.id:
                break
            first -= 1
        return siblings[first]


def _before_end(span: Span, statement: Span) -> bool:
    return (span.line, span.column) < (statement.end_line, statement.end_column)
