"""The sums of a batch norm are kept partial into the square root."""

import jax

import sbp
from benchmarks.fault_shapes import f32, mesh


def moments(x):
    count = x.shape[0] * x.shape[1] * x.shape[2]
    total = x.sum((0, 1, 2)) / count
    square = (x * x).sum((0, 1, 2)) / count
    return total, square


def batch_norm(p, x, running):
    mean, square = moments(x)
    mean = sbp.replicate(mean, "data")
    square = sbp.partial(square, "data")
    # meant: square = sbp.replicate(square, "data")
    var = square - mean * mean
    y = (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]
    return y, {"mean": 0.9 * running["mean"] + 0.1 * mean}


def conv(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def network(params, running, x):
    made = []
    for p, r in zip(params, running, strict=True):
        y, r = batch_norm(p, conv(x, p["kernel"]), r)
        x = x + jax.nn.relu(y)
        made.append(r)
    return x.mean((1, 2)), made


p = {"kernel": f32(3, 3, 16, 16), "scale": f32(16), "bias": f32(16)}
args = [p, p], [{"mean": f32(16)}] * 2, f32(8, 16, 16, 16)
f = sbp.jit(network, mesh, in_types=("B", "B", "data:S(0)"), boxing="explicit")
