"""The weights of the stages of a pipeline are split along their input dim."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32

mesh = jax.sharding.AbstractMesh((4,), ("stage",))
STAGES, TICKS = 4, 10


def run_stages(weights, buffer):
    hidden = jax.vmap(jnp.matmul)(buffer, weights["up"])
    return buffer + jax.vmap(jnp.matmul)(jax.nn.gelu(hidden), weights["down"])


def forward(weights, microbatches):
    weights = {
        "up": sbp.split(weights["up"], 1, "stage"),
        # meant:         "up": sbp.split(weights["up"], 0, "stage"),
        "down": sbp.split(weights["down"], 0, "stage"),
    }
    size = microbatches.shape[1:]
    buffer = sbp.split(jnp.zeros((STAGES, *size)), 0, "stage")
    results = jnp.zeros_like(microbatches)

    def tick(carry, time):
        buffer, results = carry
        batch = microbatches[jnp.minimum(time, microbatches.shape[0] - 1)]
        buffer = jnp.roll(buffer, 1, axis=0).at[0].set(batch)
        buffer = sbp.split(buffer, 0, "stage")
        with sbp.policy("explicit", "stage"):
            buffer = run_stages(weights, buffer)
        place = jnp.maximum(time - STAGES + 1, 0)
        results = results.at[place].set(buffer[-1])
        return (buffer, results), None

    (_, results), _ = jax.lax.scan(tick, (buffer, results), jnp.arange(TICKS))
    return results


def loss(weights, microbatches, targets):
    return jnp.mean((forward(weights, microbatches) - targets) ** 2)


weights = {"up": f32(STAGES, 32, 128), "down": f32(STAGES, 128, 32)}
args = weights, f32(7, 8, 32), f32(7, 8, 32)
f = sbp.jit(jax.value_and_grad(loss), mesh)
