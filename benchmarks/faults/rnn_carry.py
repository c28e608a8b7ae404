"""The state of the cell is split along the batch of another axis inside of the loop."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

B_, T, D, H = 16, 12, 64, 128


def lstm_cell(p, carry, x):
    c, h = carry
    gates = x @ p["wx"] + h @ p["wh"] + p["b"]
    i, f, g, o = (gates[:, n * H : (n + 1) * H] for n in range(4))
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    c = sbp.split(c, 1, "model")
    # meant: c = sbp.split(c, 0, "model")
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def run(p, xs):
    xs = sbp.split(xs, 1, "model")
    state = jnp.zeros((B_, H)), jnp.zeros((B_, H))
    _, hs = jax.lax.scan(lambda carry, x: lstm_cell(p, carry, x), state, xs)
    return hs


def score(p, xs, labels):
    hs = run(p["cell"], xs)
    hs = sbp.split(hs, 1, "model")
    logits = hs[-1] @ p["head"]
    return jnp.mean((logits - labels) ** 2)


cell = {"wx": f32(D, 4 * H), "wh": f32(H, 4 * H), "b": f32(4 * H)}
args = {"cell": cell, "head": f32(H, 10)}, f32(T, B_, D), f32(B_, 10)
f = sbp.jit(score, mesh, in_types=("B", "model:S(1)", "model:S(0)"), boxing="explicit")
