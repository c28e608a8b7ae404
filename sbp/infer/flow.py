"""The decisions of a program and the edges between them.

A typing decides two things: the row of each node, and the type of each value that no row makes
(inputs, annotations, carries, results of branches, ..). A value is made at one end of a decision
and read at ends of other decisions. Each read is an edge, on which the value may be converted.

`flow_of` is the only walk over a program that lists these. Its result is the source of the cost
tables (`infer.choose`), the Z3 constraints (`infer.constraints`), the monoids under which values
can be partial (`infer.request`), the sums that are accumulated in a wider dtype (`chosen_sums`),
the claims of a typing about symbolic sizes (`sizes.claims`), and the certificate
(`infer.typing.certify`). `plan.verify` walks the plan on its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp

from sbp.annotations import Pin, annotate_p
from sbp.errors import Span
from sbp.kinds import REDUCE_DTYPES
from sbp.signatures import traits_of
from sbp.trace.graph import (
    NO_TRIP,
    SAME,
    Entry,
    Exit,
    Graph,
    Node,
    Operand,
    group_by,
    interface_of,
    reached,
    trips_of,
)

Place = tuple[Literal["row", "value", "operand", "result", "output"], *tuple[int, ...]]
"""Where a `Typing` stores a decision or a read: ("row", node id); ("value", value), the type in
which it is made; ("operand", node id, operand), the type in which a node reads it; ("result", node
id, region, output), the type in which a region returns it; ("output", position), that of an output
of the program."""


@dataclass(frozen=True, slots=True)
class End:
    """One type that a decision fixes.

    Arguments:
      variable: number of the decision.
      column: of a row, the operand, or the number of operands plus the result; of a sliced value, 0
          for one slice and 1 for the whole; 0 otherwise.
    """

    variable: int
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """One thing that a typing decides.

    Arguments:
      kind: `input`, `output`: the type of a program's input or output; `row`: the row of a node;
          `annotation`: the type of an annotated value; `value`: the type of another value that no
          row makes; `predicate`: always B, since all devices have to take the same branch.
      place: where a typing stores it.
      makes: the values whose type it decides where they are made.
      aval: shape and dtype of the value; of a slice when `sliced`; None for a row.
      node: the node it belongs to; None for inputs and outputs.
      position: of an input or output; -1 for other kinds.
      sliced: whether its value is one slice of a scanned operand or stacked result; column 1 is the
          type of the whole array.
      reduced: whether the value is never partial, because only a predicate reads it.
      weight: how often it runs in one run of the program.
      in_loop: whether it is inside a loop.
    """

    kind: Literal["input", "output", "row", "annotation", "value", "predicate"]
    place: Place
    makes: tuple[int, ...] = ()
    aval: Any = None
    node: Node | None = None
    position: int = -1
    sliced: bool = False
    reduced: bool = False
    weight: float = 1.0
    in_loop: bool = False

    @property
    def at_boundary(self) -> bool:
        """Whether it is the type of an input or output of the program."""
        return self.kind in ("input", "output")

    def monoids(self, native: Mapping[int, frozenset[str]]) -> frozenset[str]:
        """The monoids under which the value can be partial without a pin.

        Arguments:
          native: for each value, the monoids under which some row yields it partial.
        """
        never = self.at_boundary or self.reduced or not self.makes
        return frozenset() if never else native.get(self.makes[0], frozenset())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """One read of a value.

    Arguments:
      kind: `operand` of a row, `annotated`, `barrier`, `entry` of a region, `exit` of a region, or
          `output` of the program.
      place: where a typing stores the type in which it is read.
      operand: the value or constant that is read.
      end: the end at which it is read.
      node: the reader; None for an output of the program.
      number: position among the operands of the node; of an exit, among the outputs of its region;
          of a program's output, among the program's outputs.
      entry, exit: of a read that enters or leaves a region; None for other kinds.
      weight: how often it is read in one run of the program.
      in_loop: whether it is read inside a loop.
    """

    kind: Literal["operand", "annotated", "barrier", "entry", "exit", "output"]
    place: Place
    operand: Operand
    end: End
    node: Node | None
    number: int
    entry: Entry | None = None
    exit: Exit | None = None
    weight: float = 1.0
    in_loop: bool = False

    @property
    def free(self) -> bool:
        """Whether every policy allows every conversion here: at annotations and at outputs of the
        program."""
        return self.kind in ("annotated", "output")

    @property
    def at_region(self) -> bool:
        """Whether the value enters or leaves the region of a loop or branch."""
        return self.kind in ("entry", "exit")

    @property
    def span(self) -> Span | None:
        """The reader's line; None for outputs of the program."""
        return self.node.span if self.node else None

    @property
    def predicate(self) -> bool:
        """Whether the value is the predicate of a cond or while."""
        return "predicate" in [e.kind for e in (self.entry, self.exit) if e is not None]

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
            return "the annotated value"
        if self.entry is not None:
            # With one region, the number counts all operands. With several regions, it counts the
            # operands of one kind.
            one = len(self.node.regions) == 1
            return _ENTRIES[self.entry.kind].format(
                number=self.entry.operand if one else self.entry.number,
                constant="constant" if interface_of(self.node).loop else "operand",
            )
        operand = f"operand {self.number}"
        return _EXITS[self.exit.kind].format(self.exit) if self.exit else operand

    @property
    def text(self) -> str:
        """The reason in words."""
        if self.node is None:
            return f"{self.role} of the program"
        own = self.node.primitive is annotate_p
        return self.role if own else f"{self.role} of {self.node.name}"


