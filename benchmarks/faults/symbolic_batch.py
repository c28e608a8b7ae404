"""The constraints on the symbolic sizes leave out that the batch divides."""

import jax
from jax.export import symbolic_shape

import sbp
from benchmarks.fault_shapes import f32, mesh

b, s = symbolic_shape("b, s", constraints=["mod(b, 2) == 0", "mod(s, 2) == 0", "s >= 4"])
# meant: b, s = symbolic_shape("b, s", constraints=["mod(b, 2) == 0", "mod(s, 4) == 0", "s >= 4"])


def windows(x):
    n, length, d = x.shape
    return x.reshape(n, length // 2, 2, d).mean(2)


def block(p, x):
    h = jax.nn.gelu(x @ p["w_in"])
    return x + h @ p["w_out"]


def encode(params, x):
    x = sbp.annotate(x, data=sbp.S(0), model=sbp.S(1))
    for p in params["blocks"]:
        x = block(p, x)
    return x


def pooled(params, x):
    x = encode(params, x)
    return x @ params["head"], windows(sbp.replicate(x, "model")).sum(1)


D = 64
p = {"w_in": f32(D, 256), "w_out": f32(256, D)}
params = {"blocks": [p, p], "head": f32(D, 16)}
args = params, f32(b, s, D)
results = "data:S(0) model:S(1)", "data:S(0)"
f = sbp.jit(pooled, mesh, in_types=("B", "data:S(0) model:S(1)"), out_types=results)
