"""The sequence is split where its running sum may send nothing."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def discretise(p, u):
    dt = jax.nn.softplus(u @ p["dt"])
    a = -jnp.exp(p["a_log"])
    return jnp.exp(dt[..., None] * a), dt[..., None] * (u @ p["b"])[..., None, :]


def scan_states(decay, inputs):
    logs = jnp.cumsum(jnp.log(decay), axis=1)
    return jnp.exp(logs) * jnp.cumsum(inputs * jnp.exp(-logs), axis=1)


def ssm(p, u):
    decay, inputs = discretise(p, u)
    decay = sbp.split(decay, 1, "model")
    # meant: decay = sbp.split(decay, 2, "model")
    inputs = sbp.split(inputs, 2, "model")
    states = scan_states(decay, inputs)
    return (states * (u @ p["c"])[..., None, :]).sum(-1)


def block(p, x):
    u = jax.nn.silu(x @ p["w_in"])
    y = ssm(p, u) * jax.nn.silu(x @ p["w_gate"])
    return x + y @ p["w_out"]


D, INNER, N = 64, 128, 8
p = {"w_in": f32(D, INNER), "w_gate": f32(D, INNER), "w_out": f32(INNER, D)}
p |= {"dt": f32(INNER, INNER), "a_log": f32(INNER, N), "b": f32(INNER, N), "c": f32(INNER, N)}
args = p, f32(4, 32, D)
f = sbp.jit(block, mesh, in_types=("B", "data:S(0)"), boxing="reduce")
