"""`sbp.Partial`: an unreduced value outside a plan, as one array with a leading dim for each mesh
axis on which it is partial."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sbp import _jax, _jax_call
from sbp.errors import ArgumentError
from sbp.infer.accumulation import Reduction, is_real, wide
from sbp.infer.space import TypeSpace, from_type
from sbp.kinds import Kind, made_of, reduce_dtype_name
from sbp.machine.mesh import mesh_spec
from sbp.run.boxing import Boxing
from sbp.run.execute import is_simulated, own_mesh
from sbp.run.specs import partition_spec
from sbp.signatures.factors import admissible
from sbp.signatures.kernels.shards import reduce_dims, sum_dtype
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
      reduce_dtype: the dtype in which `reduce` adds narrower parts, as in `sbp.annotate`; None for
          the platform's own sum. A plan gives its own `reduce_dtype` to a `Partial` that it
          returns. A plan that takes a `Partial` adds the parts by its own `reduce_dtype`.

    Raises:
      SbpError: `bad-argument` for parts that are no array or have too few dims, and for a type
        that is P on no mesh axis; `unknown-option` for another `reduce_dtype`.

    >>> import jax.numpy as jnp
    >>> Partial(jnp.array([1.0, 2.0]), NdSbp({"data": Unreduced()})).reduce().item()
    3.0
    """

    def __init__(self, parts: Any, type: NdSbp, reduce_dtype: Any = None) -> None:
        if not type.is_partial:
            raise ArgumentError(f"Partial: {type!r} is P on no mesh axis; pass the array itself")
        self.parts = parts
        self.type = type
        self.reduce_dtype = reduce_dtype_name(reduce_dtype)
        if len(parts.shape) < self.rank:
            raise ArgumentError(
                f"Partial: parts of shape {tuple(parts.shape)} have no leading dim for each of the"
                f" {self.rank} mesh axes on which {type!r} is P"
            )
        if self.monoid not in admissible(parts.dtype):
            known = ", ".join(admissible(parts.dtype)) or "no monoid"
            raise ArgumentError(f"Partial: {type!r} of {parts.dtype}, which has {known}")

    def tree_flatten(self) -> tuple[tuple[Any], tuple[NdSbp, str | None]]:
        """The pytree: one leaf, the parts."""
        return (self.parts,), (self.type, self.reduce_dtype)

    @classmethod
    def tree_unflatten(cls, known: tuple[NdSbp, str | None], children: tuple[Any]) -> Partial:
        """The inverse of `tree_flatten`."""
        found = object.__new__(cls)  # JAX also passes what is no array, such as None
        found.parts, (found.type, found.reduce_dtype) = children[0], known
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
        """The value: parts reduced over their leading dims.

        Parts on a mesh are reduced by the collectives of a plan that converts the type to B, under
        `reduce_dtype`. Parts without a mesh, and those inside of another JAX function, are added in
        float32 where they are narrower, as by `jnp.sum`.

        Raises:
          SbpError: `bad-argument` for what JAX put in the place of the parts, such as None.
        """
        if not _PARTS.accepts(self.parts):
            raise _PARTS.refusal("Partial.reduce", "parts", self.parts)
        mesh = self._mesh()
        if mesh is not None:
            return _on_mesh(self, mesh)
        x, dims = self.parts, tuple(range(self.rank))
        if self.monoid != "sum" or not is_real(x.dtype):
            return reduce_dims(x, self.monoid, dims)
        return reduce_dims(jnp.asarray(x, sum_dtype(x.dtype)), "sum", dims).astype(x.dtype)

    def _mesh(self) -> Mesh | None:
        """The mesh of the parts; None where they are on no mesh that has the axes of the type, and
        for parts without elements."""
        sharding = getattr(self.parts, "sharding", None)
        if isinstance(self.parts, _jax.Tracer) or not isinstance(sharding, NamedSharding):
            return None
        mesh = sharding.mesh
        if not isinstance(mesh, Mesh) or not set(self.type) <= set(mesh.axis_names):
            return None
        sizes = tuple(mesh.shape[axis] for axis in partial_axes(self.type, mesh))
        fits = sizes == self.parts.shape[: self.rank] and 0 not in self.parts.shape
        return mesh if fits else None

    def __repr__(self) -> str:
        how = f", reduce_dtype={self.reduce_dtype}" if self.reduce_dtype else ""
        parts = getattr(self.parts, "shape", self.parts)
        return f"Partial({parts}, {self.type!r}{how})"


def partial_axes(t: NdSbp, mesh: Mesh) -> list[str]:
    """The mesh axes on which a type is P, outer first."""
    return [str(a) for a in mesh.axis_names if isinstance(t.get(str(a)), Unreduced)]


def _on_mesh(partial: Partial, mesh: Mesh) -> jax.Array:
    """The reduction of parts by the collectives of a plan on their mesh."""
    parts = partial.parts
    simulated = is_simulated(mesh)
    with _jax_call.without_context_mesh():
        sharding, run = _reducer(
            mesh, partial.type, parts.shape[partial.rank :], parts.dtype, partial.reduce_dtype
        )
        if not parts.sharding.is_equivalent_to(sharding, parts.ndim):
            parts = jax.device_put(parts, sharding)
        # See `Executable`: simulated devices abort when too many executions are in flight.
        found = run(jax.block_until_ready(parts) if simulated else parts)
        return jax.block_until_ready(found) if simulated else found


@functools.lru_cache(maxsize=256)
def _reducer(
    mesh: Mesh, t: NdSbp, shape: tuple[int, ...], dtype: Any, reduce_dtype: str | None
) -> tuple[NamedSharding, Any]:
    """The sharding of parts on a mesh, and the compiled function that reduces them.

    Arguments:
      mesh: the mesh.
      t: their type.
      shape: the shape of the value.
      dtype: its dtype.
      reduce_dtype: as in `Partial`.
    """
    spec, axes = mesh_spec(mesh), partial_axes(t, mesh)
    source = from_type(t, spec)
    target = tuple(max(c, 0) for c in source)
    monoids = frozenset(a.monoid for a in t.values() if isinstance(a, Unreduced))
    forced = frozenset((k, c - 1) for k, c in enumerate(source) if c > 0)
    reduction = Reduction(wide(dtype, reduce_dtype))
    space = TypeSpace(shape, dtype.itemsize, spec, monoids, forced, reduction)
    steps, boxing = space.path(source, target), Boxing(spec)
    after = partition_spec(target, spec, len(shape))

    def body(part: Any) -> Any:
        return boxing.run(part.reshape(part.shape[len(axes) :]), shape, steps)

    before = PartitionSpec(*axes, *after)
    mapped = jax.shard_map(
        body, mesh=own_mesh(mesh), in_specs=before, out_specs=after, check_vma=False
    )
    jitted = jax.jit(mapped, out_shardings=NamedSharding(mesh, after))
    return NamedSharding(own_mesh(mesh), before), jitted
