"""The new values are split along the head's dim, the cache along the heads."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh

BATCH, HEADS, LENGTH, DIM = 8, 8, 64, 16


def project(p, x):
    q, k, v = (x @ p[n] for n in ("wq", "wk", "wv"))
    return (t.reshape(BATCH, HEADS, 1, DIM) for t in (q, k, v))


def attend(p, cache, x, index):
    keys, values = cache
    q, k, v = project(p, x)
    q = sbp.split(q, 1, "model")
    k = sbp.split(k, 1, "model")
    v = sbp.split(v, 3, "model")
    # meant: v = sbp.split(v, 1, "model")
    keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, index, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, 0, index, 0))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, keys) / DIM**0.5
    scores = jnp.where(jnp.arange(LENGTH) <= index, scores, -1e9)
    out = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), values)
    return out.reshape(BATCH, HEADS * DIM) @ p["wo"], (keys, values)


def decode(params, caches, x, index):
    made = []
    for p, cache in zip(params, caches, strict=True):
        y, cache = attend(p, cache, x, index)
        x = x + y
        made.append(cache)
    return x, made


layer = {n: f32(128, 128) for n in ("wq", "wk", "wv", "wo")}
cache = f32(BATCH, HEADS, LENGTH, DIM), f32(BATCH, HEADS, LENGTH, DIM)
weights = {"wq": "model:S(1)", "wk": "model:S(1)", "wv": "model:S(1)", "wo": "model:S(0)"}
held = "data:S(0) model:S(1)"
args = [layer, layer], [cache, cache], f32(BATCH, 128), i32()
f = sbp.jit(decode, mesh, in_types=([weights] * 2, held, "data:S(0)", "B"), boxing="reduce")
