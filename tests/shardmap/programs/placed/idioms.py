"""Programs that compute positions with functions of libraries: losses of Optax, flat parameters,
guarded lookups, caches of several heads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw
from tests.shardmap.programs.wrong.vocabulary import looked_up, own_lookup

# ---- contrast of both sides ---------------------------------------------------------------------


def both_losses(scale, images, texts):
    """The mean of the two losses of this device's pairs. `data` has two devices, too."""
    every = [lax.all_gather(x, "data", tiled=True) for x in (images, texts)]
    labels = jnp.arange(images.shape[0]) + lax.axis_index("data") * images.shape[0]
    loss = optax.softmax_cross_entropy_with_integer_labels
    of_images = loss(jnp.exp(scale) * images @ every[1].T, labels)
    of_texts = loss(jnp.exp(scale) * texts @ every[0].T, labels)
    return (of_images + of_texts).mean() / 2


def contrast_reference(scale, images, texts):
    logits = jnp.exp(scale) * images @ texts.T
    sides = [jnp.diagonal(jax.nn.log_softmax(x)).mean() for x in (logits, logits.T)]
    return -(sides[0] + sides[1]) / 2


# ---- caches of several heads --------------------------------------------------------------------

Q, K, V = draw(4, 2, 3, 8, seed=142), draw(4, 32, 2, 8, seed=143), draw(4, 32, 2, 8, seed=144)


def grouped_scores(q, k, lengths, offset):
    scores = jnp.einsum("bkgd,btkd->bkgt", q, k)
    at = lax.broadcasted_iota(jnp.int32, scores.shape, 3) + offset
    return jnp.where(at < lengths[:, None, None, None], scores, jnp.finfo(scores.dtype).min)


def own_scores(q, k, lengths):
    return grouped_scores(q, k, lengths, lax.axis_index("model") * k.shape[1])


def shifted_by_own(q, k, v, lengths):
    scores = own_scores(q, k, lengths)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = lax.psum(weights.sum(-1, keepdims=True), "model")
    return lax.psum(jnp.einsum("bkgt,btkd->bkgd", weights, v), "model") / total


def merged(q, k, v, lengths):
    """Each device's result, weighed by its own sum (https://arxiv.org/abs/2205.14135)."""
    scores = own_scores(q, k, lengths)
    own = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - own)
    share = jnp.exp(own - lax.pmax(own, "model"))
    out = jnp.einsum("bkgt,btkd->bkgd", weights, v) * share
    return lax.psum(out, "model") / lax.psum(weights.sum(-1, keepdims=True) * share, "model")


# ---- flat parameters ----------------------------------------------------------------------------


X = draw(16, 32, seed=150)


loss = lambda p, x, y: ((jnp.tanh(x @ p["w"] + p["b"]) - y) ** 2).mean()


def flat_step(put):
    def body(p, x, y):
        flat, tree = ravel_pytree(p)
        g = ravel_pytree(jax.grad(loss)(p, x, y))[0]
        g = lax.psum_scatter(g, "data", tiled=True) / lax.axis_size("data")
        start = lax.axis_index("data") * g.shape[0]
        mine = lax.dynamic_slice(flat, (start,), g.shape) - 0.5 * g
        return tree(put(flat, mine, start))["w"]

    return body


# ---- guarded lookups ----------------------------------------------------------------------------

TABLE, IDS = draw(32, 8, seed=152), np.random.default_rng(153).integers(0, 32, 10).astype(np.int32)


OF_PARAMS = (
    flat_step(lambda flat, mine, start: lax.all_gather(mine, "data", tiled=True)),
    lambda p, x, y: (p["w"] - 0.5 * jax.grad(loss)(p, x, y)["w"]).reshape(p["w"].shape),
    ({"w": draw(32, 24, seed=148), "b": draw(24, seed=149)}, X, draw(16, 24, seed=151)),
    (PS(), PS("data"), PS("data")),
    PS(),
)
OF_TABLE = (TABLE, IDS), (PS("model"), PS()), PS()

PAIRS = {
    "contrast_of_model": Pair(
        "missing-reduction",
        ("data",),
        "(of_images + of_texts).mean()",
        lambda scale, images, texts: lax.pmean(both_losses(scale, images, texts), "model"),
        lambda scale, images, texts: lax.pmean(both_losses(scale, images, texts), "data"),
        contrast_reference,
        (np.float32(0.5), draw(16, 8, seed=140), draw(16, 8, seed=141)),
        (PS(), PS("data"), PS("data")),
        PS(),
    ),
    "shifted_by_own": Pair(
        "misplaced-reduction",
        ("model",),
        "scores - scores.max",
        shifted_by_own,
        merged,
        lambda q, k, v, lengths: jnp.einsum(
            "bkgt,btkd->bkgd", jax.nn.softmax(grouped_scores(q, k, lengths, 0), -1), v
        ),
        (Q, K, V, np.asarray([3, 17, 32, 9], np.int32)),
        (PS("data"), PS("data", "model"), PS("data", "model"), PS("data")),
        PS("data"),
    ),
    "flat_scattered": Pair(
        "local-result",
        ("data",),
        "flat.at",
        flat_step(lambda flat, mine, start: flat.at[start + jnp.arange(mine.shape[0])].set(mine)),
        *OF_PARAMS,
        vma=False,
        repaired=False,
    ),
    "flat_updated": Pair(
        "wrong-placement",
        ("data",),
        "lax.dynamic_update_slice",
        flat_step(lambda flat, mine, start: lax.dynamic_update_slice(flat, mine, (start,))),
        *OF_PARAMS,
        vma=False,
        repaired=False,
    ),
    "lookup_averaged": Pair(
        "wrong-reduction",
        ("model",),
        "lax.pmean",
        lambda table, ids: lax.pmean(own_lookup(table, ids), "model"),
        looked_up,
        lambda table, ids: table[ids],
        *OF_TABLE,
    ),
}
