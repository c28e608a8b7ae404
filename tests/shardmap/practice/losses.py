"""Losses over a split batch or a split vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats, integers


def cross_entropy(h, w, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h @ w), labels[:, None], 1))


@case(
    {"model": 4},
    cross_entropy,
    lambda: (*floats((12, 8), (8, 32)), integers(0, 32, 12)),
    "local maximum and sum",
    "labels not moved",
    "target not summed",
    ins=(P(), P(None, "model"), P()),
    outs=P(),
)
def vocab_parallel_cross_entropy(bug, h, w, labels):
    logits = h @ w
    n = logits.shape[1]
    top = lax.pmax(logits.max(1), "model")
    z = jnp.exp(logits - top[:, None]).sum(1)
    if bug == "local maximum and sum":
        lse = jax.nn.logsumexp(logits, 1)
    else:
        lse = jnp.log(lax.psum(z, "model")) + top
    start = 0 if bug == "labels not moved" else lax.axis_index("model") * n
    local = labels - start
    inside = (local >= 0) & (local < n)
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, n - 1)[:, None], 1)[:, 0]
    target = jnp.where(inside, picked, 0.0)
    target = target if bug == "target not summed" else lax.psum(target, "model")
    return jnp.mean(lse - target)


def clip_loss(images, texts, scale):
    images = images / jnp.linalg.norm(images, axis=-1, keepdims=True)
    texts = texts / jnp.linalg.norm(texts, axis=-1, keepdims=True)
    logits = scale * images @ texts.T
    diagonal = jnp.arange(logits.shape[0])
    a = -jnp.mean(jax.nn.log_softmax(logits, 1)[diagonal, diagonal])
    return (a - jnp.mean(jax.nn.log_softmax(logits, 0)[diagonal, diagonal])) / 2


@case(
    {"data": 8},
    clip_loss,
    lambda: (*floats((16, 6), (16, 6)), jnp.float32(3.0)),
    "labels not moved",
    "psum of means",
    "not reduced",
    "texts not gathered",
    ins=(P("data"), P("data"), P()),
    outs=P(),
)
def contrastive(bug, images, texts, scale):
    def side(a, b, scale):
        n = a.shape[0]
        everyone = b if bug == "texts not gathered" else lax.all_gather(b, "data", tiled=True)
        logits = scale * a @ everyone.T
        labels = jnp.arange(n)
        if bug not in ("labels not moved", "texts not gathered"):
            labels = labels + lax.axis_index("data") * n
        logp = jax.nn.log_softmax(logits)
        return -logp[jnp.arange(n), labels].mean()

    images = images / jnp.linalg.norm(images, axis=-1, keepdims=True)
    texts = texts / jnp.linalg.norm(texts, axis=-1, keepdims=True)
    loss = (side(images, texts, scale) + side(texts, images, scale)) / 2
    if bug == "psum of means":
        return lax.psum(loss, "data")
    return loss if bug == "not reduced" else lax.pmean(loss, "data")


def masked_loss(h, w, labels, mask):
    nll = -jnp.take_along_axis(jax.nn.log_softmax(h @ w), labels[:, None], 1)[:, 0]
    return (nll * mask).sum() / mask.sum()


def with_mask():
    mask = (integers(0, 4, 32, seed=5) > 0).astype(jnp.float32)
    return (*floats((32, 8), (8, 10)), integers(0, 10, 32), mask)


@case(
    {"data": 4},
    masked_loss,
    with_mask,
    "mean of local means",
    "divided by local count",
    "count averaged",
    ins=(P("data"), P(), P("data"), P("data")),
    outs=P(),
)
def masked_mean(bug, h, w, labels, mask):
    nll = -jnp.take_along_axis(jax.nn.log_softmax(h @ w), labels[:, None], 1)[:, 0]
    if bug == "mean of local means":
        return lax.pmean((nll * mask).sum() / mask.sum(), "data")
    total = lax.psum((nll * mask).sum(), "data")
    if bug == "divided by local count":
        return total / mask.sum()
    if bug == "count averaged":
        return total / lax.pmean(mask.sum(), "data")
    return total / lax.psum(mask.sum(), "data")


def one_hot_loss(h, w, labels):
    logits = h @ w
    hot = jax.nn.one_hot(labels, logits.shape[-1])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - (hot * logits).sum(-1))


@case(
    {"data": 2, "model": 4},
    one_hot_loss,
    lambda: (*floats((8, 6), (6, 16)), integers(0, 16, 8)),
    "one_hot of global labels",
    "maximum not shared",
    "mean over both axes missing data",
    ins=(P("data"), P(None, "model"), P("data")),
    outs=P(),
)
def one_hot_cross_entropy(bug, h, w, labels):
    logits = h @ w
    n = logits.shape[-1]
    first = lax.axis_index("model") * n
    hot = jax.nn.one_hot(labels if bug == "one_hot of global labels" else labels - first, n)
    top = logits.max(-1)
    top = top if bug == "maximum not shared" else lax.pmax(top, "model")
    total = lax.psum(jnp.exp(logits - top[:, None]).sum(-1), "model")
    target = lax.psum((hot * logits).sum(-1), "model")
    loss = jnp.mean(jnp.log(total) + top - target)
    return loss if bug == "mean over both axes missing data" else lax.pmean(loss, "data")


def balance(x, w):
    probs = jax.nn.softmax(x @ w)
    chosen = jax.nn.one_hot(jnp.argmax(probs, -1), w.shape[1])
    return w.shape[1] * jnp.sum(chosen.mean(0) * probs.mean(0))


@case(
    {"data": 8},
    balance,
    lambda: floats((64, 8), (8, 4)),
    "product before mean",
    "psum of means",
    "one factor local",
    ins=(P("data"), P()),
    outs=P(),
)
def load_balance_loss(bug, x, w):
    probs = jax.nn.softmax(x @ w)
    fraction, mean = jax.nn.one_hot(jnp.argmax(probs, -1), w.shape[1]).mean(0), probs.mean(0)
    if bug == "product before mean":
        return w.shape[1] * lax.pmean(jnp.sum(fraction * mean), "data")
    if bug == "psum of means":
        fraction, mean = lax.psum(fraction, "data"), lax.psum(mean, "data")
    elif bug == "one factor local":
        fraction = lax.pmean(fraction, "data")
    else:
        fraction, mean = lax.pmean((fraction, mean), "data")
    return w.shape[1] * jnp.sum(fraction * mean)
