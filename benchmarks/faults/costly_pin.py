"""A wrong axis in one annotation: types can be had, but at a high price."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def attention(p, x):
    b, s, d = x.shape
    q, k, v = ((x @ p[n]).reshape(b, s, 16, -1) for n in ("wq", "wk", "wv"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = sbp.annotate(scores, data=sbp.S(2), model=sbp.S(1))
    # meant: scores = sbp.annotate(scores, data=sbp.S(0), model=sbp.S(1))
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return out.reshape(b, s, d) @ p["wo"]


def mlp(p, x):
    return jax.nn.gelu(x @ p["w_in"]) @ p["w_out"]


def block(p, x):
    x = x + attention(p, x)
    return x + mlp(p, x)


def forward(params, x):
    for p in params:
        x = block(p, x)
    return x


D = 1024
p = {n: f32(D, D) for n in ("wq", "wk", "wv", "wo")} | {"w_in": f32(D, 4096), "w_out": f32(4096, D)}
columns, rows = "model:S(1)", "model:S(0)"
types = dict.fromkeys(("wq", "wk", "wv", "w_in"), columns) | {"wo": rows, "w_out": rows}
args = [p, p], f32(16, 512, D)
batch = "data:S(0)"
types = [types] * 2, batch
f = sbp.jit(forward, mesh, in_types=types, out_types=batch, hardware="tpu-v5p")
