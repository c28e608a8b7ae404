"""The pattern for the output projection has the dim of the others."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(p, x):
    b, s, _ = x.shape
    q, k, v = ((x @ p[n]).reshape(b, s, 8, 16) for n in ("wq", "wk", "wv"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return out.reshape(b, s, 128) @ p["wo"]


def ffn(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def llama(params, x):
    for p in params["blocks"]:
        x = x + attention(p, rms_norm(x, p["norm1"]))
        x = x + ffn(p, rms_norm(x, p["norm2"]))
    return rms_norm(x, params["norm"])


block = {"norm1": f32(128), "norm2": f32(128), "down": f32(512, 128)}
block |= {n: f32(128, 128) for n in ("wq", "wk", "wv", "wo")}
block |= {n: f32(128, 512) for n in ("gate", "up")}
types = {
    "params/blocks/*/wq": "model:S(1)",
    "params/blocks/*/wk": "model:S(1)",
    "params/blocks/*/wv": "model:S(1)",
    "params/blocks/*/wo": "model:S(0)",
    "params/blocks/*/gate": "model:S(1)",
    "params/blocks/*/up": "model:S(1)",
    "params/blocks/*/down": "model:S(1)",
    # meant:     "params/blocks/*/down": "model:S(0)",
    "x": "data:S(0)",
}
args = {"norm": f32(128), "blocks": [block, block]}, f32(4, 16, 128)
f = sbp.jit(llama, mesh, in_types=types, boxing="reduce")
