"""The two branches of an early exit leave their result along different dims."""

import jax

import sbp
from benchmarks.fault_shapes import f32, mesh


def block(p, x):
    h = jax.nn.relu(x @ p["w_in"])
    return x + h @ p["w_out"]


def deep(params, x):
    for p in params:
        x = block(p, x)
    return sbp.split(x, 2, "model")
    # meant:     return sbp.split(x, 1, "model")


def shallow(params, x):
    x = block(params[0], x)
    return sbp.split(x, 1, "model")


def confident(x):
    peak = jax.nn.softmax(x, axis=-1).max(-1)
    return (peak > 0.9).all()


def early_exit(params, x):
    with sbp.policy("explicit", "model"):
        sure = confident(x)
        y = jax.lax.cond(sure, shallow, deep, params["blocks"], x)
        y = y * params["scale"]
        spread = jax.lax.top_k(y, 2)[0]
        margin = spread[..., 0] - spread[..., 1]
    return y @ params["head"], margin


D = 64
p = {"w_in": f32(D, 256), "w_out": f32(256, D)}
params = {"blocks": [p, p, p], "head": f32(D, 32), "scale": f32(D)}
args = params, f32(8, 16, D)
f = sbp.jit(early_exit, mesh, in_types=("B", "data:S(0)"))
