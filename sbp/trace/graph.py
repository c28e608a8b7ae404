"""The `Graph`: a traced function as nodes over numbered values. Bodies of loops and branches are
graphs inside a node."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from sbp import _jax
from sbp.errors import Span
from sbp.trace import scopes


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A literal or an array that the function closes over: known before the plan, B on every mesh
    axis."""

    value: Any
    aval: Any


BARRIER = "optimization_barrier"
"""The operator that returns its operands; XLA does not merge computations across it."""

DIM_AS_VALUE = "dim_as_value"
"""The operator whose result is the value of a symbolic size."""

_OF_64_BITS = frozenset({"float64", "int64", "uint64", "complex128"})
"""The dtypes that JAX narrows unless 64 bits are enabled."""

Operand = int | Constant
"""A value id, or a constant."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One equation: a primitive, its parameters and operands, and the regions of a loop or branch.

    Arguments:
      id: number of the node in its whole graph, unique over regions.
      op: the primitive's name.
      primitive: the JAX primitive, to bind on local shards.
      params: its parameters, as traced on global shapes.
      inputs: value ids or constants.
      outputs: value ids.
      regions: body graphs: scan (body), while (cond, body), cond (branches), shard_map (body).
      span: the user's innermost source line; None when there is none.
      stack: the user's frames, innermost first.
      library: JAX's own functions between the user's innermost line and the equation, innermost
          first, such as `lax.parallel.pmean`.
      scope: JAX's name stack, `transpose(jvp(..))` for gradients.
      source_info: JAX's own record, passed on to the compiled program.
      title: what the user knows the operator as, where it replaces others; empty elsewhere.
    """

    id: int
    op: str
    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    regions: tuple[Graph, ...] = ()
    span: Span | None = None
    stack: tuple[Span, ...] = ()
    library: tuple[str, ...] = ()
    scope: str = ""
    source_info: Any = None
    title: str = ""

    @property
    def name(self) -> str:
        """The name of the operator in reports."""
        return self.title or self.op

    @property
    def backward(self) -> bool:
        """Whether the node belongs to a backward pass."""
        return scopes.in_transpose(self.scope)

    @property
    def is_recomputed(self) -> bool:
        """Whether the node repeats a forward operation in a backward pass, for
        rematerialisation."""
        return scopes.in_recomputation(self.scope)

    @property
    def in_gradient(self) -> bool:
        """Whether the node computes a gradient: it belongs to a backward pass and repeats no
        forward operation."""
        return self.backward and not self.is_recomputed

    @property
    def is_batched(self) -> bool:
        """Whether the node was traced under `jax.vmap`, so that its arrays have dims that the user
        does not see."""
        return scopes.in_vmap(self.scope)

    @property
    def is_barrier(self) -> bool:
        """Whether the node returns each of its operands as it is, and XLA computes nothing
        across it."""
        return self.op == BARRIER

    def params_key(self, kept: list[Any]) -> tuple[tuple[str, Any], ...]:
        """The parameters as a dictionary key.

        Arguments:
          kept: a list that lives as long as the key; parameters without a hash are appended to it,
              because the key has their `id`.
        """
        items: list[tuple[str, Any]] = []
        for name in sorted(self.params):
            value = self.params[name]
            try:
                hash(value)
            except TypeError:
                kept.append(value)
                value = id(value)
            items.append((name, value))
        return tuple(items)


@dataclass(frozen=True, slots=True, eq=False)
class Inspection:
    """A question of the program for the type of a value (`jax.debug.inspect_array_sharding`).

    Arguments:
      value: the value.
      callback: takes its sharding.
    """

    value: Operand
    callback: Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A function as nodes in program order. Value ids are unique over the whole program, regions
    included.

    Arguments:
      inputs: value ids of the arguments (of a region: in the order of its primitive).
      outputs: value ids or constants of the results.
      nodes: in program order.
      avals: shape and dtype of every value of this graph and its regions (one shared table).
      input_names: names of the arguments, for reports.
      inspections: questions for types; regions have theirs in the whole program's graph.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    avals: dict[int, Any] = field(repr=False)
    input_names: tuple[str, ...] = ()
    inspections: tuple[Inspection, ...] = ()

    def aval(self, operand: Operand) -> Any:
        """Shape and dtype of an operand."""
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]

    def new_value(self, aval: Any) -> int:
        """A new value, entered in the table of avals, whose numbers rise."""
        value = next(reversed(self.avals), -1) + 1
        self.avals[value] = aval
        return value

    def walk(self) -> Iterator[Node]:
        """All nodes, those of regions after the node that holds them."""
        for node in self.nodes:
            yield node
            for region in node.regions:
                yield from region.walk()

    def has_64_bits(self) -> bool:
        """Whether a value of the program, or of a region of it, is a number of 64 bits."""
        avals = (*(self.aval(o) for o in self.outputs), *self.avals.values())
        return any(str(a.dtype) in _OF_64_BITS for a in avals) or any(
            region.has_64_bits() for node in self.nodes for region in node.regions
        )

    def graphs(self) -> Iterator[Graph]:
        """This graph, then the regions of its nodes with theirs, in the order of the nodes."""
        yield self
        for node in self.nodes:
            for region in node.regions:
                yield from region.graphs()


def constant(value: Any) -> Constant:
    """A scalar of NumPy as a constant operand with its aval."""
    return Constant(value, _jax.empty_aval((), value.dtype))


Rewrite = Callable[[Graph, Set[int], Iterator[int]], Graph]
"""A graph in the place of one whose regions are rewritten already, from the values whose types the
program asks for, which stay, and unused numbers of nodes."""


def rewrite_graph(graph: Graph, rewrite: Rewrite) -> Graph:
    """A traced program after a rewrite of its graph and of all regions, inner ones first.

    Arguments:
      graph: the program; new values are entered in its table of avals.
      rewrite: what is done to each graph.
    """
    inspected = {i.value for i in graph.inspections if isinstance(i.value, int)}
    ids = itertools.count(max((node.id for node in graph.walk()), default=0) + 1)

    def with_regions(graph: Graph) -> Graph:
        nodes = tuple(
            dataclasses.replace(n, regions=tuple(map(with_regions, n.regions))) if n.regions else n
            for n in graph.nodes
        )
        return rewrite(dataclasses.replace(graph, nodes=nodes), inspected, ids)

    return with_regions(graph)
