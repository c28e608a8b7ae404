"""The request: a program, its mesh and everything else that its types are chosen by, as one frozen
value."""

import functools
import math
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sbp.annotations import Pin
from sbp.errors import SbpInternalError
from sbp.infer.cost import (
    MemoryShares,
    late_values,
    memory_shares,
    product_seconds,
    reduced_together,
)
from sbp.infer.flow import Flow, Sums, chosen_sums, flow_of, is_rounding_cast, rounding_casts, wide
from sbp.infer.rows import EMPTY, AxisRow, NdRow, RowTable, worth_having
from sbp.infer.space import Codes, Kept, Reduction, Spaces, kept_codes, local_bytes
from sbp.limits import POLICIES, Ban, Budget, Policy, Remat, Rules, policies_in
from sbp.machine.mesh import MeshSpec
from sbp.signatures import Row, traits_of
from sbp.signatures.region import REGION_OPS
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import MONOIDS, Unreduced

# ---- prefetches ---------------------------------------------------------------------------------
# Which operands of products a device fetches into its fast memory before the product runs.
#
# A TPU copies arguments of the program from its memory while it computes something else, so a
# product that reads weights late does not wait for them. The copies are free as long as the
# program computes for at least the time that they take; what they take beyond that is waited for.


Asked = Mapping[int, tuple[int | None, ...] | None]
"""For each argument of a program the type that is asked for it, in codes; None where it is free."""


def waited_shares(graph: Graph, flow: Flow, asked: Asked, mesh: MeshSpec) -> Mapping[int, float]:
    """For each argument of the program that products read, the share of the reading that they wait
    for; empty where the hardware fetches nothing ahead.

    The time that hides the reading is that of the program's products beyond their own traffic,
    split over all devices. An argument is read in the type that is asked for it, and whole where
    none is asked.

    Arguments:
      graph: the program.
      flow: its decisions.
      asked: types of its arguments.
      mesh: the mesh and its hardware.
    """
    if not mesh.hardware.fast_memory_bytes:
        return {}
    read, idle, taken, rate = set[int](), 0.0, 0.0, mesh.hardware.hbm_bytes_per_second
    rows = ((d, d.node) for d in flow.decisions if d.kind == "row" and d.node is not None)
    for decision, node in ((d, n) for d, n in rows if traits_of(n.op).flops is not None):
        idle += decision.weight * _idle_seconds(graph, node, mesh)
        for operand in {o for o in node.inputs if isinstance(o, int) and o in asked}:
            read.add(operand)
            codes = zip(asked[operand] or (), mesh.sizes, strict=False)
            parts = math.prod(n for c, n in codes if c is not None and c > 0)
            taken += decision.weight * (local_bytes(graph.avals[operand], (), ()) / parts / rate)
    return dict.fromkeys(sorted(read), max(0.0, 1.0 - idle / taken) if taken else 1.0)


def _idle_seconds(graph: Graph, node: Node, mesh: MeshSpec) -> float:
    """Seconds of a product in which memory is idle, with its work split over all devices."""
    ins, outs = ([graph.aval(o) for o in side] for side in (node.inputs, node.outputs))
    traffic = sum(local_bytes(a, (), ()) for a in (*ins, *outs))
    shapes, hardware = [a.shape for a in ins], mesh.hardware
    seconds = product_seconds(graph, node, shapes, [a.shape for a in outs], hardware)
    return max(0.0, seconds - traffic / hardware.hbm_bytes_per_second) / math.prod(mesh.sizes)


# ---- partial values -----------------------------------------------------------------------------
# The monoids under which each value of a program can be partial without a conversion to partial.


