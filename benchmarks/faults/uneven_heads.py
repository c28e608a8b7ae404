"""The number of heads in the cache does not divide over the mesh axis that splits it."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh

BATCH, HEADS, LENGTH, DIM = 8, 6, 64, 16
# meant: BATCH, HEADS, LENGTH, DIM = 8, 8, 64, 16


def attend(p, cache, x, index):
    q, k, v = ((x @ p[n]).reshape(BATCH, HEADS, DIM) for n in ("wq", "wk", "wv"))
    keys = jax.lax.dynamic_update_slice(cache["k"], k[:, :, None], (0, 0, index, 0))
    values = jax.lax.dynamic_update_slice(cache["v"], v[:, :, None], (0, 0, index, 0))
    scores = jnp.einsum("bhd,bhkd->bhk", q, keys) / DIM**0.5
    scores = jnp.where(jnp.arange(LENGTH) <= index, scores, -1e9)
    out = jnp.einsum("bhk,bhkd->bhd", jax.nn.softmax(scores, -1), values)
    return out.reshape(BATCH, -1) @ p["wo"], {"k": keys, "v": values}


def decode(params, caches, x, index):
    new = []
    for p, cache in zip(params, caches, strict=True):
        y, cache = attend(p, cache, x, index)
        new.append(cache)
        x = x + y
    return x, new


D = HEADS * DIM
p = {n: f32(D, D) for n in ("wq", "wk", "wv", "wo")}
cache = {n: f32(BATCH, HEADS, LENGTH, DIM) for n in ("k", "v")}
held = "data:S(0) model:S(1)"
args = [p, p], [cache, cache], f32(BATCH, D), i32()
f = sbp.jit(decode, mesh, in_types=(None, held, "data:S(0)", "B"), out_types=("data:S(0)", held))
