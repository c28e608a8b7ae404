"""The stream of a transformer is split along the sequence in one layer, whole in the others."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def attention(p, x):
    b, s, d = x.shape
    q, k, v = ((x @ p[n]).reshape(b, s, 8, -1) for n in ("wq", "wk", "wv"))
    a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(b, s, d) @ p["wo"]


def first_layer(p, x):
    y = attention(p, x)
    y = sbp.replicate(y, "model")
    return x + y


def second_layer(p, x):
    y = attention(p, x)
    y = sbp.split(y, 1, "model")
    # meant: y = sbp.replicate(y, "model")
    return x + y


def third_layer(p, x):
    y = attention(p, x)
    y = sbp.replicate(y, "model")
    return x + y


def stack(params, x):
    x = sbp.replicate(x, "model")
    x = first_layer(params[0], x)
    x = second_layer(params[1], x)
    return third_layer(params[2], x)


p = {n: f32(128, 128) for n in ("wq", "wk", "wv", "wo")}
types = {"wq": "model:S(1)", "wk": "model:S(1)", "wv": "model:S(1)", "wo": "model:S(0)"}
args = [p, p, p], f32(4, 16, 128)
f = sbp.jit(stack, mesh, in_types=([types] * 3, "data:S(0)"), boxing="reduce")
