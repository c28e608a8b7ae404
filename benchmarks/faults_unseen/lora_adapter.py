"""The low-rank factor is split along its rank, which nothing else is."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def lora(x, w, a, b):
    low = x @ a
    return x @ w + low @ b


def layer(p, x):
    h = jax.nn.silu(lora(x, p["up"], p["up_a"], p["up_b"]))
    return x + lora(h, p["down"], p["down_a"], p["down_b"])


def model(params, adapters, x):
    for p, adapter in zip(params, adapters, strict=True):
        x = layer(p | adapter, x)
    return x


def tune(params, adapters, x, y):
    def loss(adapters):
        return jnp.mean((model(params, adapters, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(adapters)
    return value, jax.tree.map(lambda a, g: a - 0.1 * g, adapters, grads)


D, H, R = 128, 512, 8
p = {"up": f32(D, H), "down": f32(H, D)}
adapter = {"up_a": f32(D, R), "up_b": f32(R, H), "down_a": f32(H, R), "down_b": f32(R, D)}
weights = {"up": "model:S(1)", "down": "model:S(0)"}
low = {"up_a": "B", "up_b": "model:S(0)", "down_a": "model:S(0)", "down_b": "B"}
# meant: low = {"up_a": "B", "up_b": "model:S(1)", "down_a": "model:S(0)", "down_b": "B"}
batch = "data:S(0)"
args = [p, p], [adapter, adapter], f32(16, D), f32(16, D)
f = sbp.jit(tune, mesh, in_types=([weights] * 2, [low] * 2, batch, batch), boxing="reduce")
