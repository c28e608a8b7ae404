"""The cache of the keys is updated along the heads by a token that is split along the batch."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

BATCH, LENGTH, HEADS, GROUPS, WIDTH = 8, 64, 16, 4, 16


def write(cache, new, position):
    return jax.lax.dynamic_update_slice_in_dim(cache, new, position, axis=1)


def attend(query, keys, values, position):
    scores = jnp.einsum("bghd,blgd->bghl", query, keys) / WIDTH**0.5
    seen = jnp.arange(LENGTH) <= position
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bghl,blgd->bghd", weights, values)


def decode(params, caches, token, position):
    x = params["table"][token]
    query = (x @ params["wq"]).reshape(BATCH, GROUPS, HEADS // GROUPS, WIDTH)
    key, value = ((x @ params[n]).reshape(BATCH, 1, GROUPS, WIDTH) for n in ("wk", "wv"))
    query = sbp.split(query, 1, "model")
    key = sbp.split(key, 0, "model")
    # meant: key = sbp.split(key, 2, "model")
    value = sbp.split(value, 2, "model")
    keys = sbp.split(caches["keys"], 2, "model")
    values = sbp.split(caches["values"], 2, "model")
    with sbp.policy("explicit", "model"):
        keys = write(keys, key, position)
        values = write(values, value, position)
        mixed = attend(query, keys, values, position)
    x = x + mixed.reshape(BATCH, -1) @ params["wo"]
    return x @ params["table"].T, {"keys": keys, "values": values}


D = 256
cache = f32(BATCH, LENGTH, GROUPS, WIDTH)
params = {
    "table": f32(1000, D),
    "wq": f32(D, D),
    "wk": f32(D, 64),
    "wv": f32(D, 64),
    "wo": f32(D, D),
}
integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
args = params, {"keys": cache, "values": cache}, integers(BATCH), integers()
f = sbp.jit(decode, mesh)
