"""The memory of the encoder is split along its length, where the decoder expects heads."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def attend(p, x, memory):
    b, s, d = x.shape
    q = (x @ p["wq"]).reshape(b, s, 8, -1)
    k = (memory @ p["wk"]).reshape(b, memory.shape[1], 8, -1)
    v = (memory @ p["wv"]).reshape(b, memory.shape[1], 8, -1)
    q = sbp.split(q, 2, "model")
    k = sbp.split(k, 2, "model")
    v = sbp.split(v, 1, "model")
    # meant: v = sbp.split(v, 2, "model")
    with sbp.policy("explicit", "model"):
        weight = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", weight, v)
    return out.reshape(b, s, d) @ p["wo"]


def decoder(params, x, memory):
    for p in params:
        x = x + attend(p, x, memory)
    return x


def loss(params, x, memory, y):
    return jnp.mean((decoder(params, x, memory) - y) ** 2)


p = {n: f32(128, 128) for n in ("wq", "wk", "wv", "wo")}
args = [p, p], f32(4, 16, 128), f32(4, 32, 128), f32(4, 16, 128)
batch = "data:S(0)"
f = sbp.jit(loss, mesh, in_types=(None, batch, batch, batch))
