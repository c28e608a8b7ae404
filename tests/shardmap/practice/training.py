"""Gradients of sharded and accumulated batches, averaged weights, a loss over a split vocabulary,
and dense layers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats, integers

mse = lambda w, x, y: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)


def params():
    a, b, x, y = floats((6, 8), (8, 4), (16, 6), (16, 4))
    return {"a": a, "b": b}, x, y


def sgd(w, x, y):
    loss, g = jax.value_and_grad(mse)(w, x, y)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), loss


@case(
    {"data": 8},
    sgd,
    params,
    "gradient not reduced",
    "psum of mean gradients",
    "loss not reduced",
    "divided twice",
    ins=(P(), P("data"), P("data")),
    outs=(P(), P()),
)
def data_parallel_step(bug, w, x, y):
    loss, g = jax.value_and_grad(mse)(w, x, y)
    if bug == "psum of mean gradients":
        g = lax.psum(g, "data")
    elif bug == "divided twice":
        g = jax.tree.map(lambda v: lax.pmean(v, "data") / lax.axis_size("data"), g)
    elif bug != "gradient not reduced":
        g = lax.pmean(g, "data")
    loss = loss if bug == "loss not reduced" else lax.pmean(loss, "data")
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), loss


@case(
    {"data": 4},
    sgd,
    params,
    "psum of mean gradients",
    ins=(P(), P("data"), P("data")),
    outs=(P(), P()),
    check_vma=True,
)
def automatic_reduction(bug, w, x, y):
    """With check_vma the gradient of whole parameters is summed by JAX."""
    loss, g = jax.value_and_grad(mse)(w, x, y)
    if bug != "psum of mean gradients":
        g = jax.tree.map(lambda d: d / lax.axis_size("data"), g)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), lax.pmean(loss, "data")


def adam(w, m, v, x, y):
    g = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return w - 0.01 * m / (jnp.sqrt(v) + 1e-8), m, v


def adam_args():
    w, m, v, x, y = floats((16, 4), (16, 4), (16, 4), (24, 16), (24, 4))
    return w, m, abs(v), x, y


@case(
    {"data": 8},
    adam,
    adam_args,
    "not gathered",
    "gradient sliced in place of scattered",
    "scatter not divided",
    ins=(P(), P("data"), P("data"), P("data"), P("data")),
    outs=(P(), P("data"), P("data")),
)
def zero_1(bug, w, m, v, x, y):
    """Optimiser state split over data; parameters whole."""
    n, me = lax.axis_size("data"), lax.axis_index("data")
    g = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    rows = w.shape[0] // n
    if bug == "gradient sliced in place of scattered":
        g = lax.dynamic_slice_in_dim(g, me * rows, rows)
    else:
        g = lax.psum_scatter(g, "data", tiled=True)
        g = g if bug == "scatter not divided" else g / n
    mine = lax.dynamic_slice_in_dim(w, me * rows, rows)
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    mine = mine - 0.01 * m / (jnp.sqrt(v) + 1e-8)
    if bug == "not gathered":
        w = lax.dynamic_update_slice_in_dim(w, mine, me * rows, 0)
    else:
        w = lax.all_gather(mine, "data", tiled=True)
    return w, m, v


@case(
    {"data": 4},
    lambda w, x, y: w - 0.1 * jax.grad(lambda w: jnp.mean((jax.nn.relu(x @ w) - y) ** 2))(w),
    lambda: floats((8, 6), (12, 8), (12, 6)),
    "gradient of the gathered weight sliced",
    "psum and sliced from zero",
    "scattered along columns",
    ins=(P("data"),) * 3,
    outs=P("data"),
)
def zero_3(bug, w, x, y):
    """Parameters split over data: gather, gradient of the whole weight, scatter."""
    n = lax.axis_size("data")
    full = lax.all_gather(w, "data", tiled=True)
    g = jax.grad(lambda w: jnp.mean((jax.nn.relu(x @ w) - y) ** 2))(full)
    rows = w.shape[0]
    if bug == "gradient of the gathered weight sliced":
        g = lax.dynamic_slice_in_dim(g, lax.axis_index("data") * rows, rows)
    elif bug == "psum and sliced from zero":
        g = lax.pmean(g, "data")[:rows]
    elif bug == "scattered along columns":
        g = lax.psum_scatter(g.reshape(rows, -1), "data", scatter_dimension=1, tiled=True) / n
    else:
        g = lax.psum_scatter(g, "data", tiled=True) / n
    return w - 0.1 * g


@case(
    {"data": 2, "model": 4},
    lambda w1, w2, x: jax.grad(lambda w: jnp.mean(jnp.sin(jnp.tanh(x @ w[0]) @ w[1])))((w1, w2)),
    lambda: floats((8, 8), (8, 8), (8, 8)),
    "gather over the wrong axis",
    "loss not averaged",
    ins=(P("data", "model"), P("model", "data"), P("data")),
    outs=(P("data", "model"), P("model", "data")),
    check_vma=True,
)
def fsdp_tensor_gradient(bug, w1, w2, x):
    """Gradients through the all-gather of FSDP and the psum of Megatron, with check_vma."""

    def loss(w1, w2):
        if bug == "gather over the wrong axis":
            a = lax.all_gather(w1, "model", axis=0, tiled=True)[: w1.shape[0] * 2]
        else:
            a = lax.all_gather(w1, "data", axis=0, tiled=True)
        y = lax.psum(jnp.tanh(x @ a) @ lax.all_gather(w2, "data", axis=1, tiled=True), "model")
        value = jnp.mean(jnp.sin(y))
        return value if bug == "loss not averaged" else lax.pmean(value, "data")

    return jax.grad(loss, (0, 1))(w1, w2)


def batch_norm(x, gamma, beta):
    mean = x.mean(0)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(0) + 1e-5) * gamma + beta


@case(
    {"data": 8},
    batch_norm,
    lambda: floats((32, 6), (6,), (6,)),
    "local statistics",
    "mean of local variances",
    "variance of sums",
    ins=(P("data"), P(), P()),
    outs=P("data"),
)
def sync_batch_norm(bug, x, gamma, beta):
    mean = x.mean(0)
    square = (x * x).mean(0)
    if bug == "variance of sums":
        mean, square = lax.psum(mean, "data"), lax.psum(square, "data")
    elif bug == "mean of local variances":
        square = lax.pmean(square - mean * mean, "data") + lax.pmean(mean, "data") ** 2
        mean = lax.pmean(mean, "data")
    elif bug != "local statistics":
        mean, square = lax.pmean((mean, square), "data")
    return (x - mean) * lax.rsqrt(square - mean**2 + 1e-5) * gamma + beta


accumulate = lambda w, x, y: jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)


@case(
    {"data": 4},
    accumulate,
    lambda: floats((6, 3), (32, 6), (32, 3)),
    "psum in the loop and after",
    ins=(P(), P("data"), P("data")),
    outs=P(),
)
def gradient_accumulation(bug, w, x, y):
    micro = 2
    xs = x.reshape(micro, -1, *x.shape[1:])
    ys = y.reshape(micro, -1, *y.shape[1:])

    def step(total, xy):
        x, y = xy
        g = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        g = lax.psum(g, "data") if bug == "psum in the loop and after" else g
        return total + g, None

    total, _ = lax.scan(step, jnp.zeros_like(w), (xs, ys))
    return lax.psum(total, "data") / (micro * lax.axis_size("data"))


def clipped(ga, gb, gc):
    scale = jnp.minimum(1.0, 1.0 / jnp.sqrt(sum(jnp.sum(g * g) for g in (ga, gb, gc))))
    return ga * scale, gb * scale, gc * scale


@case(
    {"model": 8},
    clipped,
    lambda: floats((16, 4), (4, 16), (6,)),
    "whole leaf counted by each device",
    "norm of local shards",
    "norms added after the root",
    ins=(P("model"), P(None, "model"), P()),
    outs=(P("model"), P(None, "model"), P()),
)
def clip_by_global_norm(bug, ga, gb, gc):
    """Two split leaves and a whole one."""
    split = jnp.sum(ga * ga) + jnp.sum(gb * gb)
    whole = jnp.sum(gc * gc)
    if bug == "whole leaf counted by each device":
        square = lax.psum(split + whole, "model")
    elif bug == "norm of local shards":
        square = split + whole
    elif bug == "norms added after the root":
        square = lax.psum(jnp.sqrt(split), "model") ** 2 + whole
    else:
        square = lax.psum(split, "model") + whole
    scale = jnp.minimum(1.0, 1.0 / jnp.sqrt(square))
    return ga * scale, gb * scale, gc * scale


def ema(shadow, w, x):
    w = w - jax.grad(lambda w: jnp.mean(jnp.cos(x @ w)))(w)
    return 0.5 * shadow + 0.5 * w, w


@case(
    {"data": 4},
    ema,
    lambda: floats((6, 3), (6, 3), (16, 6)),
    "shadow of the unreduced step",
    "shadow summed",
    ins=(P(), P(), P("data")),
    outs=(P(), P()),
)
def moving_average(bug, shadow, w, x):
    g = jax.grad(lambda w: jnp.mean(jnp.cos(x @ w)))(w)
    new = w - lax.pmean(g, "data")
    used = w - g if bug == "shadow of the unreduced step" else new
    shadow = 0.5 * shadow + 0.5 * used
    shadow = lax.psum(shadow, "data") if bug == "shadow summed" else shadow
    return shadow, new


# ---- losses -------------------------------------------------------------------------------------


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


# ---- tensor-parallel layers ----------------------------------------------------------------------


@case(
    {"model": 8},
    lambda x, w1, b1, w2, b2: jax.nn.gelu(x @ w1 + b1) @ w2 + b2,
    lambda: floats((4, 16), (16, 32), (32,), (32, 16), (16,)),
    "missing psum",
    "bias before psum",
    "pmean",
    ins=(P(), P(None, "model"), P("model"), P("model", None), P()),
    outs=P(),
)
def megatron_mlp(bug, x, w1, b1, w2, b2):
    y = jax.nn.gelu(x @ w1 + b1) @ w2
    if bug == "missing psum":
        return y + b2
    if bug == "bias before psum":
        return lax.psum(y + b2, "model")
    return lax.pmean(y, "model") + b2 if bug == "pmean" else lax.psum(y, "model") + b2


def attention(x, wq, wk, wv, wo):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (wq, wk, wv))
    s = jnp.einsum("bthk,bshk->bhts", q, k) / jnp.sqrt(q.shape[-1])
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
    o = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(s), v)
    return jnp.einsum("bthk,hkd->btd", o, wo)


@case(
    {"data": 2, "model": 4},
    attention,
    lambda: floats((4, 6, 8), (8, 4, 4), (8, 4, 4), (8, 4, 4), (4, 4, 8)),
    "psum over data",
    "missing psum",
    ins=(P("data"), P(None, "model"), P(None, "model"), P(None, "model"), P("model")),
    outs=P("data"),
)
def megatron_attention(bug, x, wq, wk, wv, wo):
    y = attention(x, wq, wk, wv, wo)
    if bug == "missing psum":
        return y
    return lax.psum(y, "data" if bug == "psum over data" else "model")


rms = lambda x, g: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


block = lambda x, g, w1, w2: x + jax.nn.silu(rms(x, g) @ w1) @ w2


@case(
    {"model": 8},
    block,
    lambda: floats((16, 8), (8,), (8, 32), (32, 8)),
    "psum in place of psum_scatter",
    "gathered along features",
    "missing all_gather",
    ins=(P("model"), P(), P(None, "model"), P("model")),
    outs=P("model"),
)
def sequence_parallel(bug, x, g, w1, w2):
    h = rms(x, g)
    h = h if bug == "missing all_gather" else lax.all_gather(h, "model", axis=0, tiled=True)
    if bug == "gathered along features":
        h = lax.all_gather(rms(x, g), "model", axis=1, tiled=True).reshape(-1, h.shape[1])
    y = jax.nn.silu(h @ w1) @ w2
    if bug == "psum in place of psum_scatter":
        y = lax.psum(y, "model")[: x.shape[0]]
    elif bug == "missing all_gather":
        y = lax.psum(y, "model")
    else:
        y = lax.psum_scatter(y, "model", scatter_dimension=0, tiled=True)
    return x + y


def grads_of_mlp(x, y, w1, w2):
    loss = lambda w1, w2: jnp.mean((jnp.tanh(x @ w1) @ w2 - y) ** 2)
    return jax.grad(loss, (0, 1))(w1, w2)


@case(
    {"data": 2, "model": 4},
    grads_of_mlp,
    lambda: floats((8, 6), (8, 6), (6, 8), (8, 6)),
    "gradient not reduced",
    "psum of means",
    "reduced over model too",
    ins=(P("data"), P("data"), P(None, "model"), P("model", None)),
    outs=(P(None, "model"), P("model", None)),
)
def explicit_backward(bug, x, y, w1, w2):
    """The backward pass of a two-layer MLP by hand, batch over data, hidden units over model."""
    h = jnp.tanh(x @ w1)
    out = lax.psum(h @ w2, "model")
    d_out = 2 * (out - y) / out.size
    d_w2 = h.T @ d_out
    d_h = d_out @ w2.T * (1 - h * h)
    d_w1 = x.T @ d_h
    if bug == "gradient not reduced":
        return d_w1, lax.pmean(d_w2, "data")
    if bug == "psum of means":
        return lax.psum(d_w1, "data"), lax.psum(d_w2, "data")
    if bug == "reduced over model too":
        return lax.pmean(d_w1, "data"), lax.psum(lax.pmean(d_w2, "data"), "model")
    return lax.pmean(d_w1, "data"), lax.pmean(d_w2, "data")


embed = lambda ids, table, w: jnp.tanh(table[ids] @ w)


ids_and = lambda *shapes: lambda: (integers(0, shapes[0][0], 4, 6), *floats(*shapes))


@case(
    {"model": 4},
    embed,
    ids_and((32, 8), (8, 8)),
    "local offset forgotten",
    "mask forgotten",
    ins=(P(), P("model"), P()),
    outs=P(),
)
def vocab_parallel_embedding(bug, ids, table, w):
    rows = table.shape[0]
    local = ids - lax.axis_index("model") * rows
    local = ids if bug == "local offset forgotten" else local
    ok = (local >= 0) & (local < rows)
    got = table[jnp.clip(local, 0, rows - 1)]
    got = got if bug == "mask forgotten" else jnp.where(ok[..., None], got, 0.0)
    return jnp.tanh(lax.psum(got, "model") @ w)
