"""A type text in in_types names an axis of another mesh."""

import jax

import sbp
from benchmarks.fault_shapes import f32, mesh


def resnet_block(p, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    h = jax.lax.conv_general_dilated(x, p["a"], (1, 1), "SAME", dimension_numbers=numbers)
    h = jax.nn.relu(h)
    h = jax.lax.conv_general_dilated(h, p["b"], (1, 1), "SAME", dimension_numbers=numbers)
    return jax.nn.relu(x + h)


def features(params, x):
    for p in params["blocks"]:
        x = resnet_block(p, x)
    return x.mean((1, 2))


def logits(params, x):
    return features(params, x) @ params["head"]


def predict(params, x):
    return jax.nn.softmax(logits(params, x))


def top(params, x):
    scores, classes = jax.lax.top_k(predict(params, x), 3)
    return scores, classes


p = {"a": f32(3, 3, 16, 16), "b": f32(3, 3, 16, 16)}
args = {"blocks": [p, p], "head": f32(16, 10)}, f32(8, 16, 16, 16)
f = sbp.jit(top, mesh, in_types=("B", "batch:S(0)"))
# meant: f = sbp.jit(top, mesh, in_types=("B", "data:S(0)"))
