"""The request: a program, its mesh and everything else that its types are chosen by, as one frozen
value."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sbp.infer.accumulation import (
    Reduction,
    Sums,
    chosen_sums,
    has_choice,
    possible_casts,
    rounding_casts,
)
from sbp.infer.completeness import check_complete
from sbp.infer.flow import Flow, flow_of
from sbp.infer.memory_shares import MemoryShares, memory_shares
from sbp.infer.partials import native_partials
from sbp.infer.policy import Ban, Rules, late_values
from sbp.infer.prefetch import waited_shares
from sbp.infer.rows import NdRow, RowTable
from sbp.infer.together import reduced_together
from sbp.infer.value_space import Spaces
from sbp.limits import POLICIES, Budget, Policy, policies_in
from sbp.machine.mesh import MeshSpec
from sbp.trace.graph import Graph, Node, Operand
from sbp.types import MONOIDS

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
      layers: for inputs and for outputs, of each its path with the positions in lists left out:
        the leaves of all layers of a model have one such path. Empty where paths are not known.
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

    @property
    def ties(self) -> dict[int, int]:
        """For each output without a type of its own that has the type of an input, the input."""
        return {output: i for output, i in self.tied if self.outputs[output] is None}

    def partial_inputs(self, graph: Graph) -> dict[int, frozenset[str]]:
        """The monoids of the program's inputs that are pinned partial."""
        found = {
            value: frozenset(MONOIDS[-1 - c] for c in wanted or () if c is not None and c < 0)
            for value, wanted in zip(graph.inputs, self.inputs, strict=True)
        }
        return {value: monoids for value, monoids in found.items() if monoids}


