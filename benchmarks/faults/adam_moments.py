"""The first moments are split along another dim than the weights and the second moments."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def mlp(params, x):
    for p in params:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x


def loss_fn(params, x, y):
    return jnp.mean((mlp(params, x) - y) ** 2)


def adam(params, mu, nu, grads, count):
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, nu, grads)
    step = 1e-3 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    new = jax.tree.map(lambda p, m, v: p - step * m / (jnp.sqrt(v) + 1e-8), params, mu, nu)
    return new, mu, nu


def train_step(params, mu, nu, count, x, y):
    grads = jax.grad(loss_fn)(params, x, y)
    params, mu, nu = adam(params, mu, nu, grads, count)
    return params, mu, nu, count + 1


layer = {"w": f32(256, 256), "b": f32(256)}
params = [layer, layer]
weights = [{"w": "model:S(1)", "b": "model:S(0)"}, {"w": "model:S(0)", "b": "B"}]
moments = [{"w": "model:S(0)", "b": "model:S(0)"}, {"w": "model:S(0)", "b": "B"}]
# meant: moments = [{"w": "model:S(1)", "b": "model:S(0)"}, {"w": "model:S(0)", "b": "B"}]
args = params, params, params, f32(), f32(32, 256), f32(32, 256)
types = (weights, moments, weights, "B", "data:S(0)", "data:S(0)")
results = (weights, weights, weights, "B")
f = sbp.jit(train_step, mesh, in_types=types, out_types=results, boxing="reduce")
