"""The lengths of two inputs that are added have two symbolic sizes."""

import jax
import jax.numpy as jnp
from jax.export import symbolic_shape

import sbp
from benchmarks.fault_shapes import f32, i32, mesh

b, s, t = symbolic_shape("b, s, t", constraints=["mod(b, 8) == 0"])


def positions(length, d):
    angle = jnp.arange(d // 2) / d
    place = jnp.ones((length,)).cumsum()[:, None] * angle
    return jnp.concatenate([jnp.sin(place), jnp.cos(place)], -1)


def block(p, x):
    h = jax.nn.gelu(x @ sbp.split(p["w_in"], 1, "model"))
    return x + h @ sbp.split(p["w_out"], 0, "model")


def encode(params, x, segments):
    x = x + params["segment"][segments]
    x = x + positions(x.shape[1], x.shape[2])
    for p in params["blocks"]:
        x = block(p, sbp.split(x, 0, "data"))
    return x


def score(params, x, segments):
    h = encode(params, x, segments)
    return (h[:, 0] @ params["head"]).astype(jnp.float32)


D = 64
p = {"w_in": f32(D, 256), "w_out": f32(256, D)}
params = {"blocks": [p, p], "head": f32(D, 2), "segment": f32(4, D)}
args = params, f32(b, s, D), i32(b, t)
# meant: args = params, f32(b, s, D), i32(b, s)
f = sbp.jit(score, mesh, in_types=(None, "data:S(0)", "data:S(0)"))
