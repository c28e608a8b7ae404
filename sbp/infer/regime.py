"""Which conversions are allowed where: the boxing policy of each mesh axis and region, and the
budgets, as rules on single steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sbp.limits import POLICIES, Budget, Policy, policies_in
from sbp.machine.mesh import MeshSpec
from sbp.signatures import Sent, kernel_named
from sbp.signatures.factors import admissible
from sbp.trace.graph import Graph, Node, Operand

POLICY_KINDS: dict[Policy, frozenset[str]] = {
    "auto": frozenset(
        {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "mask", "zero_pad"}
    ),
    "reduce": frozenset({"all_reduce", "reduce_scatter", "slice", "mask"}),
    "explicit": frozenset({"slice", "mask"}),
}
"""Which steps each boxing policy allows outside annotations and the boundary."""


@dataclass(frozen=True, slots=True)
class Ban:
    """What a budget forbids on a mesh: collectives of a kind (None: of any) over one of the axes
    that send more bytes than `above`."""

    kind: str | None
    mesh_axes: frozenset[int]
    above: float

    def forbids(self, kind: str, mesh_axes: Iterable[int], bytes_sent: float) -> bool:
        """Whether a step is one of them."""
        return (
            bytes_sent > self.above
            and (self.kind is None or self.kind == kind)
            and not self.mesh_axes.isdisjoint(mesh_axes)
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """What is allowed at one place: a policy for each mesh axis, and bans."""

    policies: tuple[Policy, ...]
    bans: tuple[Ban, ...] = ()

    def allows(self, kind: str, mesh_axes: Iterable[int], bytes_sent: float) -> bool:
        """Whether a step is allowed.

        >>> Rules(("auto", "reduce")).allows("all_gather", (1,), 8.0)
        False
        """
        axes = tuple(mesh_axes)
        kinds = all(kind in POLICY_KINDS[self.policies[a]] for a in axes)
        return kinds and not any(b.forbids(kind, axes, bytes_sent) for b in self.bans)

    def allows_kernel(self, kernels: tuple[str, ...]) -> bool:
        """Whether the policies allow what the kernels of a row send: collectives are conversions of
        a kind."""
        return all(
            p == "auto" or not kernel_named(k).communicates
            for p, k in zip(self.policies, kernels, strict=True)
        )

    def allows_sent(self, sends: Iterable[tuple[int, Sent]]) -> bool:
        """Whether no ban forbids what the kernels of a row send."""
        return not any(
            b.forbids(s.kind, (position,), s.bytes) for position, s in sends for b in self.bans
        )

    def within(self, other: Rules) -> bool:
        """Whether all that is allowed here is allowed there."""
        looser = all(
            POLICIES.index(a) >= POLICIES.index(b)
            for a, b in zip(self.policies, other.policies, strict=True)
        )
        return looser and set(self.bans) >= set(other.bans)

    @property
    def unlimited(self) -> bool:
        """Whether everything is allowed."""
        return not self.bans and all(p == "auto" for p in self.policies)


@dataclass(frozen=True, slots=True)
class Regime:
    """The policies and budgets of a program.

    Arguments:
      mesh: the mesh.
      base: the policy where nothing else is said.
      axis_policies: the policy of each mesh axis; None for `base`.
      budgets: what is forbidden.
      late: the values of the backward pass and of what follows from it.
    """

    mesh: MeshSpec
    base: Policy
    axis_policies: tuple[Policy | None, ...] = ()
    budgets: tuple[Budget, ...] = ()
    late: frozenset[int] = frozenset()

    def at(
        self,
        node: Node | None,
        *,
        value: Operand | None = None,
        in_loop: bool = False,
        free: bool = False,
    ) -> Rules:
        """The rules for what a node reads.

        Arguments:
          node: the reader; None for the program's results.
          value: what it reads: to convert what a gradient has made belongs to the backward pass,
              whoever reads it.
          in_loop: whether it is inside a loop.
          free: whether it is an annotation or the boundary, where policies do not hold but budgets
              do.
        """
        scope = "" if node is None or free or "sbp_policy." not in node.scope else node.scope
        backward = value in self.late or (
            node is not None and (node.backward or not self.late.isdisjoint(node.outputs))
        )
        return _rules(self, scope, backward, in_loop, free)

    def origin(self, node: Node | None, position: int) -> Literal["program", "axis", "region"]:
        """What sets the policy of a mesh axis for what a node reads: the program's, that of the
        axis, or a region's around the node."""
        name = self.mesh.names[position]
        if node is not None and any(axis in ("", name) for _, axis in policies_in(node.scope)):
            return "region"
        return "axis" if any(self.axis_policies) and self.axis_policies[position] else "program"

    def ban(self, budget: Budget) -> Ban:
        """A budget on this mesh."""
        axes = (
            range(len(self.mesh.names))
            if budget.axis is None
            else (self.mesh.names.index(budget.axis),)
        )
        return Ban(budget.collective, frozenset(axes), budget.above)

    def strictest(self, graph: Graph) -> Rules:
        """Rules within those of every place of a program."""
        scopes = {n.scope for n in graph.walk() if "sbp_policy." in n.scope}
        every = [self.at(None), *(_rules(self, s, False, False, False) for s in sorted(scopes))]
        policies: list[Policy] = [
            POLICIES[max(POLICIES.index(r.policies[k]) for r in every)]
            for k in range(len(self.mesh.names))
        ]
        return Rules(tuple(policies), tuple(self.ban(b) for b in self.budgets))

    def communicates(self, graph: Graph) -> bool:
        """Whether kernels that send something are allowed anywhere."""
        every = [self.at(None), *(self.at(n) for n in graph.walk() if "sbp_policy." in n.scope)]
        return any("auto" in r.policies for r in every)


def _late(graph: Graph, given: frozenset[int] = frozenset()) -> frozenset[int]:
    """The values that gradients make, and what is made of those: the backward pass and the
    update."""
    late = set(given)
    for node in graph.nodes:
        is_late = node.backward or not late.isdisjoint(o for o in node.inputs if isinstance(o, int))
        for region in node.regions:
            entering = frozenset(region.inputs) if is_late else frozenset[int]()
            inside = _late(region, entering)
            late |= inside
            is_late = is_late or not inside.isdisjoint(
                o for o in region.outputs if isinstance(o, int)
            )
        if is_late:
            late.update(node.outputs)
    return frozenset(late)


def detour(dtype: Any, monoids: frozenset[str]) -> frozenset[str]:
    """The monoids that conversions may go through where budgets forbid the straight way: S -> P ->
    B needs no all-gather."""
    return monoids or frozenset(admissible(dtype)[:1])


@functools.lru_cache(maxsize=4096)
def _rules(regime: Regime, scope: str, backward: bool, in_loop: bool, free: bool) -> Rules:
    names = regime.mesh.names
    policies: list[Policy] = [
        p or regime.base for p in regime.axis_policies or (None,) * len(names)
    ]
    for policy, axis in policies_in(scope):
        for k, name in enumerate(names):
            if axis in ("", name):
                policies[k] = policy
    bans = tuple(
        regime.ban(b) for b in regime.budgets if b.covers(backward=backward, in_loop=in_loop)
    )
    if free:
        policies = ["auto"] * len(names)
    return Rules(tuple(policies), bans)


def regime_of(graph: Graph, mesh: MeshSpec, base: Policy, demand: Any) -> Regime:
    """The regime of a program under a demand (`infer.problem.Demand`)."""
    passes = any(b.where in ("forward", "backward") for b in demand.budgets)
    return Regime(
        mesh, base, demand.policies, demand.budgets, _late(graph) if passes else frozenset()
    )
