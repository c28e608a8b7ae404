"""Programs that were written after the checker had been changed for the others."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats, integers


def cluster(points, centres):
    distance = ((points[:, None] - centres[None]) ** 2).sum(-1)
    hot = jax.nn.one_hot(jnp.argmin(distance, 1), centres.shape[0])
    return hot.T @ points / jnp.maximum(hot.sum(0), 1.0)[:, None], distance.min(1).mean()


@case(
    {"data": 8},
    cluster,
    lambda: floats((64, 3), (4, 3)),
    "counts of the shard",
    "centres averaged",
    ins=(P("data"), P()),
    outs=(P(), P()),
)
def k_means(bug, points, centres):
    distance = jax.vmap(lambda p: jnp.sum((p - centres) ** 2, -1))(points)
    hot = jax.nn.one_hot(jnp.argmin(distance, 1), centres.shape[0])
    sums, counts = jnp.einsum("nk,nd->kd", hot, points), hot.sum(0)
    inertia = lax.pmean(distance.min(1).mean(), "data")
    if bug == "centres averaged":
        return lax.pmean(sums / jnp.maximum(counts, 1.0)[:, None], "data"), inertia
    counts = counts if bug == "counts of the shard" else lax.psum(counts, "data")
    return lax.psum(sums, "data") / jnp.maximum(counts, 1.0)[:, None], inertia


def pairwise(images, texts, scale, bias):
    logits = images @ texts.T * scale + bias
    return -jax.nn.log_sigmoid((2 * jnp.eye(len(logits)) - 1) * logits).sum() / len(logits)


@case(
    {"data": 4},
    pairwise,
    lambda: (*floats((12, 5), (12, 5)), jnp.float32(2.0), jnp.float32(-1.0)),
    "diagonal of the first block",
    "divided by the rows of a shard",
    ins=(P("data"), P("data"), P(), P()),
    outs=P(),
)
def sigmoid_pairs(bug, images, texts, scale, bias):
    rows = images.shape[0]
    every = lax.all_gather(texts, "data", tiled=True)
    logits = images @ every.T * scale + bias
    row, column = jnp.arange(rows), jnp.arange(every.shape[0])
    row = row if bug == "diagonal of the first block" else row + rows * lax.axis_index("data")
    signs = jnp.where(row[:, None] == column[None], 1.0, -1.0)
    total = lax.psum(-jax.nn.log_sigmoid(signs * logits).sum(), "data")
    count = rows if bug == "divided by the rows of a shard" else every.shape[0]
    return total / count


def distil(h, student, teacher):
    s, t = jax.nn.log_softmax(h @ student), jax.nn.log_softmax(h @ teacher)
    return jnp.mean(jnp.sum(jnp.exp(t) * (t - s), -1))


@case(
    {"data": 2, "model": 4},
    distil,
    lambda: floats((8, 6), (6, 16), (6, 16)),
    "teacher normalised by shard",
    "summed over data only",
    ins=(P("data"), P(None, "model"), P(None, "model")),
    outs=P(),
)
def distillation(bug, h, student, teacher):
    def log_softmax(z, local=False):
        if local:
            return jax.nn.log_softmax(z)
        z = z - lax.stop_gradient(lax.pmax(z.max(-1, keepdims=True), "model"))
        return z - jnp.log(lax.psum(jnp.exp(z).sum(-1, keepdims=True), "model"))

    s = log_softmax(h @ student)
    t = log_softmax(h @ teacher, bug == "teacher normalised by shard")
    each = jnp.sum(jnp.exp(t) * (t - s), -1)
    each = each if bug == "summed over data only" else lax.psum(each, "model")
    return lax.pmean(each.mean(), "data")


def factored(w, g):
    rows, columns = (g * g).mean(1), (g * g).mean(0)
    update = g * lax.rsqrt(rows[:, None] * columns[None] / rows.mean() + 1e-8)
    return w - 0.1 * update / jnp.maximum(1.0, jnp.sqrt(jnp.mean(update**2)))


@case(
    {"model": 8},
    factored,
    lambda: floats((16, 6), (16, 6)),
    "column means of the shard",
    "clipped by the shard's norm",
    ins=(P("model"), P("model")),
    outs=P("model"),
)
def adafactor(bug, w, g):
    """The weight is split by rows: means of rows are local, means of columns are not."""
    square = g * g
    rows, columns = square.mean(1), square.mean(0)
    columns = columns if bug == "column means of the shard" else lax.pmean(columns, "model")
    v = rows[:, None] * columns[None] / lax.pmean(rows.mean(), "model")
    update = g * lax.rsqrt(v + 1e-8)
    size = jnp.mean(update**2)
    size = size if bug == "clipped by the shard's norm" else lax.pmean(size, "model")
    return w - 0.1 * update / jnp.maximum(1.0, jnp.sqrt(size))


def advantages(reward, value, mask):
    a = (reward - value) * mask
    n = mask.sum()
    mean = a.sum() / n
    return (a - mean) / (jnp.sqrt((((a - mean) * mask) ** 2).sum() / n) + 1e-6) * mask


@case(
    {"data": 8},
    advantages,
    lambda: (*floats((16, 5), (16, 5)), (integers(0, 3, 16, 5) > 0).astype(jnp.float32)),
    "spread of the shard averaged",
    "mean of the shard",
    ins=(P("data"),) * 3,
    outs=P("data"),
)
def normalised_advantages(bug, reward, value, mask):
    a = (reward - value) * mask
    total, n = lax.psum((a.sum(), mask.sum()), "data")
    mean = a.sum() / mask.sum() if bug == "mean of the shard" else total / n
    square = (((a - mean) * mask) ** 2).sum()
    if bug == "spread of the shard averaged":
        spread = lax.pmean(jnp.sqrt(square / mask.sum()), "data")
    else:
        spread = jnp.sqrt(lax.psum(square, "data") / n)
    return (a - mean) / (spread + 1e-6) * mask


def low_rank(x, w, a, b, y):
    def loss(a, b):
        return jnp.mean((x @ w + (x @ a) @ b - y) ** 2)

    ga, gb = jax.grad(loss, (0, 1))(a, b)
    return a - 0.1 * ga, b - 0.1 * gb


@case(
    {"data": 2, "model": 4},
    low_rank,
    lambda: floats((8, 6), (6, 12), (6, 2), (2, 12), (8, 12)),
    "first factor not reduced over model",
    "second factor not reduced over data",
    "loss of a shard of the columns",
    ins=(P("data"), P(None, "model"), P(), P(None, "model"), P("data", "model")),
    outs=(P(), P(None, "model")),
)
def low_rank_adapter(bug, x, w, a, b, y):
    """The weight is split by columns, so is the second factor; the first one is whole."""
    out = x @ w + (x @ a) @ b - y
    scale = 2 / (x.shape[0] * y.shape[1] * 2 * 4)
    scale = 2 / (x.shape[0] * 2 * y.shape[1]) if bug == "loss of a shard of the columns" else scale
    ga = x.T @ (out @ b.T) * scale
    gb = (x @ a).T @ out * scale
    ga = lax.psum(ga, "data" if bug == "first factor not reduced over model" else ("data", "model"))
    gb = gb if bug == "second factor not reduced over data" else lax.psum(gb, "data")
    return a - 0.1 * ga, b - 0.1 * gb
