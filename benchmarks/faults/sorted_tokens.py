"""The tokens are split along the dim in which they are sorted by expert."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def route(x, w):
    probs = jax.nn.softmax(x @ w, -1)
    expert = probs.argmax(-1)
    return expert, probs.max(-1)


def sort_by_expert(x, expert):
    order = jnp.argsort(expert, axis=1)
    return jnp.take_along_axis(x, order[..., None], axis=1), order


def unsort(x, order):
    back = jnp.argsort(order, axis=1)
    return jnp.take_along_axis(x, back[..., None], axis=1)


def layer(p, x):
    x = sbp.annotate(x, data=sbp.S(1))
    # meant: x = sbp.annotate(x, data=sbp.S(0))
    expert, weight = route(x, p["gate"])
    with sbp.policy("explicit", "data"):
        ordered, order = sort_by_expert(x, expert)
        h = jax.nn.gelu(ordered @ p["w_in"]) @ p["w_out"]
        h = unsort(h, order)
    return x + h * weight[..., None]


def model(params, x):
    for p in params:
        x = layer(p, x)
    return x


p = {"gate": f32(64, 8), "w_in": f32(64, 128), "w_out": f32(128, 64)}
args = [p, p], f32(8, 32, 64)
f = sbp.jit(model, mesh, in_types=(None, "data:S(0)"))
