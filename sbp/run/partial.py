"""`sbp.Partial`: an unreduced value outside a plan, as one array with a leading dim for each mesh
axis on which it is partial."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sbp import _jax
from sbp.errors import ArgumentError
from sbp.kinds import Kind, made_of
from sbp.signatures.factors import admissible
from sbp.signatures.kernels.shards import reduced
from sbp.types import NdSbp, Unreduced

_TYPE = Kind('an NdSbp, such as sbp.parse("data:P(sum)")', lambda x: isinstance(x, NdSbp))
_PARTS = Kind(
    "an array with a leading dim for each mesh axis on which the type is P",
    lambda x: isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufcV"),
)


@jax.tree_util.register_pytree_node_class
@made_of("Partial", parts=_PARTS, type=_TYPE)
class Partial:
    """An unreduced value. A plan returns one for an output pinned P, and takes one for an input
    pinned P.

    Arguments:
      parts: an array with one leading dim for each mesh axis on which `type` is P, split over that
          axis. The value is the reduction over these dims.
      type: the type, with P on at least one mesh axis.

    Raises:
      SbpError: `bad-argument` for parts that are no array or have too few dims, and for a type
        that is P on no mesh axis.

    >>> import jax.numpy as jnp
    >>> Partial(jnp.array([1.0, 2.0]), NdSbp({"data": Unreduced()})).reduce().item()
    3.0
    """

    def __init__(self, parts: Any, type: NdSbp) -> None:
        if not type.is_partial:
            raise ArgumentError(f"Partial: {type!r} is P on no mesh axis; pass the array itself")
        self.parts = parts
        self.type = type
        if len(parts.shape) < self.rank:
            raise ArgumentError(
                f"Partial: parts of shape {tuple(parts.shape)} have no leading dim for each of the"
                f" {self.rank} mesh axes on which {type!r} is P"
            )
        if self.monoid not in admissible(parts.dtype):
            known = ", ".join(admissible(parts.dtype)) or "no monoid"
            raise ArgumentError(f"Partial: {type!r} of {parts.dtype}, which has {known}")

    def tree_flatten(self) -> tuple[tuple[Any], NdSbp]:
        """The pytree: one leaf, the parts."""
        return (self.parts,), self.type

    @classmethod
    def tree_unflatten(cls, type: NdSbp, children: tuple[Any]) -> Partial:
        """The inverse of `tree_flatten`."""
        found = object.__new__(cls)  # JAX also passes what is no array, such as None
        found.parts, found.type = children[0], type
        return found

    @property
    def monoid(self) -> str:
        """The monoid that reduces the parts."""
        return next(a.monoid for a in self.type.values() if isinstance(a, Unreduced))

    @property
    def rank(self) -> int:
        """How many leading dims hold parts."""
        return sum(isinstance(a, Unreduced) for a in self.type.values())

    def reduce(self) -> jax.Array:
        """The value: parts reduced over their leading dims."""
        return reduced(self._together(), self.monoid, tuple(range(self.rank)))

    def _together(self) -> Any:
        """The parts, all of them on each device. XLA's reduction across devices would drop NaN on
        CPU, and has no bitwise monoids there."""
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
