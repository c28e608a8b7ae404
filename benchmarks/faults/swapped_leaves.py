"""The types of the loss and of the hidden states are swapped."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def gru_cell(p, h, x):
    both = jnp.concatenate([x, h], -1)
    z = jax.nn.sigmoid(both @ p["wz"])
    r = jax.nn.sigmoid(both @ p["wr"])
    new = jnp.tanh(jnp.concatenate([x, r * h], -1) @ p["wh"])
    return (1 - z) * h + z * new


def unroll(p, xs):
    start = jnp.zeros((xs.shape[1], 64))

    def step(h, x):
        h = gru_cell(p, h, x)
        return h, h

    return jax.lax.scan(step, start, xs)


def evaluate(params, xs, labels):
    last, hs = unroll(params["cell"], xs)
    logits = last @ params["head"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)
    hits = logits.argmax(-1) == labels
    return -chosen.mean(), hs, hits.mean()


cell = {n: f32(96, 64) for n in ("wz", "wr", "wh")}
params = {"cell": cell, "head": f32(64, 10)}
f = sbp.jit(
    evaluate,
    mesh,
    in_types=("B", "data:S(1)", "data:S(0)"),
    out_types=("data:S(1)", "B", "B"),
    # meant:     out_types=("B", "data:S(1)", "B"),
)
args = params, f32(12, 16, 32), i32(16)
