"""The `Graph`: a traced function as nodes over numbered values. Bodies of loops and branches are
graphs inside a node."""

import contextlib
import functools
import gc
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from sbp import _jax
from sbp.errors import SbpInternalError, Span
from sbp.trace import scopes

Item = TypeVar("Item")
Group = TypeVar("Group")


def group_by(items: Iterable[Item], key: Callable[[Item], Group]) -> dict[Group, list[Item]]:
    """Items by their keys, in the order of the first of each.

    >>> group_by(["one", "two", "three"], len)
    {3: ['one', 'two'], 5: ['three']}
    """
    found: dict[Group, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def reached(starts: Iterable[Item], onward: Callable[[Item], Iterable[Item]]) -> Iterator[Item]:
    """The items of `starts` and all items that they lead to. Each comes once, the nearest first.

    Arguments:
      starts: the first items.
      onward: the items to which an item leads.

    >>> list(reached([6], lambda n: [n // 2, n - 1] if n > 2 else []))
    [6, 3, 5, 1, 2, 4]
    """
    seen, waiting = set[Item](), list(starts)
    for item in waiting:
        if item not in seen:
            seen.add(item)
            yield item
            waiting += onward(item)


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A literal or an array that the function closes over: known before the plan, B on every mesh
    axis."""

    value: Any
    aval: Any


BARRIER = "optimization_barrier"
"""The operator that returns its operands; XLA does not merge computations across it."""

SAME = frozenset({"sbp_annotate", BARRIER})
"""Operators whose results equal their operands, one by one."""

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
    regions: "tuple[Graph, ...]" = ()
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
        """Whether the node computes the gradient of its line: it belongs to a backward pass,
        repeats no forward operation, and is not from the user's rule of a `custom_vjp`."""
        return self.backward and not self.is_recomputed and not _jax.in_users_rule(self.source_info)

    @property
    def is_batched(self) -> bool:
        """Whether the node was traced under `jax.vmap`, so that its arrays have dims that the user
        does not see."""
        return "vmap(" in self.scope

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
        for name, value in sorted(self.params.items()):
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
      output_names: paths of the results in what a function with hand-written regions returns.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    avals: dict[int, Any] = field(repr=False)
    input_names: tuple[str, ...] = ()
    inspections: tuple[Inspection, ...] = ()
    output_names: tuple[str, ...] = ()

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

    def graphs(self) -> "Iterator[Graph]":
        """This graph, then the regions of its nodes with theirs, in the order of the nodes."""
        yield self
        for node in self.nodes:
            for region in node.regions:
                yield from region.graphs()


def constant(value: Any) -> Constant:
    """A scalar of NumPy as a constant operand with its aval."""
    return Constant(value, _jax.empty_aval((), value.dtype))


def rewriting(
    rewrite: Callable[[Graph, Set[int], Iterator[int]], Graph],
) -> Callable[[Graph], Graph]:
    """Decorator: a rewrite of one graph becomes one of a program, of its graph and of all regions,
    inner ones first.

    Arguments:
      rewrite: takes a graph whose regions are rewritten already, the values that are read outside
        of its nodes or whose types the program asks for, which stay, and unused numbers of nodes.
        New values are entered in the table of avals.
    """

    @functools.wraps(rewrite)
    def rewritten(graph: Graph) -> Graph:
        inspected = {i.value for i in graph.inspections if isinstance(i.value, int)}
        ids = itertools.count(max((node.id for node in graph.walk()), default=0) + 1)

        def with_regions(graph: Graph) -> Graph:
            nodes = tuple(
                replace(n, regions=tuple(map(with_regions, n.regions))) if n.regions else n
                for n in graph.nodes
            )
            asked = inspected | {o for o in graph.outputs if isinstance(o, int)}
            return rewrite(replace(graph, nodes=nodes), asked, ids)

        return with_regions(graph)

    return rewritten


# ---- dataflow -----------------------------------------------------------------------------------
# Which operation makes each value of a program, how it enters regions, and who reads it.


@dataclass(frozen=True)
class Dataflow:
    """The values of a program, those of regions included.

    Arguments:
      graph: the program.
    """

    graph: Graph

    @functools.cached_property
    def makers(self) -> dict[int, Node]:
        """The node that makes a value; none for the inputs of the program and of regions."""
        return {v: node for node in self.graph.walk() for v in node.outputs}

    def maker(self, operand: Operand) -> Node | None:
        """The node that makes an operand; None for inputs and constants."""
        return self.makers.get(operand) if isinstance(operand, int) else None

    @functools.cached_property
    def entries(self) -> "dict[int, tuple[Node, Entry]]":
        """Of each input of the region of a loop or branch, the loop or branch, and how the operand
        enters it."""
        return {
            value: (node, entry)
            for node in self.graph.walk()
            for region, fed in zip(node.regions, interface_of(node).fed, strict=True)
            for value, entry in zip(region.inputs, fed, strict=True)
        }

    @functools.cached_property
    def readers(self) -> dict[Operand, list[Node | None]]:
        """The nodes that read an operand, in program order; then the loops and branches whose
        regions return it, and None where the program does."""
        nodes = list(self.graph.walk())
        reads: list[tuple[Operand, Node | None]] = [
            (o, node) for node in nodes for o in node.inputs
        ]
        reads += [(o, node) for node in nodes for r in node.regions for o in r.outputs]
        reads += [(o, None) for o in self.graph.outputs]
        found = defaultdict[Operand, list[Node | None]](list)
        for operand, reader in dict.fromkeys(reads):
            found[operand].append(reader)
        return found

    def within(self, value: Operand) -> list[Operand]:
        """What a value is that enters or leaves a region of a loop or branch: its operands, and the
        results of the regions. Empty for other values."""
        if isinstance(value, int) and value in self.entries:
            node, entry = self.entries[value]
            exits = interface_of(node).exits if entry.kind == "carry" else ()
            left = (node.regions[e.region].outputs[e.output] for e in exits if e.entry == entry)
            return [node.inputs[entry.operand], *left]
        maker = self.maker(value)
        if maker is None or maker.op not in CONTROL_FLOW:
            return []
        at = maker.outputs.index(value)
        exits = (e for e in interface_of(maker).exits if e.result == at)
        return [maker.regions[e.region].outputs[e.output] for e in exits]

    def sources(self, operand: Operand) -> Iterator[int]:
        """The values that an operand is: those that operations make or the program takes, through
        the regions of loops and branches; of a `cond`, through the first branch."""

        def inner(value: Operand) -> list[Operand]:
            found = self.within(value)
            return found if value in self.entries else found[:1]

        return (v for v in reached([operand], inner) if isinstance(v, int) and not self.within(v))


# ---- regions ------------------------------------------------------------------------------------
# The operands and results of the regions of a `scan`, `while` or `cond`, as data.
# `interface_of(node)` says what enters and leaves each region. Two modules read the parameters
# that count constants and carries: this one, and `plan.verify`, which checks plans without the
# code that made them.


NO_TRIP = 1e-6
"""Trips of a loop that has none, when types are chosen: its body needs types too, which then cost
next to nothing."""

WHILE_TRIPS = 8
"""The number of trips assumed for a `while` loop; the true number is unknown before it runs."""

SCAN = "scan"
"""The operator whose region runs a known number of times, on slices of its operands."""

LOOPS = frozenset({SCAN, "while"})
"""Operators whose regions run more than once."""

CONTROL_FLOW = LOOPS | {"cond"}
"""Operators whose regions have an `Interface`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How one operand of a node enters its regions.

    Arguments:
      kind: `predicate`: it chooses the branch and enters no region; `constant`: each trip and each
          branch reads the same value; `carry`: the first trip reads it, later trips read what the
          body returns; `slice`: each trip reads one index of its first dim.
      operand: position among the operands of the node.
      inputs: (region, position among the region's inputs) of each place where it enters; the body
          of a `while` comes before its predicate.
      number: position among the entries of its kind.
      result: position of the node's result that is the last value of the carry; -1 for other kinds.
      decides: whether only the predicate of a `while` reads it.
    """

    kind: Literal["predicate", "constant", "carry", "slice"]
    operand: int
    inputs: tuple[tuple[int, int], ...]
    number: int
    result: int = -1
    decides: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one output of a region leaves its node.

    Arguments:
      kind: `carry`: the next trip reads it; `stacked`: the results of all trips are stacked along a
          new first dim; `result`: a branch returns it; `predicate`: it says whether a `while` goes
          on.
      region: number of the region.
      output: position among the region's outputs.
      number: position among the exits of its kind in this region.
      result: position of the node's result; -1 for a predicate.
      entry: the carry to which it returns; None for other kinds.
    """

    kind: Literal["carry", "stacked", "result", "predicate"]
    region: int
    output: int
    number: int
    result: int = -1
    entry: Entry | None = None

    def entry_position(self, region: int) -> int:
        """The position of a carry among the inputs of a region."""
        assert self.entry is not None
        return next(position for r, position in self.entry.inputs if r == region)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What enters and what leaves the regions of a node.

    Arguments:
      loop: whether regions run more than once.
      entries: one for each operand, in order.
      exits: one for each output of each region, in order.
      fed: for each region and each of its inputs, the entry that feeds it.
    """

    loop: bool
    entries: tuple[Entry, ...]
    exits: tuple[Exit, ...]
    fed: tuple[tuple[Entry, ...], ...]

    def entering(self, kind: str) -> tuple[Entry, ...]:
        """The entries of a kind."""
        return tuple(e for e in self.entries if e.kind == kind)

    def leaving(self, region: int) -> tuple[Exit, ...]:
        """The exits of a region, one for each of its outputs."""
        return tuple(e for e in self.exits if e.region == region)

    def operands(self, kind: str, operands: Sequence[Any]) -> list[Any]:
        """Selects the operands of a kind.

        Arguments:
          kind: `predicate`, `constant`, `carry` or `slice`.
          operands: one item for each operand of the node.

        Returns:
          The items of the operands of that kind, in order.
        """
        return [operands[e.operand] for e in self.entering(kind)]

    def inputs(
        self,
        region: int,
        operands: Sequence[Any],
        *,
        carries: Sequence[Any] | None = None,
        slices: Sequence[Any] | None = None,
    ) -> list[Any]:
        """The inputs of a region, in order, made of items for the operands of the node.

        Arguments:
          region: number of the region.
          operands: one item for each operand of the node.
          carries: one item for each carry in this trip; None takes those of `operands`.
          slices: one item for each slice in this trip; None takes those of `operands`.
        """
        given = {"carry": carries, "slice": slices}
        return [
            operands[entry.operand] if found is None else found[entry.number]
            for entry in self.fed[region]
            for found in [given.get(entry.kind)]
        ]

    def exit_to(self, result: int) -> Exit:
        """The exit that becomes a result of the node; for a `cond` that of the first branch."""
        return next(e for e in self.exits if e.result == result)


def interface_of(node: Node) -> Interface:
    """The interface of a node's regions; an empty one for a node without regions.

    Raises:
      SbpInternalError: for a node with regions that is no scan, while or cond.
    """
    ins, outs, params = len(node.inputs), len(node.outputs), node.params
    match node.op:
        case "scan":
            constants, carries = params["num_consts"], params["num_carry"]
            return _interface(
                (
                    ("constant", constants, (0,)),
                    ("carry", carries, (0,)),
                    ("slice", ins - constants - carries, (0,)),
                ),
                ((("carry", carries), ("stacked", outs - carries)),),
                loop=True,
            )
        case "while":
            of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
            carries = ins - of_cond - of_body
            return _interface(
                (
                    ("constant", of_cond, (0,)),
                    ("constant", of_body, (1,)),
                    ("carry", carries, (1, 0)),
                ),
                ((("predicate", 1),), (("carry", carries),)),
                loop=True,
            )
        case "cond":
            branches = tuple(range(len(node.regions)))
            return _interface(
                (("predicate", 1, ()), ("constant", ins - 1, branches)),
                ((("result", outs),),) * len(branches),
                loop=False,
            )
        case _ if node.regions:
            raise SbpInternalError(f"no interface of the regions of {node.op}")
        case _:
            return _interface((), (), loop=False)


def body_of(loop: Node) -> int:
    """The number of the region of a loop that is its body."""
    return 0 if loop.op == SCAN else 1


def with_body_constants(
    loop: Node, body: Graph, read: Set[Operand], more: Mapping[int, Operand]
) -> Node:
    """A loop with another body, which has other constants.

    Arguments:
      loop: the loop.
      body: the new body, with the inputs of the old one.
      read: the values that it reads; constants that are not among them are left out.
      more: the values that it reads as constants besides, each with the operand of the loop.
    """
    number, is_scan = body_of(loop), loop.op == SCAN
    count = sum(entry.kind == "constant" for entry in interface_of(loop).fed[number])
    before = 0 if is_scan else loop.params["cond_nconsts"]
    kept = [k for k in range(count) if body.inputs[k] in read]
    inputs = (*(body.inputs[k] for k in kept), *more, *body.inputs[count:])
    return replace(
        loop,
        params=loop.params | {"num_consts" if is_scan else "body_nconsts": len(kept) + len(more)},
        inputs=(
            *loop.inputs[:before],
            *(loop.inputs[before + k] for k in kept),
            *more.values(),
            *loop.inputs[before + count :],
        ),
        regions=(*loop.regions[:number], replace(body, inputs=inputs)),
    )


@functools.lru_cache(maxsize=4096)
def _interface(
    entering: tuple[tuple[Any, int, tuple[int, ...]], ...],
    leaving: tuple[tuple[tuple[Any, int], ...], ...],
    *,
    loop: bool,
) -> Interface:
    """The interface of the regions of a loop or branch.

    Arguments:
      entering: groups of operands: their kind, their number, and the regions that they enter.
      leaving: for each region, groups of its outputs: their kind and their number.
      loop: whether regions run more than once.
    """
    counts: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)
    entries = tuple(
        Entry(
            kind=kind,
            operand=operand,
            inputs=tuple((region, next(counts[region])) for region in regions),
            number=number,
            result=number if kind == "carry" else -1,
            decides=loop and len(leaving) > 1 and regions == (0,),
        )
        for operand, (kind, regions) in enumerate(
            (kind, regions) for kind, count, regions in entering for _ in range(count)
        )
        for number in [next(counts[kind])]
    )
    carries = [entry for entry in entries if entry.kind == "carry"]
    exits = tuple(
        Exit(
            kind=kind,
            region=region,
            output=output,
            number=number,
            result=-1 if kind == "predicate" else output,
            entry=carries[number] if kind == "carry" else None,
        )
        for region, groups in enumerate(leaving)
        for output, (kind, number) in enumerate(
            (kind, number) for kind, count in groups for number in range(count)
        )
    )
    return Interface(
        loop=loop,
        entries=entries,
        exits=exits,
        fed=tuple(
            tuple(entry for entry in entries if region in dict(entry.inputs))
            for region in range(len(leaving))
        ),
    )


