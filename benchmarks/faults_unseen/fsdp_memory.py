"""The weights of a deep stack are whole, which does not fit beside their moments."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32


def layer(x, p):
    h = jax.nn.relu(x @ p["up"])
    return x + h @ p["down"], None


def forward(params, x):
    return jax.lax.scan(layer, x, params)[0]


def adam_step(params, mu, nu, x, y):
    def loss(p):
        return jnp.mean((forward(p, x) - y) ** 2)

    grads = jax.grad(loss)(params)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, nu, grads)
    params = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-8), params, mu, nu)
    return params, mu, nu


L, D, H = 8, 256, 1024
params = {"up": f32(L, D, H), "down": f32(L, H, D)}
whole = {"up": "B", "down": "B"}
# meant: whole = {"up": "data:S(1)", "down": "data:S(1)"}
sharded = {"up": "data:S(1)", "down": "data:S(1)"}
mesh = jax.sharding.AbstractMesh((8,), ("data",))
batch = "data:S(0)"
args = params, params, params, f32(64, D), f32(64, D)
types = whole, sharded, sharded, batch, batch
limit = 24 * 2**20
f = sbp.jit(adam_step, mesh, in_types=types, memory_limit=limit, donate_argnums=(0, 1, 2))
