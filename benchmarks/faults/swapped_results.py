"""The types of the results stand in the order of another version of the function."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def forward(params, x):
    for p in params["layers"]:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x @ params["head"]


def loss_fn(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


def momentum(velocity, grads):
    return jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)


def train_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    velocity = momentum(velocity, grads)
    params = jax.tree.map(lambda p, v: p - 0.01 * v, params, velocity)
    metrics = {"loss": loss, "norm": jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))}
    return params, velocity, metrics


layer = {"w": f32(128, 128), "b": f32(128)}
params = {"layers": [layer, layer], "head": f32(128, 16)}
weights = {"layers": {"w": "model:S(1)", "b": "model:S(0)"}, "head": "model:S(0)"}
weights = weights | {"layers": [weights["layers"]] * 2}
batch = "data:S(0)"
f = sbp.jit(
    train_step,
    mesh,
    in_types=(weights, weights, batch, batch),
    out_types=({"loss": "B", "norm": "B"}, weights, weights),
    # meant:     out_types=(weights, weights, {"loss": "B", "norm": "B"}),
)
args = params, params, f32(32, 128), f32(32, 16)
