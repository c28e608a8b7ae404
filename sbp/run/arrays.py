"""Arrays outside of a plan: `sbp.Partial`, which is not reduced, and `sbp.Padded`, whose splits do
not divide."""

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sbp import _jax
from sbp.annotations import as_type, check_rank
from sbp.errors import ArgumentError, ArgumentTypeError, SbpError, nearest, refused
from sbp.infer.flow import is_real, wide
from sbp.infer.space import Reduction, TypeSpace, all_needs_of, from_type, is_even
from sbp.kinds import Kind, check_alive, is_whole, made_of, or_none, reduce_dtype_name, show, takes
from sbp.machine.mesh import MESH, Axes, mesh_spec
from sbp.run.boxing import run_steps
from sbp.run.execute import is_simulated, own_mesh, partition_spec, place_array
from sbp.signatures.factors import admissible
from sbp.signatures.kernels.shards import padded_blocks, reduce_dims, sum_dtype
from sbp.trace.places import HOST
from sbp.types import NdSbp, Split, Unreduced

# ---- partial ------------------------------------------------------------------------------------
# `sbp.Partial`: an unreduced value outside a plan, as one array with a leading dim for each mesh
# axis on which it is partial.


_PARTIAL_PARTS = Kind(
    "an array with a leading dim for each mesh axis on which the type is P",
    lambda x: isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind in "biufcV"),
)


class _InParts:
    """A value that is held in parts, and is no array for operators and functions of JAX.

    Attributes:
      _whole: the method that gives the array.
      _parts_shape: the shape that its parts are to have.
    """

    _whole: ClassVar[str]
    parts: Any
    _parts_shape: tuple[int, ...]

    @property
    def problem(self) -> str:
        """What is wrong with its parts, which JAX may have replaced; empty where nothing is."""
        if not _PARTS.accepts(self.parts):
            return f"has parts that are not an array, {show(self.parts)}"
        have, needed = tuple(self.parts.shape), self._parts_shape
        return "" if have == needed else f"has parts of shape {have}, which are not {needed}"

    def _checked(self) -> Any:
        """Its parts, for a reader of their elements.

        Raises:
          SbpError: `bad-argument` for a shape, and for what JAX put in their place.
        """
        if isinstance(self.parts, jax.ShapeDtypeStruct):
            raise refused(
                f"this {type(self).__name__} is of a ShapeDtypeStruct and has no elements; make one"
                " of an array, or restore a checkpoint into it",
                TypeError,
            )
        if self.problem:
            raise refused(
                f"this {type(self).__name__} {self.problem}; call {self._whole} before jax.vmap,"
                " jax.lax.scan or jax.tree.map changes the parts",
                TypeError,
            )
        return self.parts

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ArgumentTypeError(f"{self!r} is not an array until you call its {self._whole}")

    __jax_array__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised: its own error
            return object.__getattribute__(self, name)
        known = hasattr(jax.Array, name) and not name.startswith("_")
        until = f"; call its {self._whole} for an array" if known else ""
        raise AttributeError(f"sbp.{type(self).__name__} has no attribute {name!r}{until}")


