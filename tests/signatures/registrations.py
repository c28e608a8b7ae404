"""Operations that users register signatures for: a primitive, a Pallas kernel with its gradient, a
`custom_partitioning` function; each with its right rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from sbp import _jax

X = (np.random.default_rng(0).integers(-16, 16, (8, 12)) / 4).astype(np.float32)
W = (np.random.default_rng(1).integers(-16, 16, (12, 8)) / 4).astype(np.float32)


triple_p = _jax.Primitive("triple")
triple_p.def_abstract_eval(lambda x: _jax.empty_aval(x.shape, x.dtype))
_jax.mlir.register_lowering(triple_p, _jax.mlir.lower_fun(lambda x: 3 * x, multiple_results=False))
_jax.ad.deflinear(triple_p, lambda g: [triple_p.bind(g)])

TRIPLE = ["S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"]


def triple(x):
    return triple_p.bind(x)


def matmul_call(x, w):
    def matmul(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], w_ref[...])

    return pl.pallas_call(
        matmul, jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype), interpret=True
    )(x, w)


@jax.custom_vjp
def matmul(x, w):
    """A kernel whose gradient calls the same kernel."""
    return matmul_call(x, w)


matmul.defvjp(
    lambda x, w: (matmul(x, w), (x, w)),
    lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)),
)

MATMUL = ["S(0), B -> S(0)", "B, S(1) -> S(1)", "S(1), S(0) -> P"]


def matmul_local(ctx, x, w):
    """The contracted dim may be split: its padding is made zero."""
    keep = jnp.arange(x.shape[1]) < ctx.in_extent(0, 1)
    return matmul_call(jnp.where(keep, x, 0), jnp.where(keep[:, None], w, 0))


@custom_partitioning
def row_sums(x):
    return x.sum(1)


row_sums.def_partition(
    infer_sharding_from_operands=lambda *a: None,
    partition=lambda *a: None,
    sharding_rule="i j -> i",
    need_replication_factors=("j",),
)
ROW_SUMS = ["S(0) -> S(0)", "P -> P"]


def row_sums_local(ctx, x):
    return jnp.where(jnp.arange(x.shape[1]) < ctx.in_extent(0, 1), x, 0).sum(1)
