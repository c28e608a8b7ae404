"""A layout splits two dims of one tensor along the same mesh axis."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

layout = sbp.Layout(group="data", expert="model", hidden="data")
# meant: layout = sbp.Layout(group="data", expert="model")


def router(x, w):
    probs = jax.nn.softmax(x @ w, -1)
    weight, chosen = jax.lax.top_k(probs, 2)
    weight = weight / weight.sum(-1, keepdims=True)
    return (jax.nn.one_hot(chosen, probs.shape[-1]) * weight[..., None]).sum(-2)


def experts(p, x, combine):
    sent = jnp.einsum("gse,gsd->egsd", (combine > 0).astype(x.dtype), x)
    sent = layout(sent, "expert", "group", "seq", "d_model")
    h = jax.nn.relu(jnp.einsum("egsd,edh->egsh", sent, p["w_in"]))
    h = layout(h, "expert", "group", "seq", "hidden")
    out = jnp.einsum("egsh,ehd->egsd", h, p["w_out"])
    return jnp.einsum("gse,egsd->gsd", combine, out)


def layer(p, x):
    x = layout(x, "group", "seq", "d_model")
    return x + experts(p, x, router(x, p["gate"]))


def model(params, x, y):
    for p in params:
        x = layer(p, x)
    return jnp.mean((x - y) ** 2)


p = {"gate": f32(64, 8), "w_in": f32(8, 64, 128), "w_out": f32(8, 128, 64)}
args = [p, p], f32(4, 16, 64), f32(4, 16, 64)
f = sbp.jit(model, mesh)
