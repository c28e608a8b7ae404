"""A large table is held whole on every device, which the memory limit does not allow."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh

VOCAB, D = 65536, 512


def lookup(table, tokens):
    table = sbp.replicate(table, "data", "model")
    # meant: table = sbp.split(table, 0, "model")
    return table[tokens]


def block(p, x):
    h = jax.nn.gelu(x @ sbp.split(p["w_in"], 1, "model"))
    return x + h @ sbp.split(p["w_out"], 0, "model")


def model(params, tokens):
    x = lookup(params["table"], tokens)
    for p in params["blocks"]:
        x = block(p, x)
    return x


def loss(params, tokens, targets):
    x = sbp.split(model(params, tokens), 0, "data")
    return jnp.mean((x - targets) ** 2)


def sgd(params, tokens, targets):
    grads = jax.grad(loss)(params, tokens, targets)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


p = {"w_in": f32(D, 2048), "w_out": f32(2048, D)}
params = {"table": f32(VOCAB, D), "blocks": [p, p]}
args = params, i32(8, 64), f32(8, 64, D)
f = sbp.jit(sgd, mesh, memory_limit=120 * 2**20, donate_argnums=0)