def native_partials(
    flow: Flow,
    table: RowTable,
    seeds: Mapping[int, frozenset[str]],
    rounding: Container[int] = (),
) -> Mapping[int, frozenset[str]]:
    """For each value, the monoids under which some row yields it partial, or a partial value
    reaches it. It is the least fixpoint over the edges.

    Arguments:
      flow: the program's decisions and edges.
      table: the rows.
      seeds: for each input that is pinned partial, its monoids.
      rounding: the ids of casts that may round the parts of a sum.
    """
    graph, native = flow.graph, dict(seeds)
    positions = {n: k for k, n in enumerate(table.mesh.sizes) if n > 1}
    if not positions:
        return native
    into = flow.into()
    readers = {
        value: {edge.end.variable for edge in reads if edge.kind != "output"}
        for value, reads in flow.readers().items()
    }
    every, waiting = range(len(table.mesh.sizes)), set(range(len(flow.decisions)))
    while waiting:  # each pass goes in program order, and only loops need a second one
        for number in sorted(waiting):
            waiting.discard(number)
            decision, node = flow.decisions[number], flow.decisions[number].node
            # An output whose type is tied to an input does not make the input partial.
            given = tuple(
                native.get(e.operand, EMPTY)
                if isinstance(e.operand, int) and e.kind != "output"
                else EMPTY
                for e in into[number]
            )
            found: dict[int, frozenset[str]] = defaultdict(frozenset)
            if decision.kind == "row" and node is not None:
                ins, outs = (tuple(map(graph.aval, v)) for v in (node.inputs, node.outputs))
                rows = (
                    row
                    for k in (every if node.op in REGION_OPS else positions.values())
                    for row in table.partial_rows(node, node.id in rounding, ins, outs, k)
                )
                for row_ins, yields in rows:
                    if worth_having(row_ins, given):
                        for result, monoid in yields:
                            found[node.outputs[result]] |= monoid
            else:
                found |= {v: _pinned_partial(node).union(*given) for v in decision.makes}
            for value, monoids in found.items():
                old = native.get(value, EMPTY)
                if not monoids <= old:
                    native[value] = old | monoids
                    waiting |= readers.get(value, set())
    return native


def _pinned_partial(node: Node | None) -> frozenset[str]:
    """The monoids under which an annotation pins its value partial."""
    pin: Pin | None = node.params.get("pin") if node is not None else None
    return frozenset(
        a.monoid for a in (pin.type if pin else {}).values() if isinstance(a, Unreduced)
    )


# ---- completeness -------------------------------------------------------------------------------
# Whether the walk over a program's decisions has all of the program in it: each operand, each
# result of a region and each output is read, and each value is made.


def check_complete(flow: Flow) -> None:
    """Compares a walk with the program, from which alone it is known what there is to read.

    Arguments:
      flow: the walk.

    Raises:
      SbpInternalError: when an operand or output is not read, or a value is not made.
    """
    nodes = list(flow.graph.walk())
    needed = {
        *(("operand", node.id, k) for node in nodes for k in range(len(node.inputs))),
        *(
            ("result", node.id, number, k)
            for node in nodes
            for number, region in enumerate(node.regions)
            for k in range(len(region.outputs))
        ),
        *(("output", k) for k in range(len(flow.graph.outputs))),
        *(("value", v) for graph in flow.graph.graphs() for v in graph.inputs),
        *(("value", v) for node in nodes for v in node.outputs),
    }
    has = {
        *flow.reads(),
        *(
            ("value", v)
            for number, decision in enumerate(flow.decisions)
            for v in decision.makes
            if v in flow.makers and flow.makers[v].variable == number
        ),
    }
    for missing in sorted(needed - has):
        raise SbpInternalError(f"the walk lacks {' '.join(map(str, missing))}")


# ---- requests -----------------------------------------------------------------------------------


TypeSource = Literal["in_types", "argument", "keyword argument"]
"""What asks the type of an input: the `in_types` of `sbp.jit`; without these, the sharding of the
argument; for a keyword argument, which `in_types` does not cover, always its sharding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The types asked for a program's inputs and outputs, in codes.

    Arguments:
      inputs: for each input, a code for each mesh axis, None on an axis that is free; None for an
        input that is free on all axes.
      outputs: for each output the same.
      tied: (output, input) positions that have the same type: a donated argument and the output
        that takes its buffer.
      sources: for each input, what asks the type; empty for "in_types" everywhere.
      padded_inputs, padded_outputs: positions of what is held padded between calls, so that its
        splits need not divide.
      layers: for inputs and for outputs, of each its path without the numbers of layers: the leaves
        of all layers of a model have one such path. Empty where paths are not known.
    """

    inputs: tuple[tuple[int | None, ...] | None, ...]
    outputs: tuple[tuple[int | None, ...] | None, ...]
    tied: tuple[tuple[int, int], ...] = ()
    sources: tuple[TypeSource, ...] = ()
    padded_inputs: frozenset[int] = frozenset()
    padded_outputs: frozenset[int] = frozenset()
    layers: tuple[tuple[Hashable, ...], tuple[Hashable, ...]] = ((), ())

    def alike(self, source: Literal["input", "output"], position: int) -> tuple[int, ...]:
        """The positions of the inputs or outputs that are one leaf in the layers of a model.

        Arguments:
          source: whether inputs or outputs are asked for.
          position: of one of them.
        """
        paths = self.layers[0 if source == "input" else 1]
        return tuple(i for i, p in enumerate(paths) if p == paths[position])

    def source(self, position: int) -> TypeSource:
        """What asks the type of the input at a position."""
        return self.sources[position] if self.sources else "in_types"

    def is_padded(self, kind: str, position: int) -> bool:
        """Whether the "input" or "output" at a position is held padded."""
        return position in (self.padded_inputs if kind == "input" else self.padded_outputs)


