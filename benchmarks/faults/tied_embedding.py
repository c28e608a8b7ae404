"""The table is split along features when it is looked up, along the vocabulary at the end."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh

VOCAB, D = 1024, 128


def embed(table, tokens):
    table = sbp.split(table, 0, "model")
    x = table[tokens]
    return sbp.split(x, 2, "model")
    # meant:     return sbp.replicate(x, "model")


def unembed(table, x):
    table = sbp.split(table, 0, "model")
    with sbp.policy("explicit", "model"):
        return x @ table.T


def mix(p, x):
    with sbp.policy("reduce", "model"):
        h = jax.nn.relu(x @ sbp.split(p["w_in"], 1, "model"))
        return x + h @ sbp.split(p["w_out"], 0, "model")


def language_model(params, tokens):
    x = embed(params["table"], tokens)
    for p in params["layers"]:
        x = mix(p, x)
    return unembed(params["table"], x)


def loss(params, tokens):
    logits = language_model(params, tokens[:, :-1])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -picked.mean()


layer = {"w_in": f32(D, 512), "w_out": f32(512, D)}
args = {"table": f32(VOCAB, D), "layers": [layer, layer]}, i32(8, 33)
f = sbp.jit(loss, mesh, in_types=(None, "data:S(0)"))
