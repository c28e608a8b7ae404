"""The states of a linear attention are partial where their normaliser is divided."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def feature(x):
    return jax.nn.elu(x) + 1


def linear_attention(q, k, v):
    q, k = feature(q), feature(k)
    state = jnp.einsum("bshd,bshe->bhde", k, v)
    state = sbp.replicate(state, "model")
    total = sbp.partial(k.sum(1), "model")
    # meant:     total = sbp.replicate(k.sum(1), "model")
    top = jnp.einsum("bshd,bhde->bshe", q, state)
    bottom = jnp.einsum("bshd,bhd->bsh", q, total)
    return top / bottom[..., None]


def layer(p, x):
    b, s, d = x.shape
    x = sbp.split(x, 1, "model")
    q, k, v = ((x @ p[n]).reshape(b, s, 4, -1) for n in ("wq", "wk", "wv"))
    return x + linear_attention(q, k, v).reshape(b, s, d) @ p["wo"]


def model(params, x):
    for p in params:
        x = layer(p, x)
    return x


p = {n: f32(64, 64) for n in ("wq", "wk", "wv", "wo")}
args = [p, p], f32(4, 32, 64)
f = sbp.jit(model, mesh, in_types=("B", "data:S(0)"), boxing="explicit")
