"""A dim of a layout is misspelt in one annotation."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

layout = sbp.Layout(batch="data", heads="model", d_ff="model")


def attention(p, x):
    b, s, _ = x.shape
    q, k, v = ((x @ p[n]).reshape(b, s, 8, 16) for n in ("wq", "wk", "wv"))
    q = layout(q, "batch", "seq", "heads", "d_head")
    k = layout(k, "batch", "seq", "heads", "d_head")
    v = layout(v, "batch", "seq", "haeds", "d_head")
    # meant: v = layout(v, "batch", "seq", "heads", "d_head")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return out.reshape(b, s, 128) @ p["wo"]


def ffn(p, x):
    h = layout(jax.nn.gelu(x @ p["w_in"]), "batch", "seq", "d_ff")
    return layout(h @ p["w_out"], "batch", "seq", "d_model")


def transformer(params, x):
    for p in params:
        x = x + attention(p, x)
        x = x + ffn(p, x)
    return x


p = {n: f32(128, 128) for n in ("wq", "wk", "wv", "wo")}
p |= {"w_in": f32(128, 512), "w_out": f32(512, 128)}
args = [p, p], f32(4, 16, 128)
f = sbp.jit(transformer, mesh, in_types=(None, layout.type("batch", "seq", "d_model")))
