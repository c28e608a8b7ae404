"""The samples are split along the dim whose median is taken."""

import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def robust_scale(x):
    centre = jnp.median(x, axis=1, keepdims=True)
    spread = jnp.median(jnp.abs(x - centre), axis=1, keepdims=True)
    return (x - centre) / (spread + 1e-6)


def encode(p, x):
    h = jnp.tanh(x @ p["w1"])
    return h @ p["w2"]


def pipeline(p, x):
    x = sbp.annotate(x, data=sbp.S(1))
    # meant: x = sbp.annotate(x, data=sbp.S(0))
    with sbp.policy("explicit", "data"):
        scaled = robust_scale(x)
    return encode(p, scaled)


def distances(p, x, anchors):
    z = pipeline(p, x)
    delta = z[:, :, None, :] - anchors
    return (delta * delta).sum(-1)


def assign(p, x, anchors):
    return distances(p, x, anchors).argmin(-1)


p = {"w1": f32(32, 64), "w2": f32(64, 16)}
args = p, f32(8, 64, 32), f32(10, 16)
f = sbp.jit(assign, mesh, in_types=("B", "data:S(0)", "B"))
