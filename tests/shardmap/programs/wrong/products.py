"""Wrong products of split matrices, each with its corrected twin: nine measured programs in which
partial values are easily made."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw

U, V, BIAS = draw(16, 32, seed=1), draw(32, 24, seed=2), draw(24, seed=3)
MATMUL = (PS("data", "model"), PS("model", None))
ROWS, BOTH = PS("data", None), PS("data", "model")


def summed_twice(u, v):
    return lax.psum(lax.psum(u @ v, "model"), "model")


def product(u, v):
    return lax.psum(u @ v, "model")


def bias_before(u, v, b):
    return lax.psum(u @ v + b, "model")


def bias_after(u, v, b):
    return lax.psum(u @ v, "model") + b


def tanh_before(u, v):
    return lax.psum(jnp.tanh(u @ v), "model")


def tanh_after(u, v):
    return jnp.tanh(lax.psum(u @ v, "model"))


def averaged_product(u, v):
    return lax.pmean(u @ v, "model")


def averaged_sum(u):
    return lax.pmean(u.sum(), ("data", "model"))


def summed_sum(u):
    return lax.psum(u.sum(), ("data", "model"))


def norm_of_shards(u):
    return lax.psum(jnp.sqrt((u * u).sum()), ("data", "model"))


def norm_of_all(u):
    return jnp.sqrt(lax.psum((u * u).sum(), ("data", "model")))


def left_partial(u, v):
    return u @ v


def scattered(u, v):
    return lax.psum_scatter(u @ v, "model", scatter_dimension=0, tiled=True)


def gathered_rows(u):
    return lax.all_gather(u, "model", axis=0, tiled=True)


def gathered_columns(u):
    return lax.all_gather(u, "model", axis=1, tiled=True)


PAIRS = {
    "summed_twice": Pair(
        "doubled-reduction",
        ("model",),
        "lax.psum(lax.psum",
        summed_twice,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "bias_before": Pair(
        "misplaced-reduction",
        ("model",),
        "u @ v + b",
        bias_before,
        bias_after,
        lambda u, v, b: u @ v + b,
        (U, V, BIAS),
        (*MATMUL, PS()),
        ROWS,
    ),
    "tanh_before": Pair(
        "misplaced-reduction",
        ("model",),
        "jnp.tanh(u @ v)",
        tanh_before,
        tanh_after,
        lambda u, v: jnp.tanh(u @ v),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "averaged_product": Pair(
        "wrong-reduction",
        ("model",),
        "lax.pmean(u @ v",
        averaged_product,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "averaged_sum": Pair(
        "wrong-reduction",
        ("data", "model"),
        "lax.pmean(u.sum()",
        averaged_sum,
        summed_sum,
        lambda u: u.sum(),
        (U,),
        (BOTH,),
        PS(),
    ),
    "norm_of_shards": Pair(
        "misplaced-reduction",
        ("data", "model"),
        "jnp.sqrt((u * u)",
        norm_of_shards,
        norm_of_all,
        lambda u: jnp.sqrt((u * u).sum()),
        (U,),
        (BOTH,),
        PS(),
    ),
    "partial_as_split": Pair(
        "wrong-placement",
        ("model",),
        "return u @ v",
        left_partial,
        scattered,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        PS(("data", "model"), None),
    ),
    "missing": Pair(
        "missing-reduction",
        ("model",),
        "return u @ v",
        left_partial,
        product,
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        ROWS,
    ),
    "gathered_rows": Pair(
        "wrong-placement",
        ("model",),
        "lax.all_gather(u",
        gathered_rows,
        gathered_columns,
        lambda u: u,
        (U,),
        (BOTH,),
        ROWS,
        repaired=False,
    ),
}
