"""Wrong programs that take more than types to find (divisions by hand, the order of mesh axes,
faults beside unknown values, elements that shards chose), and programs whose verdict is a note."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import N_DATA, Pair, draw

X, W, Y = draw(16, 32, seed=50), draw(32, 24, seed=51), draw(16, 24, seed=52)
STEP, BOTH = (PS(), PS("data"), PS("data")), PS("data", "model")


squared = lambda w, x, y: ((x @ w - y) ** 2).mean()


def scattered(w, x, y):
    return lax.psum_scatter(jax.grad(squared)(w, x, y), "data", scatter_dimension=0, tiled=True)


def clipped_rows(norm):
    """A step by the rows of a split optimizer, clipped by a norm of their gradient."""

    def body(w, x, y):
        g = scattered(w, x, y) / lax.axis_size("data")
        mine = lax.dynamic_slice_in_dim(w, lax.axis_index("data") * g.shape[0], g.shape[0], 0)
        return lax.all_gather(mine - g / norm(g), "data", axis=0, tiled=True)

    return body


def clipped(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - g / jnp.sqrt((g * g).sum())


over_all = lambda x: lax.psum(x.sum(0), "data") / (x.shape[0] * lax.axis_size("data"))


doubled = lambda x: x * 2


added = lambda x, y: x + y


PAIRS = {
    "clipped_by_shard": Pair(
        "missing-reduction",
        ("data",),
        "jnp.sqrt((g * g)",
        clipped_rows(lambda g: jnp.sqrt((g * g).sum())),
        clipped_rows(lambda g: jnp.sqrt(lax.psum((g * g).sum(), "data"))),
        clipped,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "top_within_shard": Pair(
        "local-result",
        ("model",),
        "lax.top_k(x, 4)",
        lambda x: lax.top_k(x, 4)[0],
        lambda x: lax.top_k(lax.all_gather(lax.top_k(x, 4)[0], "model", axis=1, tiled=True), 4)[0],
        lambda x: lax.top_k(x, 4)[0],
        (X,),
        (BOTH,),
        PS("data"),
        vma=False,
    ),
    "moment_of_sum": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum_scatter",
        lambda v, w, x, y: 0.9 * v + scattered(w, x, y) ** 2,
        lambda v, w, x, y: 0.9 * v + (scattered(w, x, y) / lax.axis_size("data")) ** 2,
        lambda v, w, x, y: 0.9 * v + jax.grad(squared)(w, x, y) ** 2,
        (np.ones_like(W), W, X, Y),
        (PS("data"), *STEP),
        PS("data"),
        vma=False,
    ),
    "over_devices": Pair(
        "wrong-reduction",
        ("data",),
        "lax.axis_size",
        lambda x: lax.psum(x.sum(0), "data") / lax.axis_size("data"),
        over_all,
        lambda x: x.mean(0),
        (X,),
        (PS("data"),),
        PS(),
    ),
    "over_shard": Pair(
        "wrong-reduction",
        ("data",),
        "x.shape[0]",
        lambda x: lax.psum(x.sum(0), "data") / x.shape[0],
        over_all,
        lambda x: x.mean(0),
        (X,),
        (PS("data"),),
        PS(),
    ),
    "over_shard_of_two": Pair(
        "wrong-reduction",
        ("data",),
        "x.size",
        lambda x: lax.psum(x.sum(), "data") / x.size,
        lambda x: lax.psum(x.sum(), "data") / (x.size * lax.axis_size("data")),
        lambda x: x.mean(),
        (X,),
        (PS("data"),),
        PS(),
    ),
    "order_of_result": Pair(
        "wrong-placement",
        ("data", "model"),
        "",
        doubled,
        doubled,
        lambda x: x * 2,
        (X,),
        (PS(("data", "model")),),
        PS(("data", "model")),
        wrong_outs=PS(("model", "data")),
    ),
    "order_of_operands": Pair(
        "wrong-placement",
        ("data", "model"),
        "",
        added,
        added,
        lambda x, y: x + y,
        (X, X[::-1]),
        (PS(("data", "model")),) * 2,
        PS(("data", "model")),
        wrong_ins=(PS(("data", "model")), PS(("model", "data"))),
    ),
    "order_of_gather": Pair(
        "wrong-placement",
        ("model",),
        "lax.all_gather",
        lambda x: lax.all_gather(x, ("model", "data"), axis=0, tiled=True),
        lambda x: lax.all_gather(x, ("data", "model"), axis=0, tiled=True),
        lambda x: x,
        (X,),
        (PS(("data", "model")),),
        PS(),
        vma=False,
    ),
}

SQUARE = draw(16, 16, seed=53)
NOT_TOLD = {
    "flattened": (
        lambda x: x.reshape(-1),
        lambda x: x.reshape(-1),
        PS(None, "model"),
        PS("model"),
        ["local-result"],
    ),
    "positions": (
        lambda x: x + jnp.arange(x.shape[0])[:, None],
        lambda x: x + jnp.arange(x.shape[0])[:, None],
        PS("data"),
        PS("data"),
        ["wrong-placement"],
    ),
    "mask": (jnp.tril, jnp.tril, PS("data"), PS("data"), ["wrong-placement"]),
    "rolled": (
        lambda x: jnp.roll(x, 1, 0),
        lambda x: jnp.roll(x, 1, 0),
        PS("data"),
        PS("data"),
        ["local-result"],
    ),
    "turned": (lambda x: x[::-1], lambda x: x[::-1], PS("data"), PS("data"), ["local-result"]),
    "one_row": (
        lambda x: lax.psum(x[0], "data") / N_DATA,
        lambda x: x[0],
        PS("data"),
        PS(),
        ["local-result"],
    ),
    "random": (  # only the numbers that devices draw differ; the runs draw a constant
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
        PS("data"),
        PS("data"),
        [],
    ),
}
"""Programs that use each shard for itself, or reorder it: body, plain function, in_specs,
out_specs, and the codes of the errors."""
