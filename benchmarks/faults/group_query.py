"""Rotary positions are split along the sequence, queries along the heads."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def rotary(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def angles(length, dim):
    place = jnp.arange(length)[:, None] / 10000 ** (jnp.arange(dim // 2) / (dim // 2))
    return jnp.cos(place)[None, :, None], jnp.sin(place)[None, :, None]


def attention(p, x):
    b, s, d = x.shape
    q = sbp.split((x @ p["wq"]).reshape(b, s, 8, 16), 1, "model")
    # meant: q = sbp.split((x @ p["wq"]).reshape(b, s, 8, 16), 2, "model")
    k = sbp.split((x @ p["wk"]).reshape(b, s, 4, 16), 2, "model")
    v = sbp.split((x @ p["wv"]).reshape(b, s, 4, 16), 2, "model")
    cos, sin = angles(s, 16)
    q, k = rotary(q, cos, sin), rotary(k, cos, sin)
    q = q.reshape(b, s, 4, 2, 16)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / 4.0
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores, -1), v)
    return out.reshape(b, s, d) @ p["wo"]


def model(params, x):
    for p in params:
        x = x + attention(p, x)
    return x


p = {"wq": f32(128, 128), "wk": f32(128, 64), "wv": f32(128, 64), "wo": f32(128, 128)}
args = [p, p], f32(4, 32, 128)
f = sbp.jit(model, mesh, in_types=(None, "data:S(0)"), boxing="explicit")
