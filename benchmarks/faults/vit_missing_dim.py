"""The hidden activations are split along a dim that they do not have."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

PATCH, D, HIDDEN = 8, 96, 384


def patches(images, w):
    b, h, _, c = images.shape
    n = h // PATCH
    x = images.reshape(b, n, PATCH, n, PATCH, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, n * n, PATCH * PATCH * c) @ w


def attend(p, x):
    b, s, _ = x.shape
    qkv = (x @ p["qkv"]).reshape(b, s, 3, 6, 16)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4, -1)
    return jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(b, s, D) @ p["proj"]


def mlp(p, x):
    h = jax.nn.gelu(x @ p["w1"])
    h = sbp.split(h, 3, "model")
    # meant: h = sbp.split(h, 2, "model")
    return h @ p["w2"]


def vit(params, images):
    x = patches(sbp.split(images, 0, "data"), params["patch"]) + params["position"]
    for p in params["blocks"]:
        x = x + attend(p, x)
        x = x + mlp(p, x)
    return x.mean(1) @ params["head"]


block = {"qkv": f32(D, 3 * D), "proj": f32(D, D), "w1": f32(D, HIDDEN), "w2": f32(HIDDEN, D)}
params = {"patch": f32(192, D), "position": f32(16, D), "blocks": [block, block]}
args = params | {"head": f32(D, 10)}, f32(8, 32, 32, 3)
f = sbp.jit(vit, mesh)
