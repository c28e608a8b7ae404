"""Annotations and types that are written wrongly, or that no program can keep together."""

import jax.numpy as jnp
import numpy as np

import sbp
from sbp import B, S
from tests.gallery.broken import MESH_2D, broken, f32

N, D = 64, 256


@broken(f32(N, D), cause="an axis that the mesh lacks")
def unknown_axis(x):
    x = sbp.split(x, 0, "modle")  # error: unknown-axis: the mesh (model=8) has no axis 'modle'; did you mean "model"?
    return jnp.tanh(x)


@broken(f32(N, D), cause="a dim counted from one")
def dim_out_of_range(x):
    x = sbp.annotate(x, model=S(2))  # error: dim-out-of-range: model:S(2) splits dim 2, but the tensor has only dims 0..1; split one of these
    return jnp.tanh(x)


@broken(
    f32(N, D), mesh=MESH_2D, cause="a sum on one axis of maxima on the other (trap 21)", no_help="which reduction is first is not known"
)
def two_monoids(x):
    x = sbp.annotate(x, data=sbp.P("max"), model=sbp.P("sum"))  # error: mixed-monoids: one type cannot have both P(max) and P(sum)
    return x * 2


@broken(f32(N, D), cause="a sum of truth values", no_help="what to pin instead depends on what was meant")
def sum_of_booleans(x):
    used = sbp.partial(x > 0, "model")  # error: bad-argument: an array of bool cannot be P(sum) on mesh axis 'model', only P(and) or P(or)
    return used


@broken(f32(N, D), cause="a type text with a bracket missing", no_help="the text does not parse, so nothing can be tried")
def type_text(x):
    return sbp.annotate(x, "model:S(0")  # error: type-syntax: type text does not parse at column 7, before 'S(0': expected S(dim), B, P(monoid) or ?


@broken(
    f32(N, D),
    cause="GShard's device assignment in an order that no split of the mesh has",
    no_help="the mesh has to be built in that order",
)
def order_of_devices(x):
    x = sbp.shard(x, np.array([0, 7, 2, 5, 4, 3, 6, 1]).reshape(8, 1))  # error: bad-placement: no split on the mesh (model=8) puts
    return jnp.tanh(x)


@broken(f32(N, N), cause="two pins of one value, read together")
def pinned_two_ways(x):
    by_rows = sbp.split(x, 0, "model")  # and: by_rows is S(0) on `model`: dim 0 of 64x64
    by_columns = sbp.split(x, 1, "model")  # and: by_columns is S(1) on `model`: dim 1 of 64x64
    return jnp.sin(by_rows) + jnp.cos(by_columns)  # error: annotation-conflict: by_rows as S(0) and by_columns as S(1) cannot meet in `jnp


@broken(f32(N, N), cause="two pins that conflict through a transpose and a reshape")
def conflict_through_a_reshape(x):
    heads = jnp.sin(sbp.split(x, 1, "model")).reshape(N, 8, 8)  # and: x is S(1) on `model`: dim 1 of 64x64
    rows = jnp.cos(sbp.split(heads.transpose(1, 0, 2), 1, "model"))  # and: heads.transpose(1, 0, 2) is S(1) on `model`: dim 1 of 8x64x8
    return jnp.exp(heads) * jnp.tanh(rows.transpose(1, 0, 2))  # error: annotation-conflict: x as S(1) and heads.transpose(1, 0, 2) as S(1)


@broken(
    f32(8, 8),
    f32(8, 8),
    mesh=MESH_2D,
    in_types=("data:S(1) model:S(1)", "data:B model:S(1)"),
    cause="each mesh axis alone has a typing, both together have none",
)
def only_together(x, y):
    return x + y  # error: no-typing: the program has no typing on the mesh a  # and: y is pinned data:B model:S(1)


@broken(f32(N, D), mesh=MESH_2D, cause="an outer axis would have to enter a dim that an inner one already splits")
def outer_after_inner(x):
    a = jnp.tanh(sbp.annotate(x, data=B, model=S(0)))  # error: no-typing: the program has no typing on the mesh axes `data`, `model` toget
    b = jnp.tanh(sbp.annotate(x, data=S(0), model=B))  # and: x is pinned data:S(0) model:B
    return a + b
