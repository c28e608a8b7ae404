"""The second matrix of each MLP is split by columns, as the first one is."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def layer_norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale


def mlp(x, p):
    w_in = sbp.split(p["w_in"], 1, "model")
    w_out = sbp.split(p["w_out"], 1, "model")
    # meant: w_out = sbp.split(p["w_out"], 0, "model")
    h = jax.nn.gelu(x @ w_in + p["b_in"])
    return h @ w_out


def forward(params, tokens):
    x = params["embed"][tokens]
    x = sbp.annotate(x, data=sbp.S(0), model=sbp.B)
    for p in params["blocks"]:
        x = x + mlp(layer_norm(x, p["scale"]), p)
    return x @ params["embed"].T


def loss_fn(params, tokens, labels):
    logits = forward(params, tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


block = {"w_in": f32(64, 256), "b_in": f32(256), "w_out": f32(256, 64), "scale": f32(64)}
params = {"embed": f32(512, 64), "blocks": [block, block]}
args = params, i32(8, 32), i32(8, 32)
f = sbp.jit(loss_fn, mesh, boxing="reduce")
