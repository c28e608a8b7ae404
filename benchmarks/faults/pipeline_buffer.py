"""The buffer of a pipeline is split along the batch, its weights along the stages."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32

STAGES, MICRO, BATCH, D = 4, 6, 8, 64


def stage_step(w, b, x):
    h = jnp.einsum("sbd,sde->sbe", x, w)
    return jax.nn.tanh(h + b[:, None])


def pipeline(params, batches):
    w = sbp.split(params["w"], 0, "stage")
    b = sbp.split(params["b"], 0, "stage")
    idle = jnp.zeros((STAGES - 1, BATCH, D))
    feed = jnp.concatenate([batches, idle])

    def tick(buffer, batch):
        buffer = jnp.concatenate([batch[None], buffer[:-1]])
        buffer = sbp.split(buffer, 1, "stage")
        # meant: buffer = sbp.split(buffer, 0, "stage")
        with sbp.policy("explicit", "stage"):
            buffer = stage_step(w, b, buffer)
        return buffer, buffer[-1]

    start = jnp.zeros((STAGES, BATCH, D))
    _, out = jax.lax.scan(tick, start, feed)
    return out[STAGES - 1 :]


def loss(params, batches, labels):
    out = pipeline(params, batches)
    logits = out @ params["head"]
    return jnp.mean((logits - labels) ** 2)


mesh = jax.sharding.AbstractMesh((4,), ("stage",))
params = {"w": f32(STAGES, D, D), "b": f32(STAGES, D), "head": f32(D, 10)}
args = params, f32(MICRO, BATCH, D), f32(MICRO, BATCH, 10)
f = sbp.jit(loss, mesh)
