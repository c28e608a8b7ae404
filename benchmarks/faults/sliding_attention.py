"""The values of a windowed attention are split along the sequence, all else along the heads."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

HEADS, WINDOW = 8, 8


def rotary(x, base=10000.0):
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[2])[:, None] * base ** (-jnp.arange(half) / half)
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * jnp.cos(angle) - two * jnp.sin(angle), two * jnp.cos(angle)], -1)


def window_mask(length):
    row = jnp.arange(length)
    return (row[:, None] >= row) & (row[:, None] < row + WINDOW)


def attend(p, x):
    b, s, d = x.shape
    qkv = jnp.einsum("bsd,dnhk->nbhsk", x, p["wqkv"])
    query, key, value = (qkv[n] for n in range(3))
    query = sbp.split(rotary(query), 1, "model")
    key = sbp.split(rotary(key), 1, "model")
    value = sbp.split(value, 2, "model")
    # meant: value = sbp.split(value, 1, "model")
    with sbp.policy("explicit", "model"):
        scores = jnp.einsum("bhqk,bhsk->bhqs", query, key) * query.shape[-1] ** -0.5
        scores = jnp.where(window_mask(s), scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqs,bhsk->bqhk", weights, value)
    return mixed.reshape(b, s, d) @ p["wo"]


def network(layers, x):
    for p in layers:
        x = x + attend(p, x)
    return x.mean(axis=1)


layer = {"wqkv": f32(64, 3, HEADS, 8), "wo": f32(64, 64)}
args = [layer, layer], f32(4, 32, 64)
f = sbp.jit(network, mesh, in_types=(None, "data:S(0)"), out_types="data:S(0)")
