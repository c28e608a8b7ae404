"""Rows of hand-written regions. They depend on the name of the mesh axis; a rule of the registry
sees only its size.

A region is a `shard_map` over all axes of the mesh. On an axis that splits no dim of an operand or
result, the array has a leading dim with one part for each device, and that dim is split.
`sbp_parts` turns a partial operand into such an array; a reduction over the leading dim turns a
partial result back. `sbp_pick` takes one part of a result that is B: the region claims that all
parts are equal, and sbp checks this.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.annotations import as_type
from sbp.errors import SbpError
from sbp.signatures.factors import moved_rows
from sbp.signatures.kernels.shards import neutral
from sbp.signatures.rule import Op, Row, all_b
from sbp.types import B, Split, Unreduced

# ---- the primitives -----------------------------------------------------------------------------


def _parts(x: Any, *, mesh_axis: str, n: int, monoid: str) -> Any:
    """`sbp_parts` as a plain function."""
    rest = jnp.broadcast_to(jnp.asarray(neutral(monoid, x.dtype), x.dtype), (n - 1, *x.shape))
    return jnp.concatenate([x[None], rest])


def _parts_jvp(primals: Any, tangents: Any, *, mesh_axis: str, n: int, monoid: str) -> Any:
    """The tangent of `sbp_parts`.

    Raises:
      SbpError: for a monoid other than `sum`, `max` and `min`.
    """
    (x,), (t,) = primals, tangents
    out = parts_p.bind(x, mesh_axis=mesh_axis, n=n, monoid=monoid)
    match monoid:
        case "sum":
            return out, parts_p.bind(t, mesh_axis=mesh_axis, n=n, monoid=monoid)
        case "max" | "min":  # the tangent belongs to the extremum, whichever part has it
            return out, jnp.broadcast_to(t[None], (n, *t.shape))
        case _:
            raise SbpError(
                f"a manual region has no gradient for an operand that is P({monoid}); reduce it"
                " before the region"
            )


def _parts_transpose(ct: Any, x: Any, *, mesh_axis: str, n: int, monoid: str) -> Any:
    """The transpose of `sbp_parts` for sums: one of the equal parts of the cotangent."""
    # Only `sum` is linear; `_parts_jvp` binds no other monoid.
    return [
        _jax.ad.Zero(x.aval) if type(ct) is _jax.ad.Zero else pick_p.bind(ct, mesh_axis=mesh_axis)
    ]


def _pick_batch(args: Any, dims: Any, **params: Any) -> Any:
    (x,), (d,) = args, dims
    return pick_p.bind(jnp.moveaxis(x, 0, 1) if d == 0 else x, **params), max(d - 1, 0)


parts_p = _jax.OwnPrimitive(
    "sbp_parts",
    _parts,
    lambda x, *, mesh_axis, n, monoid: _jax.empty_aval((n, *x.shape), x.dtype),
)
"""x -> [n, *x.shape]: parts whose reduction over the leading dim is x. The first is x, the others
are neutral elements."""
_jax.set_rules(
    parts_p,
    _parts_jvp,
    _parts_transpose,
    lambda args, dims, **params: (parts_p.bind(*args, **params), dims[0] + 1),
)

pick_p = _jax.OwnPrimitive(
    "sbp_pick",
    lambda x, *, mesh_axis: x[0],
    lambda x, *, mesh_axis: _jax.empty_aval(x.shape[1:], x.dtype),
)
"""[n, ..] -> [..]: one of n equal parts (the first)."""
_jax.ad.deflinear2(
    pick_p,
    lambda ct, x, *, mesh_axis: [
        parts_p.bind(ct, mesh_axis=mesh_axis, n=x.aval.shape[0], monoid="sum")
    ],
)
_jax.batching.primitive_batchers[pick_p] = _pick_batch


# ---- rows ---------------------------------------------------------------------------------------

REGION_OPS = frozenset({"shard_map", "sbp_parts", "sbp_pick"})
"""Primitives whose rows depend on the name of the mesh axis."""


def region_rows(op: Op, mesh_axis: str) -> tuple[Row, ...]:
    """The rows of an equation of one of `REGION_OPS` on a mesh axis of this name."""
    if op.axis_size == 1:
        return (all_b(op),)
    if op.name == "shard_map":
        sides = op.params["in_specs"], op.params["out_specs"]
        ins, outs = (tuple(as_type(spec).get(mesh_axis) for spec in side) for side in sides)
        return (Row(ins, outs),)
    taking = op.name == "sbp_parts"
    whole, stacked = (op.ins[0], op.outs[0]) if taking else (op.outs[0], op.ins[0])
    monoid = Unreduced(op.params["monoid"]) if taking else None
    if op.params["mesh_axis"] == mesh_axis:
        assert stacked.shape[0] == op.axis_size
        # A partial value keeps its parts: the region claims that only their reduction matters, so
        # they need not be the parts that `_parts` makes.
        return (
            (Row((B,), (Split(0),)), Row((monoid,), (Split(0),)))
            if monoid
            else (Row((Split(0),), (B,)),)
        )
    pairs = [((Split(dim),), (Split(dim + 1),)) for dim in range(len(whole.shape))]
    rows = [all_b(op), *(Row(a, b) if taking else Row(b, a) for a, b in pairs)]
    return (*rows, Row((monoid,), (monoid,))) if monoid else (*rows, *moved_rows(op))


def check_mesh(
    params: dict[str, Any], names: Sequence[str], sizes: Sequence[int], where: str
) -> None:
    """Checks that a `shard_map` fits the mesh: it has the same mesh axes, all of them are manual,
    and axes that split one dim are in the order of the mesh.

    Arguments:
      params: parameters of the `shard_map`.
      names: names of the mesh axes.
      sizes: sizes of the mesh axes.
      where: where the `shard_map` is, for the error.

    Raises:
      SbpError: `bad-placement` with what to change.
    """
    own = dict(zip(names, sizes, strict=True))
    given = {str(k): int(v) for k, v in params["mesh"].shape.items()}
    if given != own or list(given) != list(own):
        raise SbpError(
            f"the shard_map{where} uses the mesh {_text(given)}, but sbp.jit uses {_text(own)}; use"
            " one mesh for both",
            code="bad-placement",
        )
    if set(params["newly_manual_axes"]) != set(names):
        left = sorted(set(names) - set(params["newly_manual_axes"]))
        raise SbpError(
            f"the shard_map{where} leaves the mesh axes {', '.join(left)} to the compiler; name all"
            " axes in axis_names",
            code="bad-placement",
        )
    for spec in (*params["in_specs"], *params["out_specs"]):
        if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
            raise SbpError(
                f"{spec} of the shard_map{where} is unreduced; use sbp.manual with P there",
                code="bad-placement",
            )
        for entry in spec:
            if isinstance(entry, tuple) and sorted(entry, key=names.index) != list(entry):
                raise SbpError(
                    f"{spec} of the shard_map{where} names the mesh axes in another order than the"
                    f" mesh {_text(own)}; name them in the order of the mesh",
                    code="bad-placement",
                )


def _text(axes: dict[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in axes.items())


def parts(x: Any, mesh_axis: str, monoid: str, partial: bool) -> Any:
    """One device's part of a value, with the leading dim that `sbp_parts` adds.

    Arguments:
      x: this device's part, or the whole value.
      mesh_axis: the axis that splits the leading dim.
      monoid: the monoid that joins the parts.
      partial: whether `x` is a part. If not, the first device has the whole value as its part and
          the others have neutral elements.
    """
    if not partial:
        x = jnp.where(
            lax.axis_index(mesh_axis) == 0, x, jnp.asarray(neutral(monoid, x.dtype), x.dtype)
        )
    return x[None]
