"""A mesh axis is misspelt."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def conv(x, w, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)


def batch_norm(x, scale, bias):
    mean = x.mean((0, 1, 2))
    var = x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def residual(p, x):
    x = sbp.split(x, 0, "dat")
    # meant: x = sbp.split(x, 0, "data")
    h = jax.nn.relu(batch_norm(conv(x, p["conv1"]), p["scale1"], p["bias1"]))
    h = batch_norm(conv(h, p["conv2"]), p["scale2"], p["bias2"])
    return jax.nn.relu(x + h)


def classify(params, images, labels):
    x = conv(images, params["stem"], 2)
    for p in params["blocks"]:
        x = residual(p, x)
    logits = x.mean((1, 2)) @ params["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


block = {n: f32(3, 3, 32, 32) for n in ("conv1", "conv2")}
block |= {n: f32(32) for n in ("scale1", "scale2", "bias1", "bias2")}
params = {"stem": f32(3, 3, 3, 32), "blocks": [block, block], "head": f32(32, 10)}
args = params, f32(16, 32, 32, 3), i32(16)
f = sbp.jit(jax.grad(classify), mesh)
