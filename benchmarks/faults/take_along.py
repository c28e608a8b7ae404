"""Scores are split along the dim from which the best ones are taken."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def beam_scores(p, h, beams):
    logits = h @ p["head"]
    logits = sbp.split(logits, 0, "data")
    return jax.nn.log_softmax(logits, -1) + beams[..., None]


def best(scores, k):
    b, n, v = scores.shape
    flat = scores.reshape(b, n * v)
    flat = sbp.split(flat, 1, "data")
    # meant: flat = sbp.split(flat, 0, "data")
    with sbp.policy("explicit", "data"):
        order = jnp.argsort(-flat, axis=1)[:, :k]
        value = jnp.take_along_axis(flat, order, axis=1)
    return value, order // v, order % v


def advance(p, state, x):
    h, beams = state
    h = jnp.tanh(h @ p["wh"] + x @ p["wx"])
    value, beam, token = best(beam_scores(p, h, beams), beams.shape[1])
    h = jnp.take_along_axis(h, beam[..., None], axis=1)
    return (h, value), token


def search(p, h, xs):
    beams = jnp.zeros(h.shape[:2])
    state, tokens = jax.lax.scan(lambda s, x: advance(p, s, x), (h, beams), xs)
    return state[1], tokens


p = {"head": f32(64, 128), "wh": f32(64, 64), "wx": f32(32, 64)}
args = p, f32(8, 4, 64), f32(6, 8, 4, 32)
f = sbp.jit(search, mesh, in_types=("B", "data:S(0)", "data:S(1)"))