@jax.tree_util.register_pytree_node_class
@made_of(
    "Partial",
    parts=_PARTIAL_PARTS,
    type=Kind('an NdSbp, such as sbp.parse("data:P(sum)")', lambda x: isinstance(x, NdSbp)),
)
class Partial(_InParts):
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
        that is P on no mesh axis; `dim-out-of-range` for a type that splits a dim that the value
        lacks; `unknown-option` for another `reduce_dtype`.

    >>> import jax.numpy as jnp
    >>> Partial(jnp.array([1.0, 2.0]), NdSbp({"data": Unreduced()})).reduce().item()
    3.0
    """

    _whole = ".reduce()"
    __array__ = _InParts._refuse

    def __init__(self, parts: Any, type: NdSbp, reduce_dtype: Any = None) -> None:
        if not type.is_partial:
            raise ArgumentError(f"Partial: {type!r} is P on no mesh axis; pass the array itself")
        self.parts, self._parts_shape = parts, tuple(parts.shape)
        self.type = type
        self.reduce_dtype = reduce_dtype_name(reduce_dtype)
        if len(parts.shape) < self.rank:
            raise ArgumentError(
                f"Partial: parts of shape {tuple(parts.shape)} have no leading dim for each of the"
                f" {self.rank} mesh axes on which {type!r} is P; stack the parts along such dims"
            )
        check_rank(type, len(parts.shape) - self.rank)
        if self.monoid not in admissible(parts.dtype):
            raise ArgumentError(
                f"Partial: an array of {parts.dtype} cannot be P({self.monoid}); convert it first"
            )

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """The pytree: one leaf, the parts."""
        return (self.parts,), (self.type, self.reduce_dtype, self._parts_shape)

    @classmethod
    def tree_unflatten(cls, known: Any, children: tuple[Any]) -> "Partial":
        """The inverse of `tree_flatten`."""
        found = object.__new__(cls)  # JAX also passes what is no array, such as None
        found.parts, (found.type, found.reduce_dtype, found._parts_shape) = children[0], known
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
          SbpError: `bad-argument` for what JAX put in the place of the parts, such as a slice.
        """
        x, dims = self._checked(), tuple(range(self.rank))
        mesh = self._mesh()
        if mesh is not None:
            check_alive(self.parts, "this Partial")
            return _on_mesh(self, mesh)
        return (
            reduce_dims(x, self.monoid, dims)
            if self.monoid != "sum" or not is_real(x.dtype)
            else reduce_dims(jnp.asarray(x, sum_dtype(x.dtype)), "sum", dims).astype(x.dtype)
        )

    def _mesh(self) -> Mesh | None:
        """The mesh of the parts; None where they are on no mesh that has the axes of the type, for
        splits that do not divide, and for parts without elements."""
        is_traced = isinstance(self.parts, _jax.Tracer)
        sharding = None if is_traced else getattr(self.parts, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if not isinstance(mesh, Mesh) or not set(self.type) <= set(mesh.axis_names):
            return None
        shape, sizes, spec = self.parts.shape, part_sizes(self.type, mesh), mesh_spec(mesh)
        divides = is_even(shape[self.rank :], from_type(self.type, spec), spec.sizes)
        return mesh if sizes == shape[: self.rank] and 0 not in shape and divides else None

    def __repr__(self) -> str:
        how = f", reduce_dtype={self.reduce_dtype}" if self.reduce_dtype else ""
        parts = getattr(self.parts, "shape", self.parts)
        return f"Partial({parts}, {self.type!r}{how})"


def part_sizes(t: NdSbp, mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """The sizes of the mesh axes on which a type is P, outer first."""
    return tuple(size for name, size in axes_of(mesh) if isinstance(t.get(name), Unreduced))


def _on_mesh(partial: Partial, mesh: Mesh) -> jax.Array:
    """The reduction of parts by the collectives of a plan on their mesh."""
    parts = partial.parts
    simulated = is_simulated(mesh)
    with _jax.without_context_mesh():
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
    spec, axes = mesh_spec(mesh), [n for n, _ in axes_of(mesh) if isinstance(t.get(n), Unreduced)]
    source = from_type(t, spec)
    target = tuple(max(c, 0) for c in source)
    forced, monoids = all_needs_of([source])
    sums = Reduction(wide(dtype, reduce_dtype))
    space = TypeSpace(shape, dtype.itemsize, spec, monoids, forced, sums)
    steps = space.path(source, target)
    after = partition_spec(target, spec, len(shape))

    def body(part: Any) -> Any:
        return run_steps(part.reshape(part.shape[len(axes) :]), shape, steps, spec)

    before = PartitionSpec(*axes, *after)
    mapped = jax.shard_map(
        body, mesh=own_mesh(mesh), in_specs=before, out_specs=after, check_vma=False
    )
    jitted = jax.jit(mapped, out_shardings=NamedSharding(mesh, after))
    return NamedSharding(own_mesh(mesh), before), jitted


# ---- padding -------------------------------------------------------------------------------------
# How an array is padded so that JAX can shard it: the blocks of its dims, which need not divide, as
# equally large buffers.


def axes_of(mesh: Mesh | AbstractMesh) -> Axes:
    """Names and sizes of a mesh's axes, outer first."""
    return tuple(zip(map(str, mesh.axis_names), map(int, mesh.axis_sizes), strict=True))


@dataclass(frozen=True, slots=True)
class Padding:
    """The blocks of an array's dims. A dim of length L over axes of sizes n1, n2, .. has blocks of
    ceil(L / n1), each of them has blocks of ceil(ceil(L / n1) / n2), and so on.

    Arguments:
      shape: the true shape.
      counts: for each dim, the sizes of the mesh axes that split it, outer first.

    >>> Padding((15, 3), ((2, 4), ())).padded_shape
    (16, 3)
    >>> Padding((5, 3), ((2, 4), ())).ranges(0)
    [(0, 1), (1, 2), (2, 3), (3, 3), (3, 4), (4, 5), (5, 5), (5, 5)]
    """

    shape: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int], t: NdSbp, axes: Sequence[tuple[str, int]]) -> "Padding":
        """The blocks of a type.

        Arguments:
          shape: the true shape.
          t: the type.
          axes: names and sizes of the mesh axes, outer first.
        """
        counts = tuple(
            tuple(n for name, n in axes if t.get(name) == Split(dim)) for dim in range(len(shape))
        )
        return cls(tuple(shape), counts)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The buffer of one block."""
        return tuple(self._lengths(dim)[-1] for dim in range(len(self.shape)))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of all buffers together."""
        return tuple(n * math.prod(c) for n, c in zip(self.block_shape, self.counts, strict=True))

    def _lengths(self, dim: int) -> list[int]:
        """The length of a dim, and that of its blocks after each axis."""
        return list(
            itertools.accumulate(
                self.counts[dim], lambda length, n: -(-length // n), initial=self.shape[dim]
            )
        )

    def ranges(self, dim: int) -> list[tuple[int, int]]:
        """The elements of each block of a dim, from start to stop."""
        found = [(0, self.shape[dim])]
        for n, length in zip(self.counts[dim], self._lengths(dim)[1:], strict=True):
            found = [
                (min(start + i * length, stop), min(start + (i + 1) * length, stop))
                for start, stop in found
                for i in range(n)
            ]
        return found

    def pad(self, x: Any) -> Any:
        """An array of the true shape as one of the padded shape; padding is 0.

        Arguments:
          x: a NumPy or JAX array.
        """
        if _jax.is_extended(x.dtype):  # keys are padded by their words
            return _jax.wrap_key(self.pad(_jax.words(x)), x.dtype)
        for dim, counts in enumerate(self.counts):
            x = padded_blocks(x, dim, counts)
        return x

    def cut(self, x: Any) -> Any:
        """The inverse of `pad`."""
        if _jax.is_extended(x.dtype):
            return _jax.wrap_key(self.cut(_jax.words(x)), x.dtype)
        for dim, counts in enumerate(self.counts):
            before, after = x.shape[:dim], x.shape[dim + 1 :]
            lengths, blocks = self._lengths(dim), math.prod(counts)
            for n, size, length in zip(counts[::-1], lengths[-2::-1], lengths[:0:-1], strict=True):
                blocks //= n
                x = x.reshape(*before, blocks, n * length, *after)
                x = x[(slice(None),) * (dim + 1) + (slice(0, size),)]
                x = x.reshape(*before, blocks * size, *after)
        return x


def of_process(x: Any, padding: Padding, sharding: NamedSharding, name: str) -> jax.Array:
    """The global array, padded, from the whole array or from this process's part of it. The
    process sends nothing of its part.

    Arguments:
      x: the array of the true shape, or the part: the elements that the devices of this process
        hold, blocks in ascending order along each dim, without padding.
      padding: the blocks of the whole.
      sharding: the sharding of the padded shape.
      name: the name of the argument, for errors.

    Raises:
      SbpError: `bad-argument` for an array of neither shape.
    """
    if tuple(np.shape(x)) == padding.shape:
        return padded_parts(x, padding, sharding)
    sizes = padding.block_shape
    # For each dim, the blocks that devices of this process hold, in ascending order.
    held = sharding.addressable_devices_indices_map(padding.padded_shape).values()
    blocks = [
        sorted({(index[dim].start or 0) // max(size, 1) for index in held if index is not None})
        for dim, size in enumerate(sizes)
    ]
    ranges = [[padding.ranges(dim)[b] for b in own] for dim, own in enumerate(blocks)]
    expected = tuple(sum(stop - start for start, stop in own) for own in ranges)
    if tuple(x.shape) != expected:
        raise ArgumentError(
            f"{name}: the array has shape {tuple(x.shape)}; pass the whole array, of shape"
            f" {padding.shape}, or the part of process {jax.process_index()}, of shape {expected}"
        )
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)

    def buffer(index: Any) -> np.ndarray:
        """The buffer of one device: its block of each dim; a dim that is not split is one block."""
        picked = host
        for dim, where in enumerate(index):
            at = blocks[dim].index((where.start or 0) // max(sizes[dim], 1))
            ends = list(itertools.accumulate((b - a for a, b in ranges[dim]), initial=0))
            picked = picked[(slice(None),) * dim + (slice(ends[at], ends[at + 1]),)]
        missing = [(0, size - n) for size, n in zip(sizes, picked.shape, strict=True)]
        return np.pad(picked, missing)

    return jax.make_array_from_callback(padding.padded_shape, sharding, buffer, dtype=host.dtype)


# ---- padded -------------------------------------------------------------------------------------
# `sbp.Padded`: an array whose splits do not divide, outside a plan, as one padded array.


_TYPE = Kind(
    'a type without P, such as "data:S(0)"',
    lambda x: isinstance(x, str | NdSbp | PartitionSpec | NamedSharding),
)
_SHAPE = Kind(
    "a tuple of whole numbers",
    lambda x: isinstance(x, tuple | list) and all(is_whole(n) and n >= 0 for n in x),
)
_PARTS = Kind(
    "a padded array",
    lambda x: (
        isinstance(x, jax.Array | jax.ShapeDtypeStruct)
        or (isinstance(x, np.ndarray) and x.dtype.kind in "biufcV")
    ),
)


@jax.tree_util.register_pytree_with_keys_class
@made_of("Padded", parts=_PARTS, shape=_SHAPE, type=_TYPE, mesh=MESH)
class Padded(_InParts):
    """An array that is split over a mesh, although its dims need not divide. JAX shards even dims
    only, so it holds one padded array. Its own shape and values are those without padding.

    A plan returns one for a result that is pinned to `sbp.padded(..)`, and takes one wherever it
    takes an array. As a pytree it is a node with one leaf, the padded array. Padding has any
    content; that of a result is 0, except in an array of random keys.

    Attributes:
      parts: the padded array: along each dim the equally large buffers of the blocks.
      shape: the true shape.
      type: the type.
      axes: names and sizes of the mesh axes that split it, outer first.

    Arguments:
      parts, shape, type: the attributes.
      mesh: the mesh.

    Raises:
      SbpError: `bad-argument` for parts of another shape than the padded one, and for a type with
        P; `unknown-axis`, `dim-out-of-range` or `type-syntax` for a type that does not fit.

    >>> import sbp
    >>> mesh = sbp.make_mesh((1,), ("data",))
    >>> w = Padded.of(np.ones((13, 7)), "data:S(0)", mesh)
    >>> w.shape, np.asarray(w).sum().item()
    ((13, 7), 91.0)
    """

    _whole = ".full()"

    def __init__(self, parts: Any, shape: Any, type: Any, mesh: Mesh | AbstractMesh) -> None:
        self.parts: Any = parts
        self.shape: tuple[int, ...] = tuple(map(int, shape))
        self.type, self.axes = _held_type(type, self.shape, mesh)
        if tuple(parts.shape) != padding_of(self).padded_shape:
            raise ArgumentError(
                f"Padded: parts of shape {tuple(parts.shape)}, but {self.shape} under"
                f" {self.type!r} is padded to {padding_of(self).padded_shape};"
                " sbp.Padded.of(x, type, mesh) pads an array"
            )

    @classmethod
    @takes("Padded.of", skip=1, type=_TYPE, mesh=MESH, shape=or_none(_SHAPE))
    def of(cls, x: Any, type: Any, mesh: Mesh | AbstractMesh, *, shape: Any = None) -> "Padded":
        """An array as `Padded`, on the devices of a mesh.

        Arguments:
          x: an array, or its `ShapeDtypeStruct`, of which a `Padded` of a `ShapeDtypeStruct` is
            made: the target of a restored checkpoint. What lies in host memory stays there.
          type: the type, without P. Of a `NamedSharding`, the kind of memory counts, too.
          mesh: the mesh.
          shape: the true shape, where there are several processes and `x` is this process's part:
            the elements that its own devices hold. None where `x` is the whole, equal in all
            processes.

        Raises:
          SbpError: `bad-argument` for `x` of neither shape and for a type with P; `abstract-mesh`
            for an array on a mesh without devices.
        """
        if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
            x = _numpy(x)
        check_alive(x, "Padded.of: `x`")
        whole = tuple(x.shape) if shape is None else tuple(map(int, shape))
        t, axes = _held_type(type, whole, mesh)
        padding = Padding.of(whole, t, axes)
        given = type if isinstance(type, NamedSharding) else getattr(x, "sharding", None)
        kind = HOST if getattr(given, "memory_kind", None) == HOST else None
        sharding = NamedSharding(mesh, spec_of(t, mesh, len(whole)), memory_kind=kind)
        if isinstance(x, jax.ShapeDtypeStruct):
            parts: Any = jax.ShapeDtypeStruct(padding.padded_shape, x.dtype, sharding=sharding)
        elif isinstance(mesh, AbstractMesh):
            raise SbpError(
                "Padded.of: an AbstractMesh has no devices to hold an array; give a Mesh, or a"
                " jax.ShapeDtypeStruct in place of the array",
                code="abstract-mesh",
            )
        else:
            parts = of_process(x, padding, sharding, "Padded.of")
        return _made(parts, whole, t, axes)

    @property  # it follows from the shape, where a Partial has to keep it
    def _parts_shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return padding_of(self).padded_shape

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """The pytree: one leaf, the padded array."""
        return ((jax.tree_util.GetAttrKey("parts"), self.parts),), self._aux

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Padded":
        """The inverse of `tree_flatten_with_keys`."""
        return _made(children[0], *aux)  # JAX also passes what is no array, such as None

    @property
    def _aux(self) -> Any:
        return self.shape, self.type, self.axes

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.parts.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements, without padding."""
        return int(np.prod(self.shape, dtype=int))

    def full(self) -> jax.Array:
        """The array of the true shape, whole on each device. Of several processes, all call it."""
        parts = self._checked()
        with _jax.without_context_mesh():
            if isinstance(parts, jax.Array):
                parts = whole_on_devices(parts)
            return jax.numpy.asarray(padding_of(self).cut(parts))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The values on the host."""
        parts = self._checked()
        if isinstance(parts, jax.Array) and not parts.is_fully_addressable:
            raise refused(
                "this Padded has parts on devices of other processes; call .full() in all of them",
                ValueError,
            )
        found = padding_of(self).cut(np.asarray(parts))
        return np.array(found, dtype) if copy else np.asarray(found, dtype)

    def __reduce__(self) -> Any:
        # What is saved has the values of the true shape; devices have no place in it.
        return _restore, (np.asarray(self), self.type, self.axes)

    def __copy__(self) -> "Padded":
        return _made(self.parts, *self._aux)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Padded":
        return _made(copy.deepcopy(self.parts, memo), *self._aux)

    def __repr__(self) -> str:
        return f"Padded({self.shape}, {self.type!r})"


def held_padded(shape: tuple[int, ...], t: NdSbp, axes: Axes) -> Padded:
    """A `Padded` without checks and without parts.

    Arguments:
      shape: the true shape.
      t: the type.
      axes: names and sizes of all mesh axes, outer first.
    """
    return _made(None, shape, *_split(t, shape, axes))


def padding_of(x: Padded) -> Padding:
    """The blocks of a `Padded`."""
    return Padding.of(x.shape, x.type, x.axes)


def with_parts(x: Padded, parts: Any) -> Padded:
    """A `Padded` with other parts."""
    return _made(parts, x.shape, x.type, x.axes)


def same_layout(a: Padded, b: Padded) -> bool:
    """Whether two have the same shape and the same blocks."""
    return (a.shape, a.type, a.axes) == (b.shape, b.type, b.axes)


def fits_on(x: Padded, axes: Axes) -> bool:
    """Whether a mesh with these axes can have the type."""
    return x.axes == tuple((n, size) for n, size in axes if n in dict(x.axes))


def spec_of(t: NdSbp, mesh: Mesh | AbstractMesh, ndim: int) -> PartitionSpec:
    """The JAX spec of a type without P."""
    dims = [tuple(n for n in mesh.axis_names if t.get(str(n)) == Split(dim)) for dim in range(ndim)]
    return PartitionSpec(*(names or None for names in dims))


def whole_on_devices(x: jax.Array) -> jax.Array:
    """A global array, whole on each of its devices. JAX does not cut dims that are split."""
    if isinstance(x, _jax.Tracer):  # a split is part of its type on Explicit axes only
        sharding = jax.typeof(x).sharding
        is_split = any(entry is not None for entry in sharding.spec)
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.sharding.reshard(x, whole) if is_split else x
    mesh = x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec())) if mesh is not None else x


def padded_parts(x: Any, padding: Padding, sharding: NamedSharding) -> jax.Array:
    """An array of the true shape, padded and in a sharding of the padded shape.

    Arguments:
      x: the array: a global one, or one that each process has as a whole.
      padding: its blocks.
      sharding: the sharding.
    """
    if isinstance(x, jax.Array) and (
        not x.is_fully_addressable or x.sharding.device_set == sharding.device_set
    ):
        with _jax.without_context_mesh():
            return jax.device_put(padding.pad(whole_on_devices(x)), sharding)
    words = x if _jax.is_extended(x.dtype) else np.asarray(x)
    return place_array(padding.pad(words), sharding)


def _held_type(t: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> tuple[NdSbp, Axes]:
    """The type of a `Padded` from a type as users write it, and the mesh axes that split it.

    Raises:
      SbpError: where it has P or a free axis, or does not fit the shape or the mesh.
    """
    axes = axes_of(mesh)
    names = tuple(name for name, _ in axes)
    found = as_type(t, len(shape), names)
    if found.is_partial or found.free:
        raise ArgumentError(
            f"Padded: {found!r} has {'P' if found.is_partial else 'a free axis'}; give each mesh"
            " axis S(dim) or B"
        )
    for axis in (axis for axis in found if axis not in names):
        raise SbpError(
            f"Padded: the mesh has no axis {show(axis)}{nearest(axis, names)}", code="unknown-axis"
        )
    return _split(found, shape, axes)


def _split(t: NdSbp, shape: tuple[int, ...], axes: Axes) -> tuple[NdSbp, Axes]:
    """A type with nothing but its splits, and the mesh axes of these. An array without elements is
    whole, as at the boundary of a program."""
    split = {
        n: size for n, size in axes if isinstance(t.get(n), Split) and size > 1 and 0 not in shape
    }
    return NdSbp({n: t[n] for n in split}), tuple(split.items())


def _made(parts: Any, shape: tuple[int, ...], t: NdSbp, axes: Axes) -> Padded:
    """A `Padded` of checked fields."""
    found = object.__new__(Padded)
    found.parts, found.shape, found.type, found.axes = parts, shape, t, axes
    return found


def _restore(values: np.ndarray, t: NdSbp, axes: Axes) -> Padded:
    """A `Padded` that was saved, on the host."""
    return _made(Padding.of(values.shape, t, axes).pad(values), values.shape, t, axes)


def _numpy(x: Any) -> np.ndarray:
    """An array of the host.

    Raises:
      SbpError: `bad-argument` for what is no array of numbers.
    """
    try:
        found = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"Padded.of takes an array for `x`, got {show(x)}") from error
    if found.dtype.kind not in "biufcV":
        raise ArgumentError(f"Padded.of takes an array for `x`, got {show(x)}")
    return found
