"""A pin inside of the layers gathers what a budget wants to stay split."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def encoder_layer(p, x):
    h = jax.nn.relu(x @ p["w_in"])
    h = sbp.replicate(h, "model")
    # meant: h = sbp.split(h, 2, "model")
    return x + h @ p["w_out"]


def encoder(params, x):
    for p in params["layers"]:
        x = encoder_layer(p, x)
    return x


def regression(params, x, y):
    h = encoder(params, x)
    guess = h.mean(1) @ params["head"]
    return jnp.mean((guess - y) ** 2)


def train(params, x, y):
    loss, grads = jax.value_and_grad(regression)(params, x, y)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


D, H = 256, 1024
p = {"w_in": f32(D, H), "w_out": f32(H, D)}
params = {"layers": [p, p, p], "head": f32(D, 1)}
weights = {"layers": {"w_in": "model:S(1)", "w_out": "model:S(0)"}, "head": "B"}
weights = weights | {"layers": [weights["layers"]] * 3}
no_gathers = sbp.forbid("all_gather", axis="model", where="forward")
args = params, f32(32, 64, D), f32(32, 1)
types = weights, "data:S(0)", "data:S(0)"
f = sbp.jit(train, mesh, in_types=types, budgets=[no_gathers], donate_argnums=0)
