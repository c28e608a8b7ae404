"""sbp.Partial: an unreduced value outside a plan, as one array with a leading dim for each partial
mesh axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sbp import _jax
from sbp.signatures.kernels.shards import neutral
from sbp.types import NdSbp, Unreduced


@jax.tree_util.register_pytree_node_class
class Partial:
    """An unreduced value: what a plan returns for an output pinned P, and takes for an input pinned
    P.

    Arguments:
      parts: an array with one leading dim per partial mesh axis, split over it; the value is the
          reduction over those dims.
      type: the ND type, with at least one P.

    >>> Partial(jnp.array([1.0, 2.0]), NdSbp({"data": Unreduced()})).reduce().item()
    3.0
    """

    def __init__(self, parts: Any, type: NdSbp) -> None:
        self.parts = parts
        self.type = type

    def tree_flatten(self) -> tuple[tuple[Any], NdSbp]:
        """The pytree: one leaf, the parts."""
        return (self.parts,), self.type

    @classmethod
    def tree_unflatten(cls, type: NdSbp, children: tuple[Any]) -> Partial:
        """From the one leaf."""
        return cls(children[0], type)

    @property
    def monoid(self) -> str:
        """The monoid that joins the parts."""
        return next(a.monoid for a in self.type.values() if isinstance(a, Unreduced))

    @property
    def rank(self) -> int:
        """How many leading dims hold parts."""
        return sum(isinstance(a, Unreduced) for a in self.type.values())

    def reduce(self) -> jax.Array:
        """The value: parts reduced over their leading dims."""
        axes, parts = tuple(range(self.rank)), self._together()
        match self.monoid:
            case "sum":
                return jnp.sum(
                    parts, axes, dtype=parts.dtype
                )  # which NumPy would widen for small integers
            case "max":
                return jnp.max(parts, axes)
            case "min":
                return jnp.min(parts, axes)
            case "prod":
                return jnp.prod(parts, axes, dtype=parts.dtype)
            case monoid:
                op = lax.bitwise_and if monoid == "and" else lax.bitwise_or
                return lax.reduce(parts, neutral(monoid, parts.dtype), op, axes)

    def _together(self) -> Any:
        """The parts, each device with all of its own: a reduction across devices would be XLA's,
        which on CPU drops NaN and lacks bits."""
        sharding = getattr(self.parts, "sharding", None)
        if isinstance(self.parts, _jax.Tracer) or not isinstance(sharding, NamedSharding):
            return self.parts
        return jax.device_put(
            self.parts,
            NamedSharding(
                sharding.mesh, PartitionSpec(*(None,) * self.rank, *sharding.spec[self.rank :])
            ),
        )

    def __repr__(self) -> str:
        return f"Partial({self.parts.shape}, {self.type!r})"
