"""The values of a user's expression in a traced program, for each call of its line; and calls of
collectives.

An edit of a line changes all equations of that line: one for each call, and those of its gradient.
An edit is tried on all equations that the line made. It is not tried where the line is
differentiated inside a region: the gradient is already traced, and the edit would not show there.
A value is not differentiated if no gradient has the shape of a value that it depends on.
"""

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from sbp.errors import SourceEdit, Span
from sbp.handwritten.emulation import inner_graphs
from sbp.source.editing import Edits, axes_text, lax_in
from sbp.source.reader import (
    end_of,
    expression_at,
    name_called,
    names_at,
    source_text,
    span_of,
    start_of,
    users_span,
)
from sbp.trace.collectives import SHARD_MAP, SUMS, names_of
from sbp.trace.graph import Graph, Node, Operand, group_by, reached


@dataclass(frozen=True, slots=True)
class Site:
    """An expression or a variable of the source.

    Arguments:
      text: its source text, with its line.
      values: its values in the program: nodes that make them, and positions of their results.
      spans: the places of the expression; for a variable, the expression in the statement that sets
          it.
      name: the variable; empty for an expression.
    """

    text: str
    values: tuple[tuple[Node, int], ...]
    spans: tuple[Span, ...]
    name: str = ""


def _graphs(
    graph: Graph, region: Node | None = None, holder: Node | None = None
) -> Iterator[tuple[Graph, Node | None, Node | None]]:
    """A graph and all graphs in it, each with the region that it is in, and with the loop or branch
    that has it as a body."""
    yield graph, region, holder
    for node in graph.nodes:
        for inner in inner_graphs(node):
            yield from _graphs(inner, *((node, None) if node.op == SHARD_MAP else (region, node)))


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A call of a collective in the source.

    Arguments:
      text: the call in words.
      span: its place in the source.
      call: the call.
      nodes: all operations that the call made.
    """

    text: str
    span: Span
    call: ast.Call
    nodes: tuple[Node, ...]

    @property
    def name(self) -> str:
        """The collective that is called."""
        return name_called(self.call)

    def renamed(self, function: str) -> Edits:
        """The edits that call another function of `jax.lax`."""
        (lax, imports), at = lax_in(self.span.file), span_of(self.call.func, self.span.file)
        return (SourceEdit(span=at, replacement=f"{lax}.{function}", imports=imports),)

    def over(self, axes: tuple[str, ...]) -> Edits:
        """The edits that run it over other mesh axes; none where it does not show its axes. Over
        none, the operand replaces the call."""
        args, file = self.call.args, self.span.file
        if axes:
            named = [k.value for k in self.call.keywords if k.arg == "axis_name"]
            places = (span_of(e, file) for e in (*args[1:2], *named))
            return tuple(SourceEdit(span=at, replacement=axes_text(axes)) for at in places)
        if not args or isinstance(args[0], ast.Starred):
            return ()
        first, last = start_of(span_of(args[0], file)), end_of(span_of(args[0], file))
        atomic = isinstance(args[0], ast.Name | ast.Call | ast.Attribute | ast.Subscript)
        opening, closing = ("", "") if atomic else ("(", ")")
        before = replace(start_of(self.span), end_line=first.line, end_column=first.column)
        after = replace(end_of(self.span), line=last.line, column=last.column)
        return (
            SourceEdit(span=before, replacement=opening),
            SourceEdit(span=after, replacement=closing),
        )


class Sites:
    """Looks up sites.

    Arguments:
      graph: the whole program.
    """

    def __init__(self, graph: Graph) -> None:
        graphs = [*_graphs(graph)]
        self.home = {node.id: at for at in graphs for node in at[0].nodes}
        self.makers: dict[Operand, tuple[Node, int]] = {
            v: (node, i)
            for own, _, _ in graphs
            for node in own.nodes
            for i, v in enumerate(node.outputs)
        }
        self.readers: dict[Operand, list[Node | None]] = defaultdict(list)
        for own, region, holder in graphs:
            reads: list[tuple[Operand, Node | None]] = [(o, n) for n in own.nodes for o in n.inputs]
            # The results of a region that only gradients read have no reader outside of it.
            reads += [
                (o, None)
                for i, o in enumerate(own.outputs)
                if region is None
                or holder is not None
                or any(r is None or not r.backward for r in self.readers[region.outputs[i]])
            ]
            for operand, reader in reads:
                self.readers[operand].append(reader)
        # JAX makes the gradient of a region from the edited region, so that one is not edited.
        self.edited = [
            node
            for own, region, _ in graphs
            for node in own.nodes
            if region is None or not region.backward
        ]
        self.by_span = group_by(self.edited, users_span)
        ends = (
            v
            for v, (node, _) in self.makers.items()
            if node.backward and any(r is None or not r.backward for r in self.readers[v])
        )
        self.ends = list(ends)
        self.gradients = {_shape(graph.aval(v)) for v in self.ends}

    def graph(self, node: Node) -> Graph:
        """The graph of a node: the body of a region, or of a loop or branch in it."""
        return self.home[node.id][0]

    def differentiated(self, node: Node) -> bool:
        """Whether a node belongs to a function that is differentiated inside a region, or to a
        gradient, or is outside of all regions. Its source line made other nodes as well.

        If a region is differentiated as a whole, JAX makes its gradient from the edited region.
        """
        region = self.home[node.id][1]
        return (
            region is None
            or region.backward
            or node.in_gradient
            or node.is_recomputed
            or (not node.backward and self._is_traced_by_grad(node, region.scope.count("jvp(")))
        )

    def _is_traced_by_grad(self, node: Node, outside: int) -> bool:
        """Whether a node depends on values with a gradient, in a function that is differentiated.

        Arguments:
          node: the node.
          outside: the number of differentiations around its region.
        """
        if node.scope.count("jvp(") <= outside:
            return False
        if not self.gradients:  # a tangent
            return True
        graph = self.graph(node)

        def is_inside(v: Operand) -> bool:
            return v in self.makers and self.makers[v][0].scope.count("jvp(") > outside

        used = reached(node.inputs, lambda v: self.makers[v][0].inputs if is_inside(v) else ())
        entering = (v for v in used if isinstance(v, int) and not is_inside(v))
        return any(_shape(graph.avals[v]) in self.gradients for v in entering)

    def alike(self, node: Node) -> tuple[Node, ...]:
        """The nodes of the same operation and source line, in every call; none where one of them is
        differentiated inside a region."""
        same = SUMS if node.op in SUMS else (node.op,)
        found = [n for n in self.by_span.get(users_span(node), []) if n.op in same]
        return () if any(self.differentiated(n) for n in found) else tuple(found)

    # ---- values ---------------------------------------------------------------------------------

    def value(self, node: Node) -> Site | None:
        """The expression whose value a node computes or, inside a gradient, the variable that is
        set to the gradient's result."""
        if self.differentiated(node):
            return self.returned(node)
        span = users_span(node)
        text = source_text(span)
        if span is None or not text or not isinstance(expression_at(span)[0], ast.expr):
            return None
        group = self.by_span.get(span, [])
        found = tuple((n, k) for n, k, forward in self._leaving(group) if forward)
        # Of the turns of a Python loop that read each other, not each one has a value that leaves.
        if len(found) != sum(n.op == node.op for n in group) or any(
            map(self.differentiated, group)
        ):
            return None
        return Site(f"`{text}` at line {span.line}", found, (span,))

    def _leaving(self, part: Sequence[Node]) -> Iterator[tuple[Node, int, bool]]:
        """The values of some nodes that other nodes read, each with whether one of these readers is
        in no gradient."""
        inside = {n.id for n in part}
        for node in part:
            for k, v in enumerate(node.outputs):
                others = [r for r in self.readers[v] if r is None or r.id not in inside]
                forward = any(r is None or r.backward == node.backward for r in others)
                # In `for _ in range(2): w = w - grad(loss)(w)`, one line runs twice, and `part` has
                # the nodes of both runs. If a node outside of gradients reads a gradient, this
                # node is of the next run, so the gradient leaves its own run here.
                again = node.backward and any(
                    r is not None and not r.backward for r in self.readers[v]
                )
                if others or again:
                    yield node, k, forward

    def returned(self, node: Node) -> Site | None:
        """The variable or call whose value is the gradient that a node inside a gradient
        contributes to."""
        sites = {self._exit(v, reader, node.backward) for v, reader in self._exits(node)}
        return sites.pop() if len(sites) == 1 else None

    def _exits(self, node: Node) -> Iterator[tuple[int, Node | None]]:
        """The values of a gradient that depend on a node and that other nodes read, each with one
        such reader."""

        def reads(at: Node) -> list[tuple[int, Node | None]]:
            holder = self.home[at.id][2]
            return [(v, holder if r is None else r) for v in at.outputs for r in self.readers[v]]

        def leaves(reader: Node | None) -> bool:
            return reader is None or not self.differentiated(reader)

        def onward(at: Node) -> list[Node]:
            inside = (r for _, r in reads(at) if r is not None and not leaves(r))
            return [r for r in inside if r.backward == node.backward]

        every = itertools.chain(*map(reads, reached([node], onward)))
        return ((v, reader) for v, reader in every if leaves(reader))

    def _exit(self, value: int, reader: Node | None, gradient: bool) -> Site | None:
        """The user's name or expression for the result of a call with a gradient inside, in the
        function that makes the call."""
        maker = self.makers[value][0]
        graph, region, _ = self.home[maker.id]
        loops = reader is not None and reader.regions and self.graph(reader) is not graph
        if region is None or loops:
            return None  # what a loop or a branch returns of a gradient in it
        theirs = reader.stack if reader is not None else region.stack
        shared = sum(a == b for a, b in zip(reversed(maker.stack), reversed(theirs), strict=False))
        outer = len(maker.stack) - shared - 1
        if outer < 1 or (
            reader is not None
            and (
                len(theirs) <= shared
                or theirs[len(theirs) - shared - 1].function != maker.stack[outer].function
            )
        ):
            return None  # also a call whose frames are not all known
        calls = reversed(maker.stack[1 : outer + 1])
        return next(filter(None, (self._of_call(call, gradient) for call in calls)), None)

    def _of_call(self, call: Span, gradient: bool) -> Site | None:
        """The user's name or expression for the result of a call with a gradient inside."""
        expression, name = expression_at(call)
        if not isinstance(expression, ast.Call):
            return None
        inside = [n for n in self.edited if call in n.stack]
        leaving = list(self._leaving(inside))
        own = tuple((n, k) for n, k, _ in leaving if n.backward == gradient)
        names = tuple(group[0] if len(group) == 1 else "" for group in names_at(call))
        if len(names) == 2 and name_called(expression.func) != "grad":
            # Of value_and_grad, the value first.
            name = names[1 if gradient else 0]
        elif len(own) != len(leaving):
            return None
        if not name and not names and isinstance(expression.func, ast.Call):
            return Site(f"`{source_text(call)}` at line {call.line}", own, (call,))
        return Site(f"`{name}`, which line {call.line} sets,", own, (call,), name) if name else None

    def loss(self, gradient: Node) -> Site | None:
        """The expression of the loss that a gradient inside a region is of; None if it is not the
        only candidate, or if its line computes other values too."""
        graph, region, _ = self.home[gradient.id]
        outside = region.scope.count("jvp(") if region else 0

        def is_inside(node: Node | None) -> bool:
            return node is not None and node.scope.count("jvp(") > outside

        found = [
            node
            for node in graph.nodes
            if is_inside(node) and not node.backward
            for v in node.outputs
            if _shape(graph.avals[v])[0] == () and jnp.issubdtype(graph.avals[v].dtype, jnp.inexact)
            if not any(is_inside(r) and r and not r.backward for r in self.readers[v])
        ]
        span = users_span(found[0]) if len(found) == 1 else None
        if span is None or not isinstance(expression_at(span)[0], ast.expr):
            return None
        forward = [n for n in self.by_span[span] if not n.backward]
        if not all(is_inside(n) and self.graph(n) is graph for n in forward):
            return None
        return Site(f"`{source_text(span)}` at line {span.line}", ((found[0], 0),), (span,))

    def sums(self, gradient: Node, axes: tuple[str, ...]) -> list[Node]:
        """The sums over mesh axes that make all results of gradients in the graph of a node; none
        if some result does not come from such a sum."""

        def is_sum(node: Node) -> bool:
            return node.op in SUMS and {*axes} <= {*names_of(node)}

        def gradients(node: Node) -> list[Node]:
            makers = (self.makers[o][0] for o in node.inputs if o in self.makers)
            return [] if is_sum(node) else [m for m in makers if m.backward]

        makers = (self.makers[v][0] for v in self.ends)
        ends = [m for m in makers if self.graph(m) is self.graph(gradient)]
        found = [*reached(ends, gradients)]
        first = (n for n in found if not gradients(n))
        return [] if any(not is_sum(n) for n in first) else [n for n in found if is_sum(n)]


def _shape(aval: Any) -> tuple[Any, ...]:
    return tuple(aval.shape), aval.dtype
