"""Wrong `shard_map` programs whose repair depends on where the fault is: in helper functions,
inside of library functions, in specs."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.faulty.gradients import MLP, SQUARE, W1, W2, W, X
from tests.shardmap.programs.kinds import Faulty, draw

layer = lambda x, w1, w2, b: x + lax.psum(jax.nn.relu(x @ w1) @ w2 + b, "model")


def plain_layers(x, w1, w2, b):
    x = x + jax.nn.relu(x @ w1) @ w2 + b
    return x + jax.nn.relu(x @ w1) @ w2 + b


row = lambda h, w: lax.psum(h @ w, "model")


def centred_by_shard(x):
    m = x.mean(0)
    v = lax.pmean(((x - m) ** 2).mean(0), "data")
    return v


PROGRAMS = {
    "two_layers": Faulty(
        lambda x, w1, w2, b: layer(layer(x, w1, w2, b), w1, w2, b),
        plain_layers,
        (X, W1, SQUARE, draw(32, seed=4)),
        (*MLP, PS()),
        PS("data"),
        vma=(True, False),
    ),
    "second_row_doubled": Faulty(
        lambda x, w1, w2: row(row(jax.nn.relu(x @ w1), w2), jnp.eye(24)),
        lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2,
        (X, W1, W2),
        MLP,
        PS("data"),
        helped=False,
    ),
    "log_sum_of_shards": Faulty(
        lambda x: lax.psum(jax.nn.logsumexp(x, -1), "model"),
        lambda x: jax.nn.logsumexp(x, -1),
        (X,),
        (PS(None, "model"),),
        PS(),
        helped=False,
        vma=(True, False),
    ),
    "variance_of_shards": Faulty(
        lambda x: lax.pmean(x.var(0), "data"),
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
        lambda x, w1, w2: lax.psum(jax.nn.gelu(x @ w1) @ w2, ("data", "model")),
        lambda x, w1, w2: jax.nn.gelu(x @ w1) @ w2,
        (X, W1, W2),
        MLP,
        PS("data"),
    ),
    "tokens_left": Faulty(
        lambda x, w: lax.psum(((x @ w) ** 2).sum(-1), "model").mean(),
        lambda x, w: ((x @ w) ** 2).sum(-1).mean(),
        (X, W),
        (PS("data"), PS(None, "model")),
        PS(),
    ),
    "regularised_before": Faulty(
        lambda x: jnp.linalg.cholesky(lax.psum(x.T @ x + jnp.eye(8), "data")),
        lambda x: jnp.linalg.cholesky(x.T @ x + jnp.eye(8)),
        (draw(64, 8, seed=9),),
        (PS("data"),),
        PS(),
        vma=(True, False),
    ),
    "largest_averaged": Faulty(
        lambda x: lax.pmean(x.max(0), "data"),
        lambda x: x.max(0),
        (X,),
        (PS("data"),),
        PS(),
        vma=(True, False),
    ),
}
