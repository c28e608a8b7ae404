"""The types of the metrics name one that the function does not return."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def tower(p, x):
    for w in p:
        x = jax.nn.relu(x @ w)
    return x


def rank(params, users, items):
    scores = tower(params["user"], users) @ tower(params["item"], items).T
    best, index = jax.lax.top_k(scores, 5)
    return scores, best, index


def evaluate(params, users, items, clicked):
    scores, best, index = rank(params, users, items)
    hits = (index == clicked[:, None]).any(1)
    log_z = jax.nn.logsumexp(scores, axis=1)
    picked = jnp.take_along_axis(scores, clicked[:, None], 1)[:, 0]
    return {
        "loss": (log_z - picked).mean(),
        "recall": hits.mean(),
        "margin": best[:, 0] - best[:, 1],
    }


params = {"user": [f32(32, 64)] * 2 and [f32(32, 64), f32(64, 64)], "item": [f32(16, 64)]}
results = {
    "loss": "B",
    "recal": "B",
    # meant:     "recall": "B",
    "margin": "data:S(0)",
}
args = params, f32(64, 32), f32(256, 16), i32(64)
types = "B", "data:S(0)", "B", "data:S(0)"
f = sbp.jit(evaluate, mesh, in_types=types, out_types=results)