def amount(node: Node, of_regions: Sequence[float]) -> float:
    """The bytes that the regions of a node send when the node runs once.

    Arguments:
      node: the node.
      of_regions: the bytes that each region sends when it runs once.

    Returns:
      For a `cond` the largest of its branches, for a loop the sum over its trips.
    """
    return trips_of(node) * sum(of_regions) if node.op in LOOPS else max(of_regions, default=0.0)


def trips_are_assumed(node: Node) -> bool:
    """Whether the number of trips is not known before the region runs."""
    return node.op == "while"


def trips_of(node: Node) -> int:
    """How often a region's body runs."""
    if node.op == SCAN:
        return int(node.params["length"])
    return WHILE_TRIPS if trips_are_assumed(node) else 1


def nodes_with_runs(graph: Graph, runs: int = 1) -> Iterator[tuple[Node, int]]:
    """The nodes of a graph and of its regions, each with how often it runs when the graph runs
    once; in a branch, when that branch is taken."""
    for node in graph.nodes:
        yield node, runs
        for region in node.regions:
            yield from nodes_with_runs(region, runs * trips_of(node))


# ---- garbage collector --------------------------------------------------------------------------
# Python's garbage collector while a program is traced and planned.


YOUNG = 50_000
"""Number of new objects after which the collector runs; Python's default is 700 (2,000 from 3.12
on)."""


@contextlib.contextmanager
def collecting_less() -> Iterator[None]:
    """Makes the garbage collector run less often inside; also a decorator.

    Graphs, rows and costs are millions of small objects without cycles that stay alive, and
    repeated collections would take a third of the planning time. The call that raised the threshold
    restores it, even if another thread plans at that time.

    >>> with collecting_less():
    ...     gc.get_threshold()[0] >= YOUNG
    True
    """
    before = gc.get_threshold()
    raises = 0 < before[0] < YOUNG  # 0: it is off
    if raises:
        gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        if raises:
            gc.set_threshold(*before)
