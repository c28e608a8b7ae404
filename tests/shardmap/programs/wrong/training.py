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


squared = lambda w, x, y: ((x @ w - y) ** 2).mean()


sgd = lambda w, x, y: w - 0.1 * jax.grad(squared)(w, x, y)


def local_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * g


averaged_gradients = lambda w, x, y: w - 0.1 * lax.pmean(jax.grad(squared)(w, x, y), "data")


def summed_gradients(w, x, y):
    g = jax.grad(squared)(w, x, y)
    return w - 0.1 * lax.psum(g, "data")


def gradients_summed_again(w, x, y):
    g = jax.grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w)
    return w - 0.1 * lax.psum(g, "data")


def shard_gradients(x, w1, w2):
    def loss(w1):
        return (lax.psum(jax.nn.gelu(x @ w1) @ w2, "model") ** 2).sum() / lax.axis_size("model")

    return lax.psum(jax.grad(loss)(w1), "data")


def metric_counted_twice(x):
    positive = lax.psum((x > 0).astype(jnp.float32).sum(), "data")
    return lax.psum(positive, "data")


def auxiliary_of_parts(gates, chosen):
    share, mean = chosen.mean(0), gates.mean(0)
    return lax.pmean((share * mean).sum(), "data")


def auxiliary_of_means(gates, chosen):
    share, mean = lax.pmean(chosen.mean(0), "data"), lax.pmean(gates.mean(0), "data")
    return (share * mean).sum()


def microbatches_summed(w, x, y):
    def add(total, batch):
        return total + lax.psum(jax.grad(squared)(w, *batch), "data"), None

    halves = x.reshape(2, -1, x.shape[1]), y.reshape(2, -1, y.shape[1])
    return w - 0.05 * lax.scan(add, jnp.zeros_like(w), halves)[0]


def ruled(forward, backward):
    """A function with a rule for its gradient."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    return function


centered = lambda x: x - lax.pmean(x.mean(-1, keepdims=True), "model")
leave = lambda x: lax.psum(x, "model")


def through_rule(leave):
    return lambda x, w1, w2: jax.grad(lambda w1: (leave(jnp.tanh(x @ w1) @ w2) ** 2).sum())(w1)


def centered_by(rule):
    return lambda x, w: jax.grad(lambda x: (ruled(centered, rule)(x) * w).sum())(x)


GATES = np.asarray(jax.nn.softmax(draw(16, 4, seed=11)), np.float32)
CHOSEN = np.asarray(np.eye(4)[GATES.argmax(-1)], np.float32)

PAIRS = {
    "mean_loss_summed": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum(((x @ w - y) ** 2).mean()",
        lambda w, x, y: lax.psum(((x @ w - y) ** 2).mean(), "data"),
        lambda w, x, y: lax.pmean(((x @ w - y) ** 2).mean(), "data"),
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
        lambda w, x, y: w - 0.1 * jax.grad(lambda w: lax.pmean(squared(w, x, y), "data"))(w),
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
        lambda x, w1, w2: w1 - 0.01 * lax.pmean(shard_gradients(x, w1, w2), "model"),
        lambda x, w1, w2: w1 - 0.01 * shard_gradients(x, w1, w2),
        lambda x, w1, w2: (
            w1 - 0.01 * jax.grad(lambda w1: ((jax.nn.gelu(x @ w1) @ w2) ** 2).sum())(w1)
        ),
        (X, W1, W2),
        MLP,
        PS(None, "model"),
        vma=False,
    ),
    "gradient_norm_averaged": Pair(
        "misplaced-reduction",
        ("model",),
        "jnp.sqrt((g * g)",
        lambda g: lax.pmean(jnp.sqrt((g * g).sum()), "model"),
        lambda g: jnp.sqrt(lax.psum((g * g).sum(), "model")),
        lambda g: jnp.sqrt((g * g).sum()),
        (W1,),
        (PS(None, "model"),),
        PS(),
    ),
    "unit_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.sqrt((x * x)",
        lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True)),
        lambda x: x / jnp.sqrt(lax.psum((x * x).sum(-1, keepdims=True), "model")),
        lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True)),
        (X,),
        (BOTH,),
        BOTH,
    ),
    "rms_by_shard": Pair(
        "missing-reduction",
        ("model",),
        "jnp.sqrt((x * x)",
        lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        lambda x: x / jnp.sqrt(lax.pmean((x * x).mean(-1, keepdims=True), "model") + 1e-6),
        lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        (X,),
        (BOTH,),
        BOTH,
    ),
    "masked_mean_of_means": Pair(
        "misplaced-reduction",
        ("data",),
        "(loss * mask).sum() / mask.sum()",
        lambda loss, mask: lax.pmean((loss * mask).sum() / mask.sum(), "data"),
        lambda loss, mask: lax.psum((loss * mask).sum(), "data") / lax.psum(mask.sum(), "data"),
        lambda loss, mask: (loss * mask).sum() / mask.sum(),
        (draw(16, seed=12), np.asarray(np.arange(16) < 11, np.float32)),
        (PS("data"), PS("data")),
        PS(),
    ),
    "metric_counted_twice": Pair(
        "doubled-reduction",
        ("data",),
        "lax.psum(positive",
        metric_counted_twice,
        lambda x: lax.psum((x > 0).astype(jnp.float32).sum(), "data"),
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
    "microbatches_summed": Pair(
        "wrong-reduction",
        ("data",),
        "lax.psum(jax.grad",
        microbatches_summed,
        averaged_gradients,
        sgd,
        (W, X, Y),
        STEP,
        PS(),
        vma=False,
    ),
    "summed_in_a_backward_rule": Pair(
        "doubled-reduction",
        ("model",),
        'lambda g: lax.psum(g, "model")',
        through_rule(ruled(leave, lambda g: lax.psum(g, "model"))),
        through_rule(ruled(leave, lambda g: g)),
        through_rule(lambda x: x),
        (X, W1, W2),
        (PS(), PS(None, "model"), PS("model")),
        PS(None, "model"),
        vma=False,
    ),
    "mean_of_a_shard_in_a_backward_rule": Pair(
        "missing-reduction",
        ("model",),
        "g.mean(-1, keepdims=True)",
        centered_by(lambda g: g - g.mean(-1, keepdims=True)),
        centered_by(lambda g: g - lax.pmean(g.mean(-1, keepdims=True), "model")),
        lambda x, w: w - w.mean(-1, keepdims=True),
        (X, draw(16, 24, seed=13)),
        (PS(None, "model"), PS(None, "model")),
        PS(None, "model"),
        vma=False,
    ),
}
