"""The logits are split along the vocabulary where the loss may not communicate."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def cross_entropy(logits, labels):
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    log_z = jnp.log(jnp.exp(shifted).sum(-1))
    picked = jnp.take_along_axis(shifted, labels[..., None], -1)[..., 0]
    return (log_z - picked).mean()


def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).astype(jnp.float32).mean()


def body(params, x):
    for w in params["layers"]:
        x = x + jax.nn.relu(x @ w)
    return x


def evaluate(params, x, labels):
    with sbp.policy("reduce"):
        h = body(params, x)
        logits = h @ params["head"]
    with sbp.policy("explicit", "model"):
        logits = sbp.split(logits, 2, "model")
        # meant: logits = sbp.replicate(logits, "model")
        loss = cross_entropy(logits, labels)
        hits = accuracy(logits, labels)
    return {"loss": loss, "accuracy": hits}


params = {"layers": [f32(128, 128)] * 2, "head": f32(128, 1024)}
types = {"layers": "B", "head": "model:S(1)"}
args = params, f32(8, 32, 128), i32(8, 32)
f = sbp.jit(evaluate, mesh, in_types=(types, "data:S(0)", "data:S(0)"))
