"""Annotations: functions by which a user pins the type of a tensor.

All of them bind one primitive, `sbp_annotate`. Inside `sbp.jit` it pins the type of its *result*;
an operand of another type is converted there. Elsewhere it is the identity. Its transpose is the
identity without a pin, so the types of cotangents are inferred; `cotangent=` pins one.

    >>> import jax.numpy as jnp
    >>> split(jnp.zeros((4, 2)), 0, "data").shape
    (4, 2)
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sbp import _jax
from sbp.errors import SbpError, Span, counted, refused
from sbp.kinds import (
    BY_POSITION,
    EACH_AXIS,
    Kind,
    is_whole,
    one_of,
    reduce_dtype_name,
    refuse_unless,
    show,
    takes,
)
from sbp.types import MONOIDS, Atom, B, Broadcast, NdSbp, Split, Unreduced, parse


@dataclass(frozen=True, slots=True)
class Pin:
    """The type that an annotation pins.

    Arguments:
      type: the type.
      complete: True where mesh axes that the type does not name are B, False where they are
        inferred.
      device_assignment: a GShard device assignment (shape, device ids); `sbp.jit` looks for a type
        with this placement on its mesh.
      reduce_dtype: the name of the dtype in which parts are summed on the way to the type; None
        for the `reduce_dtype` of `sbp.jit`.
      input: the position of the input whose type this is, where an uneven split keeps JAX from
        sharding the input itself so; -1 for what the user annotates.
      sharding: the `NamedSharding` of a pin in JAX's own words; `sbp.jit` finds its type on its
        mesh.
      asked_by: what the user wrote to ask for that sharding, such as `with_sharding_constraint`;
        empty for an annotation of sbp.
      ordered: whether the user lists the mesh axes of one dim, outer first, as `type` has them.
      whole: the dims that no mesh axis splits but those that `type` names.
    """

    type: NdSbp
    complete: bool = False
    device_assignment: tuple[Any, ...] | None = None
    reduce_dtype: str | None = None
    input: int = -1
    sharding: Any = None
    asked_by: str = ""
    whole: tuple[int, ...] = ()
    ordered: bool = False

    def with_dim(self, dim: int) -> "Pin":
        """The same pin on a tensor with a new dim at `dim`."""
        moved = {
            a: Split(t.dim + 1) if isinstance(t, Split) and t.dim >= dim else t
            for a, t in self.type.items()
        }
        if self.device_assignment is not None:
            raise SbpError(
                "shard(device_assignment) under vmap has no meaning; use split or annotate there"
            )
        return Pin(
            NdSbp(moved, self.type.free),
            self.complete,
            reduce_dtype=self.reduce_dtype,
            ordered=self.ordered,
        )


annotate_p = _jax.Primitive("sbp_annotate")

At = tuple[Span, ...]
"""The user's frames of an annotation, innermost first."""


def _jvp(primals: Any, tangents: Any, *, pin: Pin | None, cotangent: Pin | None, at: At) -> Any:
    (x,), (t,) = primals, tangents
    y = annotate_p.bind(x, pin=pin, cotangent=None, at=at) if pin is not None else x
    if type(t) is _jax.ad.Zero or cotangent is None:
        return y, t
    return y, annotate_p.bind(t, pin=None, cotangent=cotangent, at=at)


def _transpose(ct: Any, x: Any, *, pin: Pin | None, cotangent: Pin | None, at: At) -> Any:
    if type(ct) is _jax.ad.Zero or cotangent is None:
        return [ct]
    return [annotate_p.bind(ct, pin=cotangent, cotangent=None, at=at)]


def _batch(args: Any, dims: Any, *, pin: Pin | None, cotangent: Pin | None, at: At) -> Any:
    (x,), (d,) = args, dims
    out = annotate_p.bind(
        x, pin=pin and pin.with_dim(d), cotangent=cotangent and cotangent.with_dim(d), at=at
    )
    return out, d


annotate_p.def_impl(lambda x, **_: x)
annotate_p.def_abstract_eval(lambda aval, **_: aval)
_jax.mlir.register_lowering(annotate_p, lambda ctx, x, **_: [x])
_jax.set_rules(annotate_p, _jvp, _transpose, _batch)


