"""A region written by hand forgets the reduction of its second product."""

import jax

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def local_ffn(x, w_in, w_out):
    h = jax.nn.relu(x @ w_in)
    y = h @ w_out
    return y
    # meant:     return jax.lax.psum(y, "model")


ffn = sbp.manual(
    local_ffn,
    in_types=("data:S(0)", "model:S(1)", "model:S(0)"),
    out_types="data:S(0)",
)


def layer_norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    var = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(var + 1e-5) * scale


def model(params, x):
    for p in params["blocks"]:
        x = x + ffn(layer_norm(x, p["scale"]), p["w_in"], p["w_out"])
    return x @ params["head"]


def accuracy(params, x, labels):
    guess = model(params, x).argmax(-1)
    return (guess == labels).mean()


p = {"scale": f32(64), "w_in": f32(64, 256), "w_out": f32(256, 64)}
args = {"blocks": [p, p], "head": f32(64, 10)}, f32(16, 64), i32(16)
f = sbp.jit(accuracy, mesh, in_types=(None, "data:S(0)", "data:S(0)"))