_ENTRIES = {
    "predicate": "predicate",
    "constant": "{constant} {number}",
    "carry": "initial carry {number}",
    "slice": "scanned operand {number}",
}
"""The role of a value that enters a region, by the kind of the entry."""

_EXITS = {
    "predicate": "predicate",
    "carry": "carry {0.number}",
    "stacked": "stacked result {0.number}",
    "result": "result {0.number} of branch {0.region}",
}
"""The role of a value that a region returns, by the kind of the exit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A program as decisions and edges, in program order.

    Arguments:
      graph: the program.
      decisions: all of them; an `End` names one by its number.
      edges: all reads.
      makers: for each value, the end at which it is made.
      weights: for each value, how often it is made in one run of the program.
    """

    graph: Graph
    decisions: tuple[Decision, ...]
    edges: tuple[Edge, ...]
    makers: Mapping[int, End] = field(repr=False)
    weights: Mapping[int, float] = field(repr=False)

    def into(self) -> tuple[list[Edge], ...]:
        """For each decision, the edges that end at it."""
        found = group_by(self.edges, lambda edge: edge.end.variable)
        return tuple(found.get(number, []) for number in range(len(self.decisions)))

    def readers(self) -> dict[int, list[Edge]]:
        """For each value that is read, its reads."""
        found = group_by(self.edges, lambda edge: edge.operand)
        return {value: reads for value, reads in found.items() if isinstance(value, int)}

    def reads(self) -> dict[Place, Edge]:
        """The edge of each read, by its place."""
        return {edge.place: edge for edge in self.edges}


def flow_of(graph: Graph, ties: Mapping[int, int] | None = None) -> Flow:
    """Lists the decisions and edges of a program.

    Arguments:
      graph: the program.
      ties: for each output that has the type of an input, the input.
    """
    walk, ties = _Walk(graph), ties or {}
    for position, value in enumerate(graph.inputs):
        walk.decide(
            Decision(
                kind="input",
                place=("value", value),
                makes=(value,),
                aval=graph.avals[value],
                position=position,
            )
        )
    walk.visit(graph)
    for position, operand in enumerate(graph.outputs):
        place = "output", position
        decision = Decision(kind="output", place=place, aval=graph.aval(operand), position=position)
        walk.edges.append(
            Edge(
                kind="output",
                place=place,
                operand=operand,
                end=walk.makers[graph.inputs[ties[position]]]
                if position in ties
                else walk.decide(decision),
                node=None,
                number=position,
            )
        )
    return Flow(
        graph=graph,
        decisions=tuple(walk.decisions),
        edges=tuple(walk.edges),
        makers=walk.makers,
        weights=walk.weights,
    )


