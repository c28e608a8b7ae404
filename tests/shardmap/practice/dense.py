"""Tensor-parallel layers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shardmap.practice.case import case, floats, integers


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
        y = lax.psum(y, "model")
        y = y[: x.shape[0]]
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
