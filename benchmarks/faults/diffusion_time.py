"""The embedding of the time is split along the batch, the image along channels."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def time_embedding(t, dim):
    frequency = jnp.exp(-jnp.arange(dim // 2) * (9.2 / (dim // 2)))
    angle = t[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


def conv(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def block(p, x, emb):
    h = conv(x, sbp.split(p["conv1"], 3, "model"))
    h = sbp.split(h, 3, "model")
    shift = jax.nn.silu(emb) @ p["time"]
    shift = sbp.split(shift, 0, "model")
    # meant: shift = sbp.split(shift, 1, "model")
    h = jax.nn.silu(h + shift[:, None, None, :])
    return x + conv(h, sbp.split(p["conv2"], 2, "model"))


def denoise(params, noisy, t):
    emb = time_embedding(t, 64) @ params["embed"]
    x = conv(noisy, params["stem"])
    for p in params["blocks"]:
        x = block(p, x, emb)
    return conv(x, params["out"])


def loss(params, image, noise, t):
    alpha = jnp.cos(t)[:, None, None, None]
    guess = denoise(params, alpha * image + (1 - alpha) * noise, t)
    return jnp.mean((guess - noise) ** 2)


p = {"conv1": f32(3, 3, 32, 64), "conv2": f32(3, 3, 64, 32), "time": f32(64, 64)}
params = {"stem": f32(3, 3, 3, 32), "out": f32(3, 3, 32, 3), "embed": f32(64, 64), "blocks": [p, p]}
args = params, f32(8, 16, 16, 3), f32(8, 16, 16, 3), f32(8)
f = sbp.jit(loss, mesh, in_types=("B", "data:S(0)", "data:S(0)", "data:S(0)"), boxing="reduce")
