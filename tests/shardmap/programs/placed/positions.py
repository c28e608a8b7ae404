"""Programs in which each device computes its place from its own index: caches split by positions
and rows of a split optimiser.

Each wrong program stands beside its corrected twin, as in the folder `wrong`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw

# ---- a cache split by positions -----------------------------------------------------------------

QUERY, KEYS, VALUES = draw(4, 16, seed=80), draw(32, 16, seed=81), draw(32, 16, seed=82)
LENGTH, CACHE = np.int32(21), (PS(), PS("model"), PS("model"), PS())


def masked_scores(q, k, length):
    rows = k.shape[0]
    at = lax.axis_index("model") * rows + jnp.arange(rows)
    return jnp.where(at[None, :] < length, q @ k.T, -1e30)


def decoded(q, k, v, length):
    scores = masked_scores(q, k, length)
    weights = jnp.exp(scores - lax.pmax(scores.max(-1, keepdims=True), "model"))
    return lax.psum(weights @ v, "model") / lax.psum(weights.sum(-1, keepdims=True), "model")


def decoded_reference(q, k, v, length):
    scores = jnp.where(jnp.arange(k.shape[0])[None, :] < length, q @ k.T, -1e30)
    return jax.nn.softmax(scores, axis=-1) @ v


def decoded_and_averaged(q, k, v, length):
    weights = jax.nn.softmax(masked_scores(q, k, length), axis=-1)
    return lax.pmean(weights @ v, "model")


# ---- rows of a split optimiser ------------------------------------------------------------------

WEIGHTS, X, Y = draw(32, 24, seed=89), draw(16, 32, seed=90), draw(16, 24, seed=91)
MOMENTUM = 0 * WEIGHTS
ZERO = (PS(), PS("data"), PS("data"), PS("data"))


squared = lambda w, x, y: ((x @ w - y) ** 2).mean()


def rows_returned(w, m, x, y):
    """This device's rows of the weights after a step with momentum."""
    g = jax.grad(squared)(w, x, y)
    g = lax.psum_scatter(g, "data", scatter_dimension=0, tiled=True) / lax.axis_size("data")
    start = lax.axis_index("data") * m.shape[0]
    mine = lax.dynamic_slice_in_dim(w, start, m.shape[0], axis=0)
    return mine - 0.1 * (0.9 * m + g)


def rows_gathered(w, m, x, y):
    return lax.all_gather(rows_returned(w, m, x, y), "data", axis=0, tiled=True)


step_reference = lambda w, m, x, y: w - 0.1 * (0.9 * m + jax.grad(squared)(w, x, y))


PAIRS = {
    "decoded_and_averaged": Pair(
        "misplaced-reduction",
        ("model",),
        "jax.nn.softmax",
        decoded_and_averaged,
        decoded,
        decoded_reference,
        (QUERY, KEYS, VALUES, LENGTH),
        CACHE,
        PS(),
        repaired=False,
    ),
    "rows_returned": Pair(
        "wrong-placement",
        ("data",),
        "mine - 0.1",
        rows_returned,
        rows_gathered,
        step_reference,
        (WEIGHTS, MOMENTUM, X, Y),
        ZERO,
        PS(),
        vma=False,
    ),
}