def bind_pin(x: Any, pin: Pin | None, cotangent: Pin | None = None) -> Any:
    """Annotates an array at the user's line. JAX gives every equation of a `custom_vjp` backward
    rule the line of the forward call, so an annotation keeps its own.

    Arguments:
      x: the array.
      pin: the pin of the result; None for none.
      cotangent: the pin of the cotangent; None for none.
    """
    return annotate_p.bind(x, pin=pin, cotangent=cotangent, at=_jax.caller_frames())


def as_type(value: Any, ndim: int | None = None, mesh_axes: tuple[str, ...] | None = None) -> NdSbp:
    """Reads a type from an NdSbp, a type text, a PartitionSpec or a NamedSharding.

    Arguments:
      value: the type in one of these forms.
      ndim: the number of dims of the tensor; None does not check splits.
      mesh_axes: axis names of the mesh, outer first; None does not check the order of a
          PartitionSpec's axes.

    Raises:
      SbpError: `dim-out-of-range` for a split of a dim that a tensor of `ndim` dims lacks,
          `bad-placement` for a dim split over axes against their mesh order, `type-syntax` for
          other values.
    """
    match value:
        case NdSbp():
            t = value
        case str():
            t = parse(value)
        case NamedSharding():
            t = as_type(value.spec, ndim, tuple(value.mesh.axis_names))
        case PartitionSpec():
            if PartitionSpec.UNCONSTRAINED in value.partitions:
                raise SbpError(
                    f"{value} has an UNCONSTRAINED dim; leave axes free instead, as in"
                    " 'data:S(0) model:?'",
                    code="type-syntax",
                )
            t = from_spec(value, mesh_axes)
        case Split() | Unreduced():
            raise SbpError(
                f"{value!r} alone names no mesh axis; write a type text such as 'data:{value!r}',"
                f" or annotate(x, data={value!r})",
                code="type-syntax",
            )
        case Broadcast():
            t = NdSbp()
        case _:
            raise SbpError(
                "a type must be an NdSbp, a type text, a PartitionSpec or a NamedSharding, got"
                f" {show(value)}",
                code="type-syntax",
            )
    if ndim is not None:
        check_rank(t, ndim)
        if isinstance(value, PartitionSpec) and len(value) > ndim:
            raise refused(
                f"{value} is for {counted(len(value), 'dim')}, but the tensor has"
                f" {counted(ndim, 'dim')}; leave out entries at the end",
                ValueError,
                code="dim-out-of-range",
            )
    return t


def check_rank(t: NdSbp, ndim: int) -> None:
    """Raises `dim-out-of-range` when `t` splits a dim that a tensor of `ndim` dims lacks."""
    for axis, atom in t.items():
        if isinstance(atom, Split) and atom.dim >= ndim:
            few = {0: "no dims; use B", 1: "only dim 0; split dim 0"}
            dims = few.get(ndim, f"only dims 0..{ndim - 1}; split one of these")
            raise refused(
                f"{axis}:{atom!r} splits dim {atom.dim}, but the tensor has {dims}",
                ValueError,
                code="dim-out-of-range",
            ).with_slip(atom, *map(Split, reversed(range(ndim))))


