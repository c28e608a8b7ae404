"""The paper's annotations, and which mesh axes they name."""

from __future__ import annotations

from dataclasses import dataclass

import jax

import sbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where groups and experts live (GShard section 3.2).

    A program is annotated at three kinds of places and nowhere else: tokens are split on the group
    dim, expert weights and dispatched tokens on the expert dim, and outputs on the group dim again.

    Attributes:
      groups: mesh axes that split the group dim, outer first.
      experts: mesh axes that split the expert dim.
    """

    groups: tuple[str, ...] = ("data", "expert")
    experts: tuple[str, ...] = ("expert",)

    def split_groups(self, x: jax.Array) -> jax.Array:
        """Split dim 0, the groups, of tokens [G, ...]."""
        return sbp.annotate(x, **{mesh_axis: sbp.S(0) for mesh_axis in self.groups})

    def split_experts(self, x: jax.Array) -> jax.Array:
        """Split dim 0, the experts, of a weight or of dispatched tokens [E, ...]."""
        return sbp.annotate(x, **{mesh_axis: sbp.S(0) for mesh_axis in self.experts})


class NoLayout(Layout):
    """Plain JAX: no annotation at all."""

    def split_groups(self, x: jax.Array) -> jax.Array:
        return x

    def split_experts(self, x: jax.Array) -> jax.Array:
        return x


PLAIN = NoLayout(groups=(), experts=())
"""The layout of a program for one device."""
