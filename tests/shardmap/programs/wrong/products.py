"""Wrong products of split matrices, each with its corrected twin: nine measured programs in which
partial values are easily made."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw

U, V, BIAS = draw(16, 32, seed=1), draw(32, 24, seed=2), draw(24, seed=3)
MATMUL = (PS("data", "model"), PS("model", None))
ROWS, BOTH = PS("data", None), PS("data", "model")


product = lambda u, v: lax.psum(u @ v, "model")


left_partial = lambda u, v: u @ v


PAIRS = {
    "summed_twice": Pair(
        "doubled-reduction",
        ("model",),
        "lax.psum(lax.psum",
        lambda u, v: lax.psum(lax.psum(u @ v, "model"), "model"),
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
        lambda u, v, b: lax.psum(u @ v + b, "model"),
        lambda u, v, b: lax.psum(u @ v, "model") + b,
        lambda u, v, b: u @ v + b,
        (U, V, BIAS),
        (*MATMUL, PS()),
        ROWS,
    ),
    "tanh_before": Pair(
        "misplaced-reduction",
        ("model",),
        "jnp.tanh(u @ v)",
        lambda u, v: lax.psum(jnp.tanh(u @ v), "model"),
        lambda u, v: jnp.tanh(lax.psum(u @ v, "model")),
        lambda u, v: jnp.tanh(u @ v),
        (U, V),
        MATMUL,
        ROWS,
    ),
    "averaged_product": Pair(
        "wrong-reduction",
        ("model",),
        "lax.pmean(u @ v",
        lambda u, v: lax.pmean(u @ v, "model"),
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
        lambda u: lax.pmean(u.sum(), ("data", "model")),
        lambda u: lax.psum(u.sum(), ("data", "model")),
        lambda u: u.sum(),
        (U,),
        (BOTH,),
        PS(),
    ),
    "norm_of_shards": Pair(
        "misplaced-reduction",
        ("data", "model"),
        "jnp.sqrt((u * u)",
        lambda u: lax.psum(jnp.sqrt((u * u).sum()), ("data", "model")),
        lambda u: jnp.sqrt(lax.psum((u * u).sum(), ("data", "model"))),
        lambda u: jnp.sqrt((u * u).sum()),
        (U,),
        (BOTH,),
        PS(),
    ),
    "partial_as_split": Pair(
        "wrong-placement",
        ("model",),
        "u @ v",
        left_partial,
        lambda u, v: lax.psum_scatter(u @ v, "model", scatter_dimension=0, tiled=True),
        lambda u, v: u @ v,
        (U, V),
        MATMUL,
        PS(("data", "model"), None),
    ),
    "missing": Pair(
        "missing-reduction",
        ("model",),
        "u @ v",
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
        lambda u: lax.all_gather(u, "model", axis=0, tiled=True),
        lambda u: lax.all_gather(u, "model", axis=1, tiled=True),
        lambda u: u,
        (U,),
        (BOTH,),
        ROWS,
        repaired=False,
    ),
}
