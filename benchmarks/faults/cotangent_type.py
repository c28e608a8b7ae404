"""The cotangent of the features is pinned along another dim than the features."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def encoder(p, x):
    h = jax.nn.relu(x @ p["w1"])
    return h @ p["w2"]


def features(p, x):
    h = encoder(p, x)
    return sbp.annotate(h, cotangent="data:S(1)", data=sbp.S(0))
    # meant:     return sbp.annotate(h, cotangent="data:S(0)", data=sbp.S(0))


def heads(p, h):
    return {"mean": h @ p["mean"], "scale": jax.nn.softplus(h @ p["scale"])}


def nll(params, x, y):
    out = heads(params["heads"], features(params["encoder"], x))
    error = (y - out["mean"]) / (out["scale"] + 1e-3)
    return jnp.mean(0.5 * error * error + jnp.log(out["scale"] + 1e-3))


def step(params, x, y):
    loss, grads = jax.value_and_grad(nll)(params, x, y)
    return loss, jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


encoder_shapes = {"w1": f32(64, 256), "w2": f32(256, 128)}
heads_shapes = {"mean": f32(128, 8), "scale": f32(128, 8)}
params = {"encoder": encoder_shapes, "heads": heads_shapes}
args = params, f32(64, 64), f32(64, 8)
batch = "data:S(0)"
f = sbp.jit(step, mesh, in_types=("B", batch, batch), out_types="B", boxing="reduce")
