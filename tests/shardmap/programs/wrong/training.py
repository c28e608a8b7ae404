"""Wrong losses, gradients, norms and metrics, each with its corrected twin."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Pair, draw
from tests.shardmap.programs.wrong.layers import MLP, W1, W2, X
from tests.shardmap.programs.wrong.products import BOTH

W, Y = draw(24, 8, seed=9), draw(16, 8, seed=10)
STEP = (PS(), PS("data"), PS("data"))


def squared(w, x, y):
    return ((x @ w - y) ** 2).mean()


def mean_loss_summed(w, x, y):
    return lax.psum(((x @ w - y) ** 2).mean(), "data")


def mean_loss_averaged(w, x, y):
    return lax.pmean(((x @ w - y) ** 2).mean(), "data")


def sgd(w, x, y):
    return w - 0.1 * jax.grad(squared)(w, x, y)


def local_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * g


def averaged_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * lax.pmean(g, "data")


def summed_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * lax.psum(g, "data")


def gradients_of_mean(w, x, y):
    g = jax.grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w)
    return w - 0.1 * g


def gradients_summed_again(w, x, y):
    g = jax.grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w)
    return w - 0.1 * lax.psum(g, "data")


def shard_gradients_averaged(x, w1, w2):
    def loss(w1):
        return (lax.psum(jax.nn.gelu(x @ w1) @ w2, "model") ** 2).sum() / lax.axis_size("model")

    return w1 - 0.01 * lax.pmean(lax.psum(jax.grad(loss)(w1), "data"), "model")


def shard_gradients_kept(x, w1, w2):
    def loss(w1):
        return (lax.psum(jax.nn.gelu(x @ w1) @ w2, "model") ** 2).sum() / lax.axis_size("model")

    return w1 - 0.01 * lax.psum(jax.grad(loss)(w1), "data")


def shard_step(x, w1, w2):
    return w1 - 0.01 * jax.grad(lambda w1: ((jax.nn.gelu(x @ w1) @ w2) ** 2).sum())(w1)


def gradient_norm_averaged(g):
    return lax.pmean(jnp.sqrt((g * g).sum()), "model")


def gradient_norm(g):
    return jnp.sqrt(lax.psum((g * g).sum(), "model"))


def unit_by_shard(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True))


def unit(x):
    return x / jnp.sqrt(lax.psum((x * x).sum(-1, keepdims=True), "model"))


def rms_by_shard(x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rms(x):
    return x / jnp.sqrt(lax.pmean((x * x).mean(-1, keepdims=True), "model") + 1e-6)


def masked_mean_of_means(loss, mask):
    return lax.pmean((loss * mask).sum() / mask.sum(), "data")


def masked_mean(loss, mask):
    return lax.psum((loss * mask).sum(), "data") / lax.psum(mask.sum(), "data")


def metric_counted_twice(x):
    positive = lax.psum((x > 0).astype(jnp.float32).sum(), "data")
    return lax.psum(positive, "data")


def metric_counted_once(x):
    return lax.psum((x > 0).astype(jnp.float32).sum(), "data")


def auxiliary_of_parts(gates, chosen):
    share, mean = chosen.mean(0), gates.mean(0)
    return lax.pmean((share * mean).sum(), "data")


def auxiliary_of_means(gates, chosen):
    share, mean = lax.pmean(chosen.mean(0), "data"), lax.pmean(gates.mean(0), "data")
    return (share * mean).sum()


MASK = np.asarray(np.arange(16) < 11, np.float32)
GATES = np.asarray(jax.nn.softmax(draw(16, 4, seed=11)), np.float32)
CHOSEN = np.asarray(np.eye(4)[GATES.argmax(-1)], np.float32)

PAIRS = {
    "mean_loss_summed": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum(((x @ w - y) ** 2).mean()",
        mean_loss_summed,
        mean_loss_averaged,
        squared,
        (W, X, Y),
        STEP,
        PS(),
    ),
    "local_gradients": Pair(
        "missing-reduction",
        ("data",),
        "((x @ w - y) ** 2).mean()",
        local_gradients,
        averaged_gradients,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "summed_gradients": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum(g",
        summed_gradients,
        averaged_gradients,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "gradients_summed_again": Pair(
        "doubled-reduction",
        ("data",),
        "lax.psum(g",
        gradients_summed_again,
        gradients_of_mean,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=True,
    ),
    "shard_gradients_averaged": Pair(
        "wrong-placement",
        ("model",),
        "w1 - 0.01",
        shard_gradients_averaged,
        shard_gradients_kept,
        shard_step,
        (X, W1, W2),
        MLP,
        PS(None, "model"),
        vma=False,
        repaired=False,
    ),
    "gradient_norm_averaged": Pair(
        "misplaced-reduction",
        ("model",),
        "jnp.sqrt((g * g)",
        gradient_norm_averaged,
        gradient_norm,
        lambda g: jnp.sqrt((g * g).sum()),
        (W1,),
        (PS(None, "model"),),
        PS(),
    ),
    "unit_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.sqrt((x * x)",
        unit_by_shard,
        unit,
        lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True)),
        (X,),
        (BOTH,),
        BOTH,
    ),
    "rms_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.sqrt((x * x)",
        rms_by_shard,
        rms,
        lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        (X,),
        (BOTH,),
        BOTH,
    ),
    "masked_mean_of_means": Pair(
        "misplaced-reduction",
        ("data",),
        "(loss * mask).sum() / mask.sum()",
        masked_mean_of_means,
        masked_mean,
        lambda loss, mask: (loss * mask).sum() / mask.sum(),
        (draw(16, seed=12), MASK),
        (PS("data"), PS("data")),
        PS(),
    ),
    "metric_counted_twice": Pair(
        "doubled-reduction",
        ("data",),
        "lax.psum(positive",
        metric_counted_twice,
        metric_counted_once,
        lambda x: (x > 0).astype(jnp.float32).sum(),
        (X,),
        (PS("data"),),
        PS(),
    ),
    "auxiliary_of_parts": Pair(
        "misplaced-reduction",
        ("data",),
        "share * mean",
        auxiliary_of_parts,
        auxiliary_of_means,
        lambda g, c: (c.mean(0) * g.mean(0)).sum(),
        (GATES, CHOSEN),
        (PS("data"), PS("data")),
        PS(),
    ),
}
