"""Right means of what was reduced, and helpers that take split and whole values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as PS

from tests.shardmap.programs.kinds import Program, draw, mapped
from tests.shardmap.programs.wrong.layers import X
from tests.shardmap.programs.wrong.training import W, Y
from tests.shardmap.programs.wrong.vocabulary import LABELS, LOGITS

BATCH, STEP = PS("data"), (PS(), PS("data"), PS("data"))
BOTH = PS("data", "model")


def one_hot_cross_entropy(logits, labels):
    here = labels - lax.axis_index("model") * logits.shape[1]
    total = jnp.log(lax.psum(jnp.exp(logits).sum(-1), "model"))
    picked = lax.psum((jax.nn.one_hot(here, logits.shape[1]) * logits).sum(-1), "model")
    return lax.pmean((total - picked).mean(), "data")


def split_labels_cross_entropy(logits, labels):
    total = jnp.log(lax.psum(jnp.exp(logits).sum(-1), "model"))
    return lax.pmean((total - lax.psum((labels * logits).sum(-1), "model")).mean(), "data")


def split_labels_reference(logits, labels):
    return -(labels * jax.nn.log_softmax(logits)).sum(-1).mean()


def switch_auxiliary(gates):
    chosen = jax.nn.one_hot(gates.argmax(-1), gates.shape[-1])
    return (
        lax.pmean(chosen.mean(0), "data") * lax.pmean(jax.nn.softmax(gates).mean(0), "data")
    ).mean() * 64


def switch_reference(gates):
    chosen = jax.nn.one_hot(gates.argmax(-1), gates.shape[-1])
    return (chosen.mean(0) * jax.nn.softmax(gates).mean(0)).mean() * 64


def pooled(x):
    h = lax.psum(x.sum(0), "data") / (x.shape[0] * lax.axis_size("data"))
    return (h - h.mean()) * lax.rsqrt(h.var() + 1e-5)


def pooled_reference(x):
    h = x.mean(0)
    return (h - h.mean()) * lax.rsqrt(h.var() + 1e-5)


def similarity(x, y):
    dot, a, b = lax.psum(((x * y).sum(-1), (x * x).sum(-1), (y * y).sum(-1)), "model")
    return (dot * lax.rsqrt(a * b)).mean()


def binary_loss(x, w, y):
    return lax.pmean(jnp.logaddexp(0.0, -y * lax.psum((x * w).sum(-1), "model")).mean(), "data")


PARAMS = {"w": draw(24, 8, seed=71) * 0.3, "b": draw(8, seed=72)}


tree_loss = lambda p, x, y: ((jnp.tanh(x @ p["w"]) + p["b"] - y) ** 2).mean()


def optimised(make):
    """A step of an optimiser that takes means of parameters and gradients, and the same on one
    device."""

    def step(reduce):
        def body(p, x, y):
            optimiser = make()
            g = reduce(jax.grad(tree_loss)(p, x, y))
            updates, _ = optimiser.update(g, optimiser.init(p), p)
            return optax.apply_updates(p, updates)

        return body

    body = step(lambda g: lax.pmean(g, "data"))
    return Program(mapped(body, STEP, PS()), step(lambda g: g), (PARAMS, X, Y), vma=(False,))


MEANS = {
    "log_of_sum": Program(
        mapped(
            lambda logits: lax.pmean(
                jnp.log(lax.psum(jnp.exp(logits).sum(-1), "model")).mean(), "data"
            ),
            (BOTH,),
            PS(),
        ),
        lambda x: jnp.log(jnp.exp(x).sum(-1)).mean(),
        (LOGITS,),
    ),
    "one_hot_cross_entropy": Program(
        mapped(one_hot_cross_entropy, (BOTH, BATCH), PS()),
        lambda logits, labels: split_labels_reference(
            logits, jax.nn.one_hot(labels, logits.shape[1])
        ),
        (LOGITS, LABELS),
    ),
    "split_labels_cross_entropy": Program(
        mapped(split_labels_cross_entropy, (BOTH, BOTH), PS()),
        split_labels_reference,
        (LOGITS, np.eye(32, dtype=np.float32)[LABELS]),
    ),
    "square_of_means": Program(
        mapped(lambda x: (lax.pmean(x.mean(0), "data") ** 2).mean(), (BATCH,), PS()),
        lambda x: (x.mean(0) ** 2).mean(),
        (X,),
    ),
    "switch_auxiliary": Program(
        mapped(switch_auxiliary, (BATCH,), PS()), switch_reference, (draw(16, 8, seed=73),)
    ),
    "mean_variance": Program(
        mapped(
            lambda x: lax.pmean(((x - lax.pmean(x.mean(0), "data")) ** 2).mean(0), "data").mean(),
            (BATCH,),
            PS(),
        ),
        lambda x: x.var(0).mean(),
        (X,),
    ),
    "pooled": Program(mapped(pooled, (BATCH,), PS()), pooled_reference, (X,)),
    "similarity": Program(
        mapped(similarity, (PS(None, "model"),) * 2, PS()),
        lambda x, y: ((x * y).sum(-1) * lax.rsqrt((x * x).sum(-1) * (y * y).sum(-1))).mean(),
        (X, draw(16, 24, seed=74)),
    ),
    "binary_loss": Program(
        mapped(binary_loss, (BOTH, PS("model"), BATCH), PS()),
        lambda x, w, y: jnp.logaddexp(0.0, -y * (x * w).sum(-1)).mean(),
        (X, W[:, 0], np.sign(Y[:, 0])),
    ),
    "adafactor": optimised(lambda: optax.adafactor(1e-2)),
    "clip_by_block_rms": optimised(lambda: optax.clip_by_block_rms(1e-3)),
}


OTHER = draw(8, 24, seed=75)


mean_square = lambda a: (a**2).mean()


two_losses = lambda w, x, other: mean_square(x @ w) + mean_square(other @ w)


def two_losses_step(w, x, other):
    value, g = jax.value_and_grad(two_losses)(w, x, other)
    return lax.pmean(value, "data"), w - 0.1 * lax.pmean(g, "data")


def two_losses_reference(w, x, other):
    value, g = jax.value_and_grad(two_losses)(w, x, other)
    return value, w - 0.1 * g


def one_loss_averaged(w, x, other):
    value, g = jax.value_and_grad(
        lambda w: lax.pmean(mean_square(x @ w), "data") + mean_square(other @ w)
    )(w)
    return value, w - 0.1 * g


HELPERS = {
    "two_losses": Program(
        mapped(two_losses_step, (PS(), BATCH, PS()), PS()),
        two_losses_reference,
        (W, X, OTHER),
        vma=(False,),
    ),
    "one_loss_averaged": Program(
        mapped(one_loss_averaged, (PS(), BATCH, PS()), PS()),
        two_losses_reference,
        (W, X, OTHER),
        vma=(True,),
    ),
}


PROGRAMS = MEANS | HELPERS