def from_spec(spec: PartitionSpec, mesh_axes: tuple[str, ...] | None) -> NdSbp:
    """The type of a PartitionSpec; its `unreduced` axes are P(sum).

    Arguments:
      spec: the PartitionSpec.
      mesh_axes: axis names of the mesh, outer first; None does not check the order.

    Raises:
      SbpError: `bad-placement` when one dim is split over axes against their mesh order, and for an
        axis that is named twice.
    """
    atoms: dict[str, Atom] = {}
    for dim, entry in enumerate(spec.partitions):
        names = axes_of_entry(entry)
        if twice := [n for n in names if n in atoms or names.count(n) > 1]:
            raise SbpError(
                f"{spec} names mesh axis {show(twice[0])} twice; a mesh axis splits one dim, once",
                code="bad-placement",
            )
        known = [n for n in names if mesh_axes is not None and n in mesh_axes]
        if mesh_axes is not None and sorted(known, key=mesh_axes.index) != known:
            raise SbpError(
                f"dim {dim} is split over {', '.join(names)}, but the mesh has its axes in the"
                f" order {', '.join(mesh_axes)}; name them in the order of the mesh, or build the"
                " mesh in the order of the spec",
                code="bad-placement",
            )
        atoms.update({name: Split(dim) for name in names})
    atoms.update({name: Unreduced("sum") for name in sorted(getattr(spec, "unreduced", ()) or ())})
    first = [name for name in (atoms if mesh_axes is None else mesh_axes) if name in atoms]
    return NdSbp({name: atoms[name] for name in (*first, *sorted(atoms.keys() - {*first}))})


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an entry of a PartitionSpec names."""
    names = () if entry in (None, PartitionSpec.UNCONSTRAINED) else entry
    return (names,) if isinstance(names, str) else tuple(names)


def _pin_of(type: Any, atoms: dict[str, Atom], ndim: int, reduce_dtype: str | None) -> Pin | None:
    if type is not None and atoms:
        raise SbpError("annotate takes a type or atoms by axis, not both")
    if type is None and not atoms:
        return None
    return Pin(
        as_type(NdSbp(atoms) if type is None else type, ndim),
        complete=type is not None,
        reduce_dtype=reduce_dtype,
        ordered=isinstance(type, PartitionSpec),
    )


@takes("sbp.annotate")
def annotate(
    x: Any, /, type: Any = None, *, cotangent: Any = None, reduce_dtype: Any = None, **atoms: Atom
) -> Any:
    """Pins the type of `x` on the named mesh axes and leaves the others to inference.

    Arguments:
      x: an array.
      type: a complete type (axes it does not name are B): an NdSbp, a type text, a PartitionSpec or
          NamedSharding.
      cotangent: a complete type for the cotangent of `x`; None leaves it to inference.
      reduce_dtype: the dtype in which parts of `x` are summed over devices to get its type, and
          those of its cotangent where `cotangent` is given. `jnp.float32` accumulates 16-bit parts
          in float32; `jnp.bfloat16` lets float32 parts pass the casts to bfloat16 before `x`, and
          adds no cast. None leaves it to the `reduce_dtype` of `sbp.jit`.
      **atoms: `S(dim)`, `B` or `P` by mesh axis name.

    Returns:
      `x`, unchanged in value and shape.

    Raises:
      SbpError: `dim-out-of-range`, `type-syntax`, `mixed-monoids`, `unknown-option`.

    >>> annotate(jnp.zeros((8, 4)), data=Split(0), model=B).shape
    (8, 4)
    """
    x = as_array(x, ARRAY)
    wide = reduce_dtype_name(reduce_dtype)
    pin, ct = _pin_of(type, atoms, x.ndim, wide), _pin_of(cotangent, {}, x.ndim, wide)
    if pin is None and ct is None:
        raise SbpError("annotate needs a type, atoms by mesh axis, or a cotangent type")
    return bind_pin(x, pin, ct)


ARRAY = "an annotation is for"


@takes(
    "sbp.split",
    BY_POSITION,
    dim=Kind('a dim number, as in split(x, 0, "data")', is_whole),
    mesh_axes=EACH_AXIS,
)
def split(x: Any, dim: int, *mesh_axes: str) -> Any:
    """Pins `x` as split along `dim` over the mesh axes; other axes are left to inference.

    Arguments:
      x: an array.
      dim: the dim to split; negative counts from the back.
      *mesh_axes: mesh axis names, outer first.

    Raises:
      SbpError: `dim-out-of-range` for a dim that `x` lacks; `bad-placement` for an axis that is
        named twice, and in `sbp.jit` for axes against the order of the mesh.

    >>> split(jnp.zeros((8, 4)), 1, "model").shape
    (8, 4)
    """
    if not mesh_axes:
        raise SbpError('split needs a mesh axis: split(x, 0, "data")')
    x = as_array(x, ARRAY)
    if not -x.ndim <= dim < x.ndim:
        dims = {0: "it has no dims to split; use sbp.replicate", 1: "split dim 0"}
        right = dims.get(x.ndim, f"split one of the dims 0..{x.ndim - 1}")
        raise refused(
            f"split(x, {show(dim)}) on a tensor of shape {x.shape}: {right}",
            ValueError,
            code="dim-out-of-range",
        ).with_slip(dim, *sorted(range(x.ndim), key=lambda d: abs(d - dim)))
    if twice := [name for name in mesh_axes if mesh_axes.count(name) > 1]:
        raise SbpError(
            f"split names mesh axis {show(twice[0])} twice; name it once",
            code="bad-placement",
        )
    return bind_pin(x, Pin(NdSbp(dict.fromkeys(mesh_axes, Split(int(dim) % x.ndim))), ordered=True))


@takes("sbp.replicate", BY_POSITION, mesh_axes=EACH_AXIS)
def replicate(x: Any, *mesh_axes: str) -> Any:
    """Pins `x` as B on the mesh axes; on all of them when none is named.

    >>> replicate(jnp.zeros(3)).shape
    (3,)
    """
    return bind_pin(
        as_array(x, ARRAY), Pin(NdSbp(dict.fromkeys(mesh_axes, B)), complete=not mesh_axes)
    )


@takes(
    "sbp.partial",
    BY_POSITION,
    mesh_axes=EACH_AXIS,
    op=one_of(MONOIDS),
)
def partial(x: Any, *mesh_axes: str, op: str = "sum") -> Any:
    """Pins `x` as partial on the mesh axes: `x` is the reduction by `op` of the devices' parts.

    Arguments:
      x: an array.
      *mesh_axes: mesh axis names.
      op: the monoid: "sum", "max", "min", "prod", "and" or "or".

    Raises:
      SbpError: `unknown-option` for another monoid.

    >>> partial(jnp.zeros(3), "model").shape
    (3,)
    """
    if not mesh_axes:
        raise SbpError('partial needs a mesh axis: partial(x, "model")')
    return bind_pin(as_array(x, ARRAY), Pin(NdSbp(dict.fromkeys(mesh_axes, Unreduced(op)))))


_ID = Kind("a nested list of device ids, which are whole numbers", is_whole)


@takes("sbp.shard")
def shard(x: Any, device_assignment: Any) -> Any:
    """Pins `x` by GShard's device assignment: an array of device ids of the rank of `x`, one per
    partition, in slice order.

    `sbp.jit` accepts it when some type on its mesh has this placement (GShard, section 3.2).

    Raises:
      SbpError: `bad-placement` when its rank is not that of `x`.

    >>> shard(jnp.zeros((3, 16, 64)), [[[0], [1]]]).shape
    (3, 16, 64)
    """
    x = as_array(x, ARRAY)
    try:
        ids = np.array(device_assignment, dtype=object)
    except (TypeError, ValueError) as error:  # such as rows of different lengths
        raise _ID.refusal("sbp.shard", "device_assignment", device_assignment) from error
    refuse_unless(_ID, "sbp.shard", "device_assignment", ids.ravel().tolist())
    if ids.ndim != x.ndim:
        raise SbpError(
            f"device_assignment has rank {ids.ndim}, but the tensor has rank {x.ndim}; they must"
            " agree",
            code="bad-placement",
        )
    return bind_pin(
        x,
        Pin(
            NdSbp(),
            complete=True,
            device_assignment=(tuple(ids.shape), tuple(int(i) for i in ids.ravel())),
        ),
    )


def as_array(x: Any, what: str) -> Any:
    """A value as an array of JAX.

    Arguments:
      x: the value.
      what: the start of the error's sentence, such as "an annotation is for".

    Raises:
      SbpError: `bad-argument` for what is no array.
    """
    if hasattr(x, "aval") or isinstance(x, _jax.Tracer):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        kind = ValueError if isinstance(error, RecursionError) else error
        raise refused(f"{what} one array, got {show(x)}", kind) from error
