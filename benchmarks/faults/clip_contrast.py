"""The texts were to be whole on each device before they meet the images."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def tower(p, x):
    for w in p["layers"]:
        x = x + jax.nn.gelu(x @ w)
    return x @ p["head"]


def normalise(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def contrastive(params, images, texts):
    image = normalise(tower(params["image"], images))
    text = normalise(tower(params["text"], texts))
    image = sbp.split(image, 0, "data")
    text = sbp.split(text, 0, "data")
    # meant: text = sbp.replicate(text, "data")
    logits = image @ text.T * jnp.exp(params["temperature"])
    labels = jnp.arange(logits.shape[0])
    rows = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), labels[:, None], 1)
    return -rows.mean()


def tower_shapes(width):
    return {"layers": [f32(width, width)] * 2, "head": f32(width, 64)}


params = {"image": tower_shapes(128), "text": tower_shapes(96), "temperature": f32()}
args = params, f32(64, 128), f32(64, 96)
f = sbp.jit(contrastive, mesh, in_types=(None, "data:S(0)", "data:S(0)"), boxing="reduce")
