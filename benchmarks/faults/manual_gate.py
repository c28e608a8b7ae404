"""A gate that a region computes by hand takes its weights whole, its claims say split."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

D, F = 64, 256


def gated(x, gate, up, down):
    hidden = jax.nn.silu(x @ gate) * (x @ up)
    return jax.lax.psum(hidden @ down, "model")


rows, columns = "model:S(0)", "model:S(1)"
feed_forward = sbp.manual(
    gated,
    in_types=("data:S(0)", columns, None, rows),
    # meant:     in_types=("data:S(0)", columns, columns, rows),
    out_types="data:S(0)",
)


def norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def block(p, x):
    h = norm(x, p["scale"])
    return x + feed_forward(h, p["gate"], p["up"], p["down"])


def model(params, tokens):
    x = params["table"][tokens]
    for p in params["blocks"]:
        x = block(p, x)
    return norm(x, params["scale"]) @ params["table"].T


p = {"scale": f32(D), "gate": f32(D, F), "up": f32(D, F), "down": f32(F, D)}
params = {"blocks": [p, p], "scale": f32(D), "table": f32(512, D)}
tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)
args = params, tokens
f = sbp.jit(model, mesh, in_types=(None, "data:S(0)"))
