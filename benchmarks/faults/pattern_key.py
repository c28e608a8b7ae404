"""A pattern names a key that the parameters do not have."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def attention(p, x):
    b, s, d = x.shape
    qkv = (x @ p["qkv"]).reshape(b, s, 3, 8, d // 8)
    q, k, v = (qkv[:, :, n] for n in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (d // 8) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return out.reshape(b, s, d) @ p["out"]


def block(p, x):
    x = x + attention(p["attention"], x)
    return x + jax.nn.gelu(x @ p["mlp"]["up"]) @ p["mlp"]["down"]


def gpt(params, x):
    for p in params["blocks"]:
        x = block(p, x)
    return x @ params["head"]


attn = {"qkv": f32(128, 384), "out": f32(128, 128)}
p = {"attention": attn, "mlp": {"up": f32(128, 512), "down": f32(512, 128)}}
types = {
    "blocks/*/attention/qkv": "B",
    "blocks/*/attention/out": "model:S(0)",
    "blocks/*/mpl/up": "model:S(1)",
    # meant:     "blocks/*/mlp/up": "model:S(1)",
    "blocks/*/mlp/down": "model:S(0)",
    "x": "data:S(0)",
}
args = {"blocks": [p, p], "head": f32(128, 256)}, f32(4, 16, 128)
f = sbp.jit(gpt, mesh, in_types=types)
