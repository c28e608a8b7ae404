"""The averaged weights come back in the types of the gradients."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def mlp(params, x):
    h = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return h @ params["w2"]


def update(params, ema, x, y):
    def loss(p):
        return jnp.mean((mlp(p, x) - y) ** 2)

    grads = jax.grad(loss)(params)
    norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    params = jax.tree.map(lambda p, g: p - 0.1 * scale * g, params, grads)
    ema = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, ema, params)
    return params, ema, norm


def shapes(width, hidden):
    return {"w1": f32(width, hidden), "b1": f32(hidden), "w2": f32(hidden, width)}


params = shapes(128, 512)
weights = {"w1": "model:S(1)", "b1": "model:S(0)", "w2": "model:S(0)"}
averaged = {"w1": "model:S(1)", "b1": "model:S(0)", "w2": "model:S(1)"}
# meant: averaged = {"w1": "model:S(1)", "b1": "model:S(0)", "w2": "model:S(0)"}
batch = "data:S(0)"
args = params, params, f32(32, 128), f32(32, 128)
types, results = (weights, averaged, batch, batch), (weights, weights, "B")
f = sbp.jit(update, mesh, in_types=types, out_types=results, boxing="reduce")
