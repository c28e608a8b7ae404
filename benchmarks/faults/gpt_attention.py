"""The keys are projected by a matrix that is split by rows."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

HEADS = 8


def heads_of(x, w):
    b, s, _ = x.shape
    return (x @ w).reshape(b, s, HEADS, -1).transpose(0, 2, 1, 3)


def attention(p, x):
    wq = sbp.split(p["wq"], 1, "model")
    wk = sbp.split(p["wk"], 0, "model")
    # meant: wk = sbp.split(p["wk"], 1, "model")
    wv = sbp.split(p["wv"], 1, "model")
    wo = sbp.split(p["wo"], 0, "model")
    x = sbp.replicate(x, "model")
    q, k, v = heads_of(x, wq), heads_of(x, wk), heads_of(x, wv)
    q, k, v = (sbp.split(t, 1, "model") for t in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores, -1e9)
    out = jax.nn.softmax(scores, axis=-1) @ v
    b, _, s, _ = out.shape
    return out.transpose(0, 2, 1, 3).reshape(b, s, -1) @ wo


def model(params, x):
    for p in params:
        x = x + attention(p, x)
    return x


layer = {name: f32(128, 128) for name in ("wq", "wk", "wv", "wo")}
args = [layer, layer], f32(4, 32, 128)
f = sbp.jit(model, mesh, in_types=(None, "data:S(0)"), boxing="explicit", out_types="data:S(0)")