class _Walk:
    """Lists decisions and edges in program order. Its methods take how often a place of the program
    runs in one run of the program, and whether it is inside a loop."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.decisions: list[Decision] = []
        self.edges: list[Edge] = []
        self.makers: dict[int, End] = {}
        self.weights: dict[int, float] = {}

    def decide(self, decision: Decision) -> End:
        end = End(len(self.decisions))
        self.decisions.append(decision)
        self.makers.update(dict.fromkeys(decision.makes, end))
        return end

    def visit(self, graph: Graph, weight: float = 1.0, in_loop: bool = False) -> None:
        made = (*graph.inputs, *(v for node in graph.nodes for v in node.outputs))
        self.weights.update(dict.fromkeys(made, weight))
        for node in graph.nodes:
            if node.regions:
                self.regions(node, weight, in_loop)
            elif node.op in SAME:
                self.values(node, weight, in_loop)
            else:
                self.row(node, weight, in_loop)

    def row(self, node: Node, weight: float, in_loop: bool) -> None:
        number = self.decide(
            Decision(
                kind="row",
                place=("row", node.id),
                makes=node.outputs,
                node=node,
                weight=weight,
                in_loop=in_loop,
            )
        ).variable
        self.edges += [
            Edge(
                kind="operand",
                place=("operand", node.id, i),
                operand=operand,
                end=End(number, i),
                node=node,
                number=i,
                weight=weight,
                in_loop=in_loop,
            )
            for i, operand in enumerate(node.inputs)
        ]
        columns = enumerate(node.outputs, len(node.inputs))
        self.makers.update((value, End(number, column)) for column, value in columns)

    def value(self, node: Node, value: int) -> End:
        """A result of an annotation or barrier; or of a cond, with one type for all branches."""
        return self.decide(
            Decision(
                kind="annotation" if node.op == annotate_p.name else "value",
                place=("value", value),
                makes=(value,),
                aval=self.graph.avals[value],
                node=node,
            )
        )

    def values(self, node: Node, weight: float, in_loop: bool) -> None:
        """An annotation or barrier: each result is its operand, in a type of its own."""
        for i, (operand, value) in enumerate(zip(node.inputs, node.outputs, strict=True)):
            self.edges.append(
                Edge(
                    kind="annotated" if node.op == annotate_p.name else "barrier",
                    place=("operand", node.id, i),
                    operand=operand,
                    end=self.value(node, value),
                    node=node,
                    number=i,
                    weight=weight,
                    in_loop=in_loop,
                )
            )

    def regions(self, node: Node, weight: float, in_loop: bool) -> None:
        """A scan, while or cond. The results of a loop are read after all its regions are walked,
        the results of a branch directly after the branch."""
        interface = interface_of(node)
        trips, branches = trips_of(node) or NO_TRIP, 1 if interface.loop else len(node.regions)
        inner, looped = weight * trips / branches, interface.loop or in_loop
        entered = [self.enter(node, e, weight, in_loop) for e in interface.entries]
        results = () if interface.loop else tuple(self.value(node, v) for v in node.outputs)
        for number, region in enumerate(node.regions):
            self.visit(region, inner, looped)
            of_loop = interface.exits if region is node.regions[-1] else ()
            for left in of_loop if interface.loop else interface.leaving(number):
                end = (
                    entered[left.entry.operand]
                    if left.entry is not None
                    else results[left.result]
                    if left.kind == "result"
                    else self.left(node, left)
                )
                self.edges.append(
                    Edge(
                        kind="exit",
                        place=("result", node.id, left.region, left.output),
                        operand=node.regions[left.region].outputs[left.output],
                        end=end,
                        node=node,
                        number=left.output,
                        exit=left,
                        weight=inner,
                        in_loop=looped,
                    )
                )

    def enter(self, node: Node, entry: Entry, weight: float, in_loop: bool) -> End:
        """An operand of regions. It has one type in all regions that it enters; a carry has the
        same type where it leaves."""
        values = tuple(node.regions[r].inputs[position] for r, position in entry.inputs)
        place = "operand", node.id, entry.operand
        results = node.outputs[entry.result : entry.result + 1] if entry.kind == "carry" else ()
        decision = (
            Decision(kind="predicate", place=place, node=node)
            if entry.kind == "predicate"
            else Decision(
                kind="value",
                place=("value", values[0]),
                makes=(*values, *results),
                aval=self.graph.avals[values[0]],
                node=node,
                sliced=entry.kind == "slice",
                reduced=entry.decides,
            )
        )
        end = self.decide(decision)
        self.edges.append(
            Edge(
                kind="entry",
                place=place,
                operand=node.inputs[entry.operand],
                end=End(end.variable, int(decision.sliced)),
                node=node,
                number=entry.operand,
                entry=entry,
                weight=weight,
                in_loop=in_loop,
            )
        )
        return end

    def left(self, node: Node, left: Exit) -> End:
        """A stacked result of a loop, or its predicate."""
        place = "result", node.id, left.region, left.output
        if left.kind == "predicate":
            return self.decide(Decision(kind="predicate", place=place, node=node))
        region, value = node.regions[left.region], node.outputs[left.result]
        end = self.decide(
            Decision(
                kind="value",
                place=place,
                makes=(value,),
                aval=region.aval(region.outputs[left.output]),
                node=node,
                sliced=True,
            )
        )
        self.makers[value] = End(end.variable, 1)
        return end


# ---- sums ---------------------------------------------------------------------------------------
# In which dtype the parts of a sum over devices are added: `reduce_dtype` of `sbp.jit` and
# `sbp.annotate`.
#
# Without `reduce_dtype`, a sum is the platform's own collective in the dtype of its value, as in
# `jax.jit` (a TPU adds bfloat16 in bfloat16). With it, parts that are narrower are added in the
# wider dtype, and a cast that the user wrote from a wider dtype may round the parts before the sum.


Carried = Callable[[Node], Iterator[int]]
"""For a node with rows, the positions of operands that some row takes as parts of a sum."""

Sums = Mapping[int, str]
"""For each value whose `reduce_dtype` the user chose, the name of that dtype."""


def is_real(dtype: Any) -> bool:
    """Whether a dtype is a real float."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def holds(dtype: Any, other: Any) -> bool:
    """Whether each value of one real float dtype is a value of another one.

    Arguments:
      dtype: the dtype that may hold the values.
      other: the dtype of the values.

    >>> holds(jnp.float32, jnp.bfloat16), holds(jnp.float16, jnp.bfloat16)
    (True, False)
    """
    ours, theirs = jnp.finfo(dtype), jnp.finfo(other)
    return bool(
        ours.nmant >= theirs.nmant
        and ours.maxexp >= theirs.maxexp
        and ours.minexp - ours.nmant <= theirs.minexp - theirs.nmant
    )


