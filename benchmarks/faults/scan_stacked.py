"""The weights of all layers are stacked; the split forgets the dim of the layers."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def layer(x, p):
    h = jax.nn.gelu(x @ p["w_in"])
    y = h @ p["w_out"]
    return x + y, None


def decoder(params, x):
    y, _ = jax.lax.scan(layer, x, params)
    return y


def mean_pool(x, mask):
    weight = mask / mask.sum(-1, keepdims=True)
    return (x * weight[..., None]).sum(1)


def regress(params, x, mask, y):
    h = decoder(params["layers"], x)
    guess = mean_pool(h, mask) @ params["head"]
    return jnp.mean((guess - y) ** 2)


def train(params, x, mask, y):
    loss, grads = jax.value_and_grad(regress)(params, x, mask, y)
    return loss, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)


L, D, H = 8, 128, 512
params = {"layers": {"w_in": f32(L, D, H), "w_out": f32(L, H, D)}, "head": f32(D, 4)}
weights = {
    "layers": {
        "w_in": "model:S(2)",
        "w_out": "model:S(2)",
        # meant:         "w_out": "model:S(1)",
    },
    "head": "B",
}
batch = "data:S(0)"
args = params, f32(8, 16, D), f32(8, 16), f32(8, 4)
f = sbp.jit(train, mesh, in_types=(weights, batch, batch, batch), boxing="reduce")
