"""A power iteration keeps its vector in another split than the matrix gives."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def normal(v):
    return v / jnp.sqrt((v * v).sum())


def power_iteration(matrix, start, tolerance):
    matrix = sbp.split(matrix, 1, "model")
    # meant: matrix = sbp.split(matrix, 0, "model")

    def going(state):
        _, change, turns = state
        return (change > tolerance) & (turns < 100)

    def step(state):
        v, _, turns = state
        v = sbp.replicate(v, "model")
        with sbp.policy("explicit", "model"):
            new = matrix @ v
            new = jnp.where(jnp.isfinite(new), new, 0.0)
        new = normal(sbp.replicate(new, "model"))
        return new, jnp.abs(new - v).max(), turns + 1

    state = start, jnp.array(1.0), jnp.array(0)
    vector, _, turns = jax.lax.while_loop(going, step, state)
    return vector, turns


def spectrum(matrix, start):
    v, turns = power_iteration(matrix, normal(start), 1e-4)
    with sbp.policy("explicit", "model"):
        value = jnp.tanh(sbp.replicate(matrix @ v, "model")) @ v
    return value, v, turns


args = f32(512, 512), f32(512)
f = sbp.jit(spectrum, mesh, out_types=("B", "B", "B"))
