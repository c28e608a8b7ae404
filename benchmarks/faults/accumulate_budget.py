"""The sum of gradients is made whole in each turn of the loop."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh

MICRO = 4


def loss_fn(params, x, y):
    h = jax.nn.gelu(x @ params["w_in"])
    return jnp.mean((h @ params["w_out"] - y) ** 2)


def accumulate(params, xs, ys):
    def body(total, batch):
        x, y = batch
        x = sbp.split(x, 0, "data")
        grads = jax.grad(loss_fn)(params, x, sbp.split(y, 0, "data"))
        total = jax.tree.map(jnp.add, total, grads)
        total = jax.tree.map(lambda g: sbp.replicate(g, "data"), total)
        # meant: total = jax.tree.map(lambda g: sbp.partial(g, "data"), total)
        return total, None

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(body, zeros, (xs, ys))
    return jax.tree.map(lambda g: g / MICRO, total)


def sgd_step(params, xs, ys):
    grads = accumulate(params, xs, ys)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


params = {"w_in": f32(256, 1024), "w_out": f32(1024, 256)}
args = params, f32(MICRO, 32, 256), f32(MICRO, 32, 256)
no_loop = sbp.forbid(axis="data", where="loop", above=1024)
f = sbp.jit(sgd_step, mesh, budgets=[no_loop], in_types=("B", "data:S(1)", "data:S(1)"))
