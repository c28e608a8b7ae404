"""Which conversions are allowed where: the boxing policy of each mesh axis and region, and the
budgets, as rules on single steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sbp.limits import POLICIES, Policy
from sbp.signatures import Sent, kernel_named
from sbp.signatures.factors import admissible
from sbp.trace.graph import Graph

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


def late_values(graph: Graph, given: frozenset[int] = frozenset()) -> frozenset[int]:
    """The values that gradients make, and what is made of those: the backward pass and the
    update."""
    late = set(given)
    for node in graph.nodes:
        is_late = node.backward or not late.isdisjoint(o for o in node.inputs if isinstance(o, int))
        for region in node.regions:
            entering = frozenset(region.inputs) if is_late else frozenset[int]()
            inside = late_values(region, entering)
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