JOINT_AXES = 3
"""Most mesh axes of more than one device on which all rows of a node are enumerated together."""


class RequestCaches:
    """Row tables and type spaces, by mesh. A request shares them with all requests that are made
    from it by edits.

    `table(mesh, communicates=..)` has the rows of nodes on a mesh, with or without rows whose
    kernels have collectives, and `spaces(mesh)` the types of shapes with the prices of their
    conversions. `row_costs` has the rows that a cheapest typing may need, with their seconds, and
    `rows` the rows of the nodes of each request.
    """

    def __init__(self) -> None:
        self.table = functools.cache(RowTable)
        self.spaces = functools.cache(Spaces)
        self.row_costs: dict[Any, Any] = {}
        self.rows: list[dict[Any, tuple[NdRow, ...]]] = []

    def clear(self) -> None:
        """Frees their memory. Later requests compute them anew."""
        self.table.cache_clear()
        self.spaces.cache_clear()
        self.row_costs.clear()
        for rows in self.rows:
            rows.clear()


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Values of the forward pass that the backward pass recomputes.

    Arguments:
      ends: positions of nodes of the program; a segment ends before each. What follows the last
        one is kept.
      keeps_products: whether the results of products are kept.
    """

    ends: tuple[int, ...]
    keeps_products: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """A program, its mesh and everything else that its types are chosen by.

    Edit it with `dataclasses.replace`: the edited request shares `caches`.

    Arguments:
      graph: the program.
      mesh: the mesh and its hardware.
      demand: types asked for inputs and outputs.
      boxing: the policy of mesh axes without a policy of their own.
      axis_policies: the policy of each mesh axis, None for `boxing`; empty for None on every axis.
      budgets: the collectives that they forbid occur in no plan.
      reduce_dtype: the dtype of all sums over devices, as far as parts and casts of the program
        allow it (`infer.flow`); None leaves them to the platform, except where an
        annotation asks for a dtype.
      memory_limit: bytes per device; None for no limit.
      remat: whether a plan may recompute values of the forward pass to fit the memory limit.
      recomputed: what the program recomputes for that; None in a program as it was traced.
      donated: positions of donated inputs.
      reuse: whether the choice of types counts that the backward pass can reuse conversions of the
        forward pass. Then it takes up to three times as long.
      given_sums: the values with a `reduce_dtype`, where the program was made from another one by
        `plan.saving`; None to find them.
      caches: row tables and type spaces.
    """

    graph: Graph = field(repr=False)
    mesh: MeshSpec
    demand: Demand
    boxing: Policy = "auto"
    axis_policies: tuple[Policy | None, ...] = ()
    budgets: tuple[Budget, ...] = ()
    reduce_dtype: str | None = None
    memory_limit: float | None = None
    remat: Remat = "auto"
    recomputed: Recomputation | None = None
    donated: tuple[int, ...] = ()
    reuse: bool = True
    given_sums: Sums | None = None
    caches: RequestCaches = field(default_factory=RequestCaches, compare=False, repr=False)

    # ---- what follows from the fields -----------------------------------------------------------

    @functools.cached_property
    def size(self) -> int:
        """The number of the program's nodes, those of regions included."""
        return sum(1 for _ in self.graph.walk())

    @functools.cached_property
    def late(self) -> frozenset[int]:
        """The values of the backward pass and of the update; empty where no budget depends on the
        pass."""
        passes = any(b.where in ("forward", "backward") for b in self.budgets)
        return late_values(self.graph) if passes else frozenset()

    @property
    def table(self) -> RowTable:
        """The rows of the program's nodes. Kernels with collectives are among them if the policies
        allow these anywhere in the program."""
        return self.caches.table(self.mesh, communicates=any("auto" in p for p in self._policies))

    @property
    def spaces(self) -> Spaces:
        """The types of shapes on the mesh."""
        return self.caches.spaces(self.mesh)

    @functools.cached_property
    def flow(self) -> Flow:
        """The program's decisions and the edges between them. An output without a type of its own
        that is tied to an input has the type of this input."""
        demand = self.demand
        flow = flow_of(self.graph, {o: i for o, i in demand.tied if demand.outputs[o] is None})
        check_complete(flow)
        return flow

    @functools.cached_property
    def memory_shares(self) -> MemoryShares:
        """How much of what operations read and write reaches memory."""
        asked = dict(zip(self.graph.inputs, self.demand.inputs, strict=True))
        return memory_shares(
            self.graph, self.mesh, waited_shares(self.graph, self.flow, asked, self.mesh)
        )

    @functools.cached_property
    def together(self) -> Mapping[int, int]:
        """For each value whose all-reduce starts with those of others, how many start with it."""
        return reduced_together(self.graph, self.mesh)

    def reduction(self, value: int) -> Reduction:
        """How partial sums of a value are added up, and what else its conversions cost."""
        return Reduction(
            wide(self.graph.avals[value].dtype, self.sums.get(value)),
            self.together.get(value, 1),
            value in self.memory_shares.fused,
        )

    @functools.cached_property
    def native(self) -> Mapping[int, frozenset[str]]:
        """For each value of the program, the monoids under which some row yields it partial."""
        return self._native(self.rounding)

    def _native(self, rounding: frozenset[int]) -> Mapping[int, frozenset[str]]:
        seeds = {
            value: frozenset(MONOIDS[-1 - c] for c in codes or () if c is not None and c < 0)
            for value, codes in zip(self.graph.inputs, self.demand.inputs, strict=True)
        }
        return native_partials(self.flow, self.table, seeds, rounding)

    def rows_of(self, node: Node, wanted: tuple[AxisRow | None, ...] = ()) -> tuple[NdRow, ...]:
        """The rows of a node, also rows that its rules forbid.

        Arguments:
          node: the node.
          wanted: for each mesh axis, the only row there if the node has it; empty for all rows.
        """
        key = node.id, wanted
        if key not in self._rows:
            self._rows[key] = self.table.rows_in(
                self.graph, node, self.native, self.rounding, wanted
            )
        return self._rows[key]

    @functools.cached_property
    def axes(self) -> tuple[int, ...]:
        """The positions of the mesh axes of more than one device."""
        return tuple(k for k, n in enumerate(self.mesh.sizes) if n > 1)

    def kept(self, types: Iterable[Codes]) -> Kept:
        """The codes that a large space of some types has on each mesh axis, empty for all."""
        return () if len(self.axes) <= JOINT_AXES else kept_codes(types)

    def rows_along(self, node: Node, position: int) -> tuple[NdRow, ...]:
        """Rows of a node that are, on one mesh axis, all rows that it has there."""
        if len(self.axes) <= JOINT_AXES:
            return self.rows_of(node)
        whole = NdRow.whole(len(node.inputs), len(node.outputs), len(self.mesh.sizes))
        return self.rows_of(node, whole.by_axis({position}))

    def axis_rows(
        self,
        node: Node,
        position: int,
        *,
        communicates: bool | None = None,
        operands: slice = slice(None),
    ) -> tuple[Row, ...]:
        """The rows of a node on one mesh axis.

        Arguments:
          node: the node.
          position: the position of the mesh axis.
          communicates: whether kernels of the rows may communicate; None where the node's policy
            allows it.
          operands: of a barrier, those that the rows are about.
        """
        if communicates is None:
            communicates = self.rules(node).policies[position] == "auto"
        ins, outs = (tuple(map(self.graph.aval, v[operands])) for v in (node.inputs, node.outputs))
        table = self.caches.table(self.mesh, communicates=communicates)
        return table.rows_on(node, node.id in self.rounding, ins, outs, position)

    @functools.cached_property
    def _rows(self) -> dict[Any, tuple[NdRow, ...]]:
        """The rows of nodes by their ids: to find them in the table compares shapes."""
        self.caches.rows.append({})
        return self.caches.rows[-1]

    @functools.cached_property
    def sums(self) -> Sums:
        """The values with a `reduce_dtype`."""
        if self.given_sums is not None:
            return self.given_sums
        # The casts that may round parts where all values have the `reduce_dtype` that allows most.
        casts = frozenset(n.id for n in self.graph.walk() if is_rounding_cast(self.graph, n))
        native, table = functools.cache(self._native), self.table

        def carried(node: Node) -> Iterator[int]:
            rows = table.rows_in(self.graph, node, native(casts), casts)
            numbers = range(len(node.inputs))
            return (k for k in numbers if any(c < 0 for row in rows for c in row.ins[k]))

        return chosen_sums(self.flow, self.reduce_dtype, carried)

    @functools.cached_property
    def rounding(self) -> frozenset[int]:
        """The ids of casts that may round the parts of a sum."""
        return rounding_casts(self.graph, self.sums)

    # ---- policies and budgets -------------------------------------------------------------------

    def rules(
        self,
        node: Node | None,
        *,
        value: Operand | None = None,
        in_loop: bool = False,
        free: bool = False,
    ) -> Rules:
        """The conversions that are allowed for a read.

        Arguments:
          node: the reader; None for an output of the program.
          value: the value that is read. The conversion of a value of the backward pass belongs to
            the backward pass, whichever node reads it.
          in_loop: whether the reader is inside a loop.
          free: whether the reader is an annotation or an output of the program. There budgets
            forbid conversions, and policies do not.
        """
        scope = "" if node is None or free or "sbp_policy." not in node.scope else node.scope
        backward = value in self.late or (
            node is not None and (node.backward or not self.late.isdisjoint(node.outputs))
        )
        key = scope, backward, in_loop, free
        if key not in self._rules:
            names = self.mesh.names
            policies: list[Policy] = [
                p or self.boxing for p in self.axis_policies or (None,) * len(names)
            ]
            for policy, axis in policies_in(scope):
                for k, name in enumerate(names):
                    if axis in ("", name):
                        policies[k] = policy
            bans = tuple(
                self.ban(b) for b in self.budgets if b.covers(backward=backward, in_loop=in_loop)
            )
            self._rules[key] = Rules(("auto",) * len(names) if free else tuple(policies), bans)
        return self._rules[key]

    @functools.cached_property
    def _rules(self) -> dict[tuple[str, bool, bool, bool], Rules]:
        return {}

    @functools.cached_property
    def _policies(self) -> frozenset[tuple[Policy, ...]]:
        """The policies of all mesh axes at some place of the program."""
        scoped = (n for n in self.graph.walk() if "sbp_policy." in n.scope)
        return frozenset(self.rules(n).policies for n in (None, *scoped))

    @functools.cached_property
    def strictest(self) -> Rules:
        """Rules that allow a conversion only where every place of the program allows it."""
        policies = tuple(max(own, key=POLICIES.index) for own in zip(*self._policies, strict=True))
        return Rules(policies, tuple(self.ban(b) for b in self.budgets))

    def origin(self, node: Node | None, position: int) -> Literal["program", "axis", "region"]:
        """Where the policy of a mesh axis comes from.

        Arguments:
          node: the reader.
          position: of the mesh axis.

        Returns:
          "program" or "axis" for the options of `sbp.jit`, "region" for a region around the node.
        """
        name = self.mesh.names[position]
        return (
            "region"
            if node is not None and any(axis in ("", name) for _, axis in policies_in(node.scope))
            else "axis"
            if any(self.axis_policies) and self.axis_policies[position]
            else "program"
        )

    def ban(self, budget: Budget) -> Ban:
        """What a budget forbids on the mesh."""
        axes = (
            range(len(self.mesh.names))
            if budget.axis is None
            else (self.mesh.names.index(budget.axis),)
        )
        return Ban(budget.collective, frozenset(axes), budget.above)
