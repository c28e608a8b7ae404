"""In a rematerialised block one matrix is split by columns where rows were meant."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, i32, mesh


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


@jax.checkpoint
def block(p, x):
    h = norm(x)
    up = sbp.split(p["up"], 1, "model")
    gate = sbp.split(p["gate"], 1, "model")
    down = sbp.split(p["down"], 1, "model")
    # meant: down = sbp.split(p["down"], 0, "model")
    h = jax.nn.silu(h @ gate) * (h @ up)
    return x + sbp.replicate(h @ down, "model")


def forward(params, x):
    for p in params["blocks"]:
        x = block(p, x)
    return norm(x) @ params["head"]


def loss_fn(params, x, labels):
    logits = jax.nn.log_softmax(forward(params, x))
    return -jnp.take_along_axis(logits, labels[..., None], -1).mean()


def sgd(params, x, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


p = {"up": f32(64, 256), "gate": f32(64, 256), "down": f32(256, 64)}
args = {"blocks": [p, p], "head": f32(64, 100)}, f32(8, 16, 64), i32(8, 16)
f = sbp.jit(sgd, mesh, in_types=(None, "data:S(0)", "data:S(0)"), boxing="reduce")
