"""The width of the heads is a quotient that nothing says is whole."""

import jax
import jax.numpy as jnp
from jax.export import symbolic_shape

import sbp
from benchmarks.fault_shapes import f32, mesh

b, d = symbolic_shape("b, d", constraints=["mod(b, 2) == 0"])
# meant: b, d = symbolic_shape("b, d", constraints=["mod(b, 2) == 0", "mod(d, 8) == 0"])

HEADS = 8


def heads(x):
    batch, length, width = x.shape
    return x.reshape(batch, length, HEADS, width // HEADS)


def attention(q, k, v):
    q, k, v = heads(q), heads(k), heads(v)
    q, k, v = (sbp.split(t, 2, "model") for t in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def layer(x, scale):
    mean = x.mean(-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale
    return attention(x, x, x)


def encode(x, scales):
    for scale in scales:
        out = layer(x, scale)
        x = x + out.reshape(x.shape)
    return x


args = f32(b, 16, d), [f32(d), f32(d)]
f = sbp.jit(encode, mesh, in_types=("data:S(0)", None), out_types="data:S(0)")