def wide(dtype: Any, chosen: str | None) -> str | None:
    """The dtype in which parts are added instead of their own.

    Arguments:
      dtype: the dtype of the parts.
      chosen: the `reduce_dtype` of their value; None for none.

    Returns:
      `chosen` where it is wider; None for the platform's own sum.

    >>> wide(jnp.bfloat16, "float32"), wide(jnp.float32, "bfloat16")
    ('float32', None)
    """
    is_chosen = chosen is not None and is_real(dtype)
    return chosen if is_chosen and holds(chosen, dtype) and not holds(dtype, chosen) else None


def is_rounding_cast(graph: Graph, node: Node) -> bool:
    """Whether a node casts a real float to one that does not hold all its values."""
    traits = traits_of(node.op)
    if not (traits.carries == "rounded" and traits.adapts):
        return False
    source, target = graph.aval(node.inputs[0]).dtype, graph.avals[node.outputs[0]].dtype
    return is_real(source) and is_real(target) and not holds(target, source)


def allowing(graph: Graph, node: Node) -> str | None:
    """The `reduce_dtype` with which a cast may round the parts of a sum; None for other nodes, and
    for casts to a dtype that is no `reduce_dtype`."""
    if not is_rounding_cast(graph, node):
        return None
    name = str(graph.avals[node.outputs[0]].dtype)
    return name if name in REDUCE_DTYPES else None


