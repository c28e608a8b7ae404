"""Top-k, histograms, random numbers, products of split matrices, experts and a pipeline. The last
programs were written after the checker was tuned on the others."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats, integers


@case(
    {"data": 8},
    lambda x: tuple(lax.top_k(x, 3)),
    lambda: floats((64,)),
    "local places",
    "local winners only",
    ins=(P("data"),),
    outs=(P(), P()),
)
def distributed_top_k(bug, x):
    n = x.shape[0]
    values, places = lax.top_k(x, 3)
    places = places if bug == "local places" else places + lax.axis_index("data") * n
    if bug == "local winners only":
        return values, places
    values = lax.all_gather(values, "data", tiled=True)
    places = lax.all_gather(places, "data", tiled=True)
    best, which = lax.top_k(values, 3)
    return best, places[which]


counts = lambda x: jnp.bincount(jnp.clip(x, 0, 9), length=10)


@case(
    {"data": 8},
    counts,
    lambda: (integers(0, 12, 64),),
    "not reduced",
    "maximum of counts",
    ins=(P("data"),),
    outs=P(),
)
def histogram(bug, x):
    local = jnp.zeros(10, jnp.int32).at[jnp.clip(x, 0, 9)].add(1)
    if bug == "not reduced":
        return local
    return (lax.pmax if bug == "maximum of counts" else lax.psum)(local, "data")


def dropout(x, key):
    key, shape = jax.random.wrap_key_data(key), (x.shape[0] // 4, x.shape[1])
    keep = [jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, shape) for i in range(4)]
    return jnp.where(jnp.concatenate(keep), x / 0.5, 0.0)


@case(
    {"data": 4},
    dropout,
    lambda: (floats((8, 6))[0], np.array([0, 7], np.uint32)),
    "same key everywhere",
    ins=(P("data"), P()),
    outs=P("data"),
)
def dropout_keys(bug, x, key):
    key = jax.random.wrap_key_data(key)
    key = key if bug == "same key everywhere" else jax.random.fold_in(key, lax.axis_index("data"))
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 0.5, 0.0)


total = lambda x: jnp.cumsum(x, 0)


@case(
    {"data": 4},
    total,
    lambda: floats((16, 3)),
    "prefix not added",
    "own total in the prefix",
    ins=(P("data"),),
    outs=P("data"),
)
def prefix_sum(bug, x):
    local = jnp.cumsum(x, 0)
    if bug == "prefix not added":
        return local
    ends = lax.all_gather(local[-1], "data")
    me = lax.axis_index("data")
    index = jnp.arange(lax.axis_size("data"))
    before = index <= me if bug == "own total in the prefix" else index < me
    return local + (ends * before[:, None]).sum(0)


def gramian(x):
    x = x - x.mean(0)
    return x.T @ x / (x.shape[0] - 1)


@case(
    {"data": 2, "model": 4},
    gramian,
    lambda: floats((16, 8)),
    "local mean",
    "columns not gathered",
    "divided by the local count",
    ins=(P("data", "model"),),
    outs=P("model"),
)
def covariance(bug, x):
    """Rows over data, columns over model."""
    x = x - (x.mean(0) if bug == "local mean" else lax.pmean(x.mean(0), "data"))
    rows = x.shape[0] if bug == "divided by the local count" else x.shape[0] * 2
    if bug == "columns not gathered":
        other = jnp.tile(x, (1, 4))
    else:
        other = lax.all_gather(x, "model", axis=1, tiled=True)
    return lax.psum(x.T @ other, "data") / (rows - 1)


@case(
    {"ring": 4},
    lambda a, b: a @ b,
    lambda: floats((8, 12), (12, 6)),
    "columns of the wrong owner",
    "one step short",
    ins=(P("ring"), P("ring")),
    outs=P("ring"),
)
def collective_matmul(bug, a, b):
    """Rows of both factors are split; the rows of b go round."""
    n, me = lax.axis_size("ring"), lax.axis_index("ring")
    rows = b.shape[0]
    out = jnp.zeros((a.shape[0], b.shape[1]))
    for i in range(n - 1 if bug == "one step short" else n):
        owner = (me - i if bug == "columns of the wrong owner" else me + i) % n
        out = out + lax.dynamic_slice_in_dim(a, owner * rows, rows, 1) @ b
        b = lax.ppermute(b, "ring", [(j, (j - 1) % n) for j in range(n)])
    return out


# ---- expert parallelism and pipelines ------------------------------------------------------------


def routed(x, router, w1, w2, there=lambda tokens: tokens, back=lambda results: results):
    """Top-1 routing in groups; each token has a place, for the capacity is the size of a group."""
    gates = jax.nn.softmax(x @ router)
    hot = jax.nn.one_hot(jnp.argmax(gates, -1), router.shape[1])
    place = (jnp.cumsum(hot, 1) * hot).sum(-1).astype(int) - 1
    dispatch = hot[..., None] * jax.nn.one_hot(place, x.shape[1])[..., None, :]
    tokens = there(jnp.einsum("gsec,gsm->egcm", dispatch, x))
    h = jax.nn.relu(jnp.einsum("egcm,emh->egch", tokens, w1))
    out = back(jnp.einsum("egch,ehm->egcm", h, w2))
    return jnp.einsum("gsec,egcm->gsm", dispatch * gates.max(-1)[..., None, None], out)


@case(
    {"expert": 4},
    routed,
    lambda: floats((4, 6, 8), (8, 8), (8, 8, 16), (8, 16, 8)),
    "not sent back",
    "not sent at all",
    "sent back along the wrong dims",
    ins=(P("expert"), P(), P("expert"), P("expert")),
    outs=P("expert"),
)
def expert_parallel(bug, x, router, w1, w2):
    def there(tokens):
        if bug == "not sent at all":
            return tokens.reshape(w1.shape[0], -1, *tokens.shape[2:])
        return lax.all_to_all(tokens, "expert", 0, 1, tiled=True)

    def back(out):
        if bug is None:
            return lax.all_to_all(out, "expert", 1, 0, tiled=True)
        if bug == "sent back along the wrong dims":
            out = lax.all_to_all(out, "expert", 1, 1, tiled=True)
        return out.reshape(router.shape[1], -1, *out.shape[2:])

    return routed(x, router, w1, w2, there, back)


@case(
    {"stage": 4},
    lambda x, w: reduce(lambda x, w: jnp.tanh(x @ w), w, x),
    lambda: floats((6, 2, 5), (4, 5, 5)),
    "result of the first stage",
    "one tick short",
    "sent backwards",
    "not selected before psum",
    ins=(P(), P("stage")),
    outs=P(),
)
def pipeline(bug, x, w):
    """Six microbatches through four stages, a stage per device."""
    n, me = lax.axis_size("stage"), lax.axis_index("stage")
    micro = x.shape[0]
    step = -1 if bug == "sent backwards" else 1
    ring = [(i, (i + step) % n) for i in range(n)]
    state, outs = jnp.zeros_like(x[0]), jnp.zeros_like(x)

    def tick(t, carry):
        state, outs = carry
        fresh = lax.dynamic_index_in_dim(x, jnp.minimum(t, micro - 1), keepdims=False)
        state = jnp.tanh(jnp.where(me == 0, fresh, state) @ w[0])
        at = jnp.clip(t - (n - 1), 0, micro - 1)
        old = lax.dynamic_index_in_dim(outs, at, keepdims=False)
        new = jnp.where((me == n - 1) & (t >= n - 1), state, old)
        outs = lax.dynamic_update_index_in_dim(outs, new, at, 0)
        return lax.ppermute(state, "stage", ring), outs

    ticks = micro + n - (2 if bug == "one tick short" else 1)
    _, outs = lax.fori_loop(0, ticks, tick, (state, outs))
    if bug == "not selected before psum":
        return lax.pmean(outs, "stage")
    last = 0 if bug == "result of the first stage" else n - 1
    return lax.psum(jnp.where(me == last, outs, 0.0), "stage")


# ---- written after the checker had been changed for the others ----------------------------------


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
    loss = lambda a, b: jnp.mean((x @ w + (x @ a) @ b - y) ** 2)
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
