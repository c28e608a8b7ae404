"""The features are split where a norm takes its mean along them."""

import jax

import sbp
from benchmarks.fault_shapes import f32, mesh


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    var = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(var + 1e-5) * scale + bias


def feed_forward(p, x):
    h = layer_norm(x, p["scale"], p["bias"])
    h = jax.nn.gelu(h @ sbp.split(p["w_in"], 1, "model"))
    h = h @ sbp.split(p["w_out"], 0, "model")
    return sbp.replicate(h, "model")


def encode(params, x):
    x = sbp.annotate(x, data=sbp.S(0), model=sbp.S(2))
    # meant: x = sbp.annotate(x, data=sbp.S(0), model=sbp.B)
    for p in params["blocks"]:
        x = x + feed_forward(p, x)
    return layer_norm(x, params["scale"], params["bias"])


def pooled(params, x, weights):
    y = encode(params, x)
    return (y * weights[..., None]).sum(1)


D = 128
block = {"w_in": f32(D, 512), "w_out": f32(512, D), "scale": f32(D), "bias": f32(D)}
params = {"blocks": [block, block], "scale": f32(D), "bias": f32(D)}
args = params, f32(4, 16, D), f32(4, 16)
f = sbp.jit(pooled, mesh, boxing="explicit", in_types=(None, "data:S(0)", "data:S(0)"))
