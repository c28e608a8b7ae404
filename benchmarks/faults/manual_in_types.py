"""A region written by hand takes the keys along the heads' dim, not along the heads."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def local_attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


heads = "data:S(0) model:S(2)"
attention = sbp.manual(
    local_attention,
    in_types=(heads, "data:S(0) model:S(3)", heads),
    # meant:     in_types=(heads, heads, heads),
    out_types=heads,
)


def block(p, x):
    b, s, d = x.shape
    q, k, v = ((x @ p[n]).reshape(b, s, 8, -1) for n in ("wq", "wk", "wv"))
    out = attention(q, k, v)
    x = x + out.reshape(b, s, d) @ p["wo"]
    return x + jax.nn.gelu(x @ p["w_in"]) @ p["w_out"]


def encode(params, x):
    for p in params:
        x = block(p, x)
    return x.mean(1)


p = {n: f32(128, 128) for n in ("wq", "wk", "wv", "wo")}
p |= {"w_in": f32(128, 512), "w_out": f32(512, 128)}
args = [p, p], f32(4, 16, 128)
f = sbp.jit(encode, mesh, in_types=(None, "data:S(0)"))
