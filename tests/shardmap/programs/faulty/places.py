"""Wrong `shard_map` programs whose repair depends on where the fault is: in helper functions,
inside of library functions, in specs."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.faulty.gradients import MLP, SQUARE, W1, W2, W, X
from tests.shardmap.programs.kinds import Faulty, draw


def layer(x, w1, w2, b):
    return x + lax.psum(jax.nn.relu(x @ w1) @ w2 + b, "model")


def two_layers(x, w1, w2, b):
    return layer(layer(x, w1, w2, b), w1, w2, b)


def plain_layers(x, w1, w2, b):
    x = x + jax.nn.relu(x @ w1) @ w2 + b
    return x + jax.nn.relu(x @ w1) @ w2 + b


def row(h, w):
    return lax.psum(h @ w, "model")


def second_row_doubled(x, w1, w2):
    return row(row(jax.nn.relu(x @ w1), w2), jnp.eye(24))


def log_sum_of_shards(x):
    return lax.psum(jax.nn.logsumexp(x, -1), "model")


def variance_of_shards(x):
    return lax.pmean(x.var(0), "data")


def centred_by_shard(x):
    m = x.mean(0)
    v = lax.pmean(((x - m) ** 2).mean(0), "data")
    return v


def summed_over_both(x, w1, w2):
    return lax.psum(jax.nn.gelu(x @ w1) @ w2, ("data", "model"))


def tokens_left(x, w):
    return lax.psum(((x @ w) ** 2).sum(-1), "model").mean()


def regularised_before(x):
    return jnp.linalg.cholesky(lax.psum(x.T @ x + jnp.eye(8), "data"))


def largest_averaged(x):
    return lax.pmean(x.max(0), "data")


TALL = draw(64, 8, seed=9)

PROGRAMS = {
    "two_layers": Faulty(
        two_layers,
        plain_layers,
        (X, W1, SQUARE, draw(32, seed=4)),
        (*MLP, PS()),
        PS("data"),
        vma=(True, False),
    ),
    "second_row_doubled": Faulty(
        second_row_doubled,
        lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2,
        (X, W1, W2),
        MLP,
        PS("data"),
        helped=False,
    ),
    "log_sum_of_shards": Faulty(
        log_sum_of_shards,
        lambda x: jax.nn.logsumexp(x, -1),
        (X,),
        (PS(None, "model"),),
        PS(),
        helped=False,
        vma=(True, False),
    ),
    "variance_of_shards": Faulty(
        variance_of_shards,
        lambda x: x.var(0),
        (X,),
        (PS("data"),),
        PS(),
        helped=False,
        vma=(True, False),
    ),
    "centred_by_shard": Faulty(
        centred_by_shard, lambda x: x.var(0), (X,), (PS("data"),), PS(), vma=(True, False)
    ),
    "summed_over_both": Faulty(
        summed_over_both, lambda x, w1, w2: jax.nn.gelu(x @ w1) @ w2, (X, W1, W2), MLP, PS("data")
    ),
    "tokens_left": Faulty(
        tokens_left,
        lambda x, w: ((x @ w) ** 2).sum(-1).mean(),
        (X, W),
        (PS("data"), PS(None, "model")),
        PS(),
    ),
    "regularised_before": Faulty(
        regularised_before,
        lambda x: jnp.linalg.cholesky(x.T @ x + jnp.eye(8)),
        (TALL,),
        (PS("data"),),
        PS(),
        vma=(True, False),
    ),
    "largest_averaged": Faulty(
        largest_averaged, lambda x: x.max(0), (X,), (PS("data"),), PS(), vma=(True, False)
    ),
}
