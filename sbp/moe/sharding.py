"""The paper's annotations: which mesh axes split the groups, and which split the experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

import sbp


class Sharding(NamedTuple):
    """Where groups and experts live (GShard section 3.2).

    A program is annotated at three kinds of places and nowhere else: tokens are split on the group
    dim, expert weights and dispatched tokens on the expert dim, and outputs on the group dim again.
    These are two layouts, because dispatched tokens [E, G, C, M] have both dims and are split on
    one of them at a time.

    Attributes:
      groups: maps the dim `group` to the mesh axes that split it, outer first.
      experts: maps the dim `expert` to the mesh axes that split it, outer first.
    """

    groups: sbp.Layout
    experts: sbp.Layout

    @classmethod
    def over(cls, groups: Sequence[str], experts: Sequence[str]) -> Sharding:
        """Groups split over some mesh axes and experts over others; no axes leave a dim free.

        >>> Sharding.over(("data", "expert"), ("expert",)).experts.type("expert", None)
        expert:S(0)
        """
        return cls(
            sbp.Layout({"group": groups} if groups else None),
            sbp.Layout({"expert": experts} if experts else None),
        )

    def split_groups(self, x: jax.Array) -> jax.Array:
        """Pins dim 0 of tokens [G, ...], the groups."""
        return self.groups(x, "group", *[None] * (x.ndim - 1))

    def split_experts(self, x: jax.Array) -> jax.Array:
        """Pins dim 0 of a weight or of dispatched tokens [E, ...], the experts."""
        return self.experts(x, "expert", *[None] * (x.ndim - 1))


AXES = ("pod", "data", "expert", "model")
"""Names of mesh axes, outer first by custom: two of data parallelism, one that splits the experts,
and one of tensor parallelism."""


def sharding_of(mesh: Sequence[tuple[str, int]]) -> Sharding:
    """The annotations on a mesh: groups are split on every axis but `model`, experts on `expert`.

    Nothing is said of `model`: what is split there, as heads, hidden units or the vocabulary, is
    inferred.

    Arguments:
      mesh: name and size of each axis.

    >>> sharding_of((("data", 2), ("expert", 4), ("model", 2))).groups.type("group", None)
    data:S(0) expert:S(0)
    """
    names = tuple(name for name, _ in mesh)
    return Sharding.over(
        [name for name in names if name != "model"], [name for name in names if name == "expert"]
    )


PLAIN = Sharding.over((), ())
"""No annotation: a program for one device."""
