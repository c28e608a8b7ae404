"""The policy forbids the reductions that tensor parallelism needs."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def ffn(p, x):
    gate = jax.nn.silu(x @ p["gate"])
    return (gate * (x @ p["up"])) @ p["down"]


def attention(p, x):
    b, s, d = x.shape
    q, k, v = ((x @ p[n]).reshape(b, s, 4, -1) for n in ("wq", "wk", "wv"))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(b, s, d) @ p["wo"]


def decoder(params, x):
    for p in params:
        x = x + attention(p, rms_norm(x, p["norm1"]))
        x = x + ffn(p, rms_norm(x, p["norm2"]))
    return x


columns, rows = "model:S(1)", "model:S(0)"
types = {n: columns for n in ("wq", "wk", "wv", "gate", "up")}
types |= {"wo": rows, "down": rows, "norm1": "B", "norm2": "B"}
p = {n: f32(64, 64) for n in ("wq", "wk", "wv", "wo")}
p |= {"gate": f32(64, 256), "up": f32(64, 256), "down": f32(256, 64)}
p |= {"norm1": f32(64), "norm2": f32(64)}
args = [p, p], f32(4, 16, 64)
f = sbp.jit(
    decoder,
    mesh,
    in_types=([types] * 2, "data:S(0)"),
    boxing="explicit",
    # meant:     boxing="reduce",
)