class RequestCaches:
    """Row tables and type spaces, by mesh. A request shares them with all requests that are made
    from it by edits."""

    def __init__(self) -> None:
        self._tables: dict[tuple[MeshSpec, bool], RowTable] = {}
        self._spaces: dict[MeshSpec, Spaces] = {}
        self._rows: list[dict[int, tuple[NdRow, ...]]] = []

    def table(self, mesh: MeshSpec, *, communicates: bool) -> RowTable:
        """The rows of nodes on a mesh, with or without rows whose kernels have collectives."""
        key = mesh, communicates
        if key not in self._tables:
            self._tables[key] = RowTable(mesh, communicates=communicates)
        return self._tables[key]

    def spaces(self, mesh: MeshSpec) -> Spaces:
        """The types of shapes on a mesh, with the prices of their conversions."""
        if mesh not in self._spaces:
            self._spaces[mesh] = Spaces(mesh)
        return self._spaces[mesh]

    def rows_by_node(self) -> dict[int, tuple[NdRow, ...]]:
        """An empty dict for the rows of one request's nodes."""
        self._rows.append({})
        return self._rows[-1]

    def clear(self) -> None:
        """Frees their memory. Later requests compute them anew."""
        self._tables.clear()
        self._spaces.clear()
        for rows in self._rows:
            rows.clear()


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
        allow it (`infer.accumulation`); None leaves them to the platform, except where an
        annotation asks for a dtype.
      memory_limit: bytes per device; None for no limit.
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

    @functools.cached_property
    def communicates(self) -> bool:
        """Whether kernels with collectives are allowed anywhere in the program."""
        scoped = (self.rules(n) for n in self.graph.walk() if "sbp_policy." in n.scope)
        return any("auto" in rules.policies for rules in (self.rules(None), *scoped))

    @property
    def table(self) -> RowTable:
        """The rows of the program's nodes."""
        return self.caches.table(self.mesh, communicates=self.communicates)

    @property
    def spaces(self) -> Spaces:
        """The types of shapes on the mesh."""
        return self.caches.spaces(self.mesh)

    @functools.cached_property
    def flow(self) -> Flow:
        """The program's decisions and the edges between them."""
        flow = flow_of(self.graph, self.demand.ties)
        check_complete(flow)
        return flow

    @functools.cached_property
    def memory_shares(self) -> MemoryShares:
        """How much of what operations read and write reaches memory."""
        asked = dict(zip(self.graph.inputs, self.demand.inputs, strict=True))
        waited = waited_shares(self.graph, self.flow, asked, self.mesh)
        return memory_shares(self.graph, self.mesh, waited)

    @functools.cached_property
    def together(self) -> Mapping[int, int]:
        """For each value whose all-reduce starts with those of others, how many start with it."""
        return reduced_together(self.graph, self.mesh)

    def reduction(self, value: int, wide: str | None) -> Reduction:
        """How partial sums of a value are added up, and what else its conversions cost.

        Arguments:
          value: the value.
          wide: the wider dtype in which its parts are added; None for their own.
        """
        fused = value in self.memory_shares.fused
        return Reduction(wide, self.together.get(value, 1), fused)

    @functools.cached_property
    def native(self) -> Mapping[int, frozenset[str]]:
        """For each value of the program, the monoids under which some row yields it partial."""
        return self._native(self.rounding)

    def _native(self, rounding: frozenset[int]) -> Mapping[int, frozenset[str]]:
        seeds = self.demand.partial_inputs(self.graph)
        return native_partials(self.flow, self.table, seeds, rounding)

    def rows_of(self, node: Node) -> tuple[NdRow, ...]:
        """The rows of a node, also rows that its rules forbid."""
        if node.id not in self._rows:
            rows = self.table.rows_in(self.graph, node, self.native, self.rounding)
            self._rows[node.id] = rows
        return self._rows[node.id]

    @functools.cached_property
    def _rows(self) -> dict[int, tuple[NdRow, ...]]:
        """The rows of nodes by their ids: to find them in the table compares shapes."""
        return self.caches.rows_by_node()

    @functools.cached_property
    def sums(self) -> Sums:
        """The values with a `reduce_dtype`."""
        if self.given_sums is not None:
            return self.given_sums
        if not has_choice(self.graph):
            return chosen_sums(self.flow, self.reduce_dtype, lambda node: iter(()))
        casts = possible_casts(self.graph)
        native, table = self._native(casts), self.table

        def carried(node: Node) -> Iterator[int]:
            rows = table.rows_in(self.graph, node, native, casts)
            for k in range(len(node.inputs)):
                if any(c < 0 for row in rows for c in row.ins[k]):
                    yield k

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
        return self._rules_of(scope, backward=backward, in_loop=in_loop, free=free)

    def _rules_of(self, scope: str, *, backward: bool, in_loop: bool, free: bool) -> Rules:
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
    def strictest(self) -> Rules:
        """Rules that allow a conversion only where every place of the program allows it."""
        scopes = {n.scope for n in self.graph.walk() if "sbp_policy." in n.scope}
        every = [self.rules(None)]
        for scope in sorted(scopes):
            every.append(self._rules_of(scope, backward=False, in_loop=False, free=False))
        policies: list[Policy] = [
            POLICIES[max(POLICIES.index(r.policies[k]) for r in every)]
            for k in range(len(self.mesh.names))
        ]
        return Rules(tuple(policies), tuple(self.ban(b) for b in self.budgets))

    def origin(self, node: Node | None, position: int) -> Literal["program", "axis", "region"]:
        """Where the policy of a mesh axis comes from.

        Arguments:
          node: the reader.
          position: of the mesh axis.

        Returns:
          "program" or "axis" for the options of `sbp.jit`, "region" for a region around the node.
        """
        name = self.mesh.names[position]
        if node is not None and any(axis in ("", name) for _, axis in policies_in(node.scope)):
            return "region"
        return "axis" if any(self.axis_policies) and self.axis_policies[position] else "program"

    def ban(self, budget: Budget) -> Ban:
        """What a budget forbids on the mesh."""
        axes = (
            range(len(self.mesh.names))
            if budget.axis is None
            else (self.mesh.names.index(budget.axis),)
        )
        return Ban(budget.collective, frozenset(axes), budget.above)