def rounding_casts(graph: Graph, sums: Sums) -> frozenset[int]:
    """The casts that may round parts before they are summed: casts to a dtype that holds every
    value of the `reduce_dtype` of their result.

    Arguments:
      graph: the program.
      sums: the values with a `reduce_dtype`.

    Returns:
      Node ids.
    """
    return frozenset(
        node.id
        for node in graph.walk()
        if is_rounding_cast(graph, node)
        and (chosen := sums.get(node.outputs[0])) is not None
        and holds(graph.avals[node.outputs[0]].dtype, chosen)
    )


def chosen_sums(flow: Flow, reduce_dtype: str | None, carried: Carried) -> Sums:
    """The values whose `reduce_dtype` the user chose.

    Arguments:
      flow: the decisions and edges of the program.
      reduce_dtype: the name of a dtype for every value of the program; None for the values whose
        parts may reach an annotation with a `reduce_dtype`.
      carried: says which operands of a node may be parts of a sum whose results are parts, too.

    Returns:
      The dtype of each value. Where an annotation chooses, these are its operand and all values
      whose parts may reach it: a sum that the plan makes earlier, such as before a transpose or
      before a loop, is in that dtype as well. It overrides `reduce_dtype`. Of several annotations
      that a value reaches, the dtype that holds the values of all counts.
    """
    graph = flow.graph
    reals = (v for v, aval in graph.avals.items() if is_real(aval.dtype))
    found = dict.fromkeys(reals, reduce_dtype) if reduce_dtype is not None else {}
    choices: dict[str, list[int]] = defaultdict(list)
    for node in graph.walk():
        pin: Pin | None = node.params["pin"] if node.op == annotate_p.name else None
        if pin is not None and pin.reduce_dtype is not None:
            # What a pin leaves partial is summed later: by a reader, or by `Partial.reduce`.
            choices[pin.reduce_dtype] += [o for o in node.inputs if isinstance(o, int)]
            choices[pin.reduce_dtype] += node.outputs if pin.type.is_partial else ()
    sources = _sources(flow, carried) if choices else {}
    own: dict[int, str] = {}
    for choice in sorted(choices):
        for value in _reaching(graph, choices[choice], sources):
            own[value] = widest(own.get(value, choice), choice)
    return {**found, **own}


def widest(one: str, other: str) -> str:
    """A dtype that holds the values of two.

    >>> widest("bfloat16", "float16")
    'float32'
    """
    return one if holds(one, other) else other if holds(other, one) else "float32"


def _reaching(graph: Graph, starts: Sequence[int], sources: Mapping[int, list[int]]) -> set[int]:
    """The values whose parts may reach some values, these included."""

    def real(values: Sequence[int]) -> list[int]:
        return [v for v in values if is_real(graph.avals[v].dtype)]

    return set(reached(real(starts), lambda v: real(sources.get(v, []))))


def _sources(flow: Flow, carried: Carried) -> dict[int, list[int]]:
    """For each value, the values whose parts may become its own."""
    found: dict[int, list[int]] = defaultdict(list)
    for decision, edges in zip(flow.decisions, flow.into(), strict=True):
        if decision.kind == "row" and decision.node is not None:
            numbers = frozenset(carried(decision.node))
            edges = [e for e in edges if e.number in numbers]
        reads = [e.operand for e in edges if isinstance(e.operand, int) and e.kind != "output"]
        for value in decision.makes:
            found[value] += reads
    return found
