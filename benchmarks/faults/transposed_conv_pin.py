"""The kernel of the second convolution is split along its outputs, not its inputs."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def conv(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def block(p, x):
    first = sbp.split(p["first"], 3, "model")
    second = sbp.split(p["second"], 3, "model")
    # meant: second = sbp.split(p["second"], 2, "model")
    h = jax.nn.relu(conv(x, first))
    return pool(jax.nn.relu(x + sbp.replicate(conv(h, second), "model")))


def network(params, x):
    x = conv(x, params["stem"])
    for p in params["blocks"]:
        x = block(p, x)
    return x.reshape(x.shape[0], -1) @ params["head"]


def loss(params, x, labels):
    logits = jax.nn.log_softmax(network(params, x))
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


p = {"first": f32(3, 3, 32, 64), "second": f32(3, 3, 64, 32)}
params = {"stem": f32(3, 3, 3, 32), "blocks": [p, p], "head": f32(8 * 8 * 32, 10)}
args = params, f32(8, 32, 32, 3), i32(8)
f = sbp.jit(loss, mesh, in_types=(None, "data:S(0)", "data:S(0)"), boxing="reduce")
