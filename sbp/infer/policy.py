"""Rules on single boxing steps: the boxing policy of each mesh axis at one place of the program,
and the budgets there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sbp.limits import POLICIES, Policy
from sbp.signatures.factors import admissible
from sbp.trace.graph import Graph

POLICY_KINDS: dict[Policy, frozenset[str]] = {
    "auto": frozenset(
        {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "mask", "zero_pad"}
    ),
    "reduce": frozenset({"all_reduce", "reduce_scatter", "slice", "mask"}),
    "explicit": frozenset({"slice", "mask"}),
}
"""The steps that each boxing policy allows. It limits neither annotations nor outputs."""


@dataclass(frozen=True, slots=True)
class Ban:
    """What a budget forbids on a mesh.

    Arguments:
      kind: the collective; None for all.
      mesh_axes: positions of mesh axes. Collectives over one of them are forbidden.
      above: bytes. Collectives in which a device sends more are forbidden.
    """

    kind: str | None
    mesh_axes: frozenset[int]
    above: float

    def forbids(self, kind: str, mesh_axes: Iterable[int], bytes_sent: float) -> bool:
        """Whether it forbids a step.

        Arguments:
          kind: of the step.
          mesh_axes: positions of the mesh axes it runs over.
          bytes_sent: bytes that a device sends.
        """
        return (
            bytes_sent > self.above
            and (self.kind is None or self.kind == kind)
            and not self.mesh_axes.isdisjoint(mesh_axes)
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """The conversions that are allowed at one place of a program.

    Arguments:
      policies: the boxing policy of each mesh axis.
      bans: what budgets forbid.
    """

    policies: tuple[Policy, ...]
    bans: tuple[Ban, ...] = ()

    def allows(self, kind: str, mesh_axes: Iterable[int], bytes_sent: float) -> bool:
        """Whether a step is allowed.

        Arguments:
          kind: of the step.
          mesh_axes: positions of the mesh axes it runs over.
          bytes_sent: bytes that a device sends.

        >>> Rules(("auto", "reduce")).allows("all_gather", (1,), 8.0)
        False
        """
        axes = tuple(mesh_axes)
        kinds = all(kind in POLICY_KINDS[self.policies[a]] for a in axes)
        return kinds and not any(b.forbids(kind, axes, bytes_sent) for b in self.bans)

    def within(self, other: Rules) -> bool:
        """Whether the other rules allow everything that these rules allow."""
        looser = all(
            POLICIES.index(a) >= POLICIES.index(b)
            for a, b in zip(self.policies, other.policies, strict=True)
        )
        return looser and set(self.bans) >= set(other.bans)

    @property
    def unlimited(self) -> bool:
        """Whether they allow every conversion."""
        return not self.bans and all(p == "auto" for p in self.policies)


def late_values(graph: Graph, given: frozenset[int] = frozenset()) -> frozenset[int]:
    """The values of the backward pass and of the update: results of gradients, and values that are
    computed from them.

    Arguments:
      graph: the program.
      given: inputs of `graph` that are such values.
    """
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
    """The monoids through which a conversion may go where a budget forbids the direct step: S -> P
    -> B needs no all-gather.

    Arguments:
      dtype: of the value.
      monoids: the monoids under which the value can be partial. If there are none, the first monoid
        of the dtype is taken.
    """
    return monoids or frozenset(admissible(dtype)[:1])
