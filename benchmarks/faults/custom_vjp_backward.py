"""The backward rule splits a gradient along the dim of another operand."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


@jax.custom_vjp
def swiglu(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def forward(x, w_gate, w_up):
    gate, up = x @ w_gate, x @ w_up
    return jax.nn.silu(gate) * up, (x, gate, up, w_gate, w_up)


def backward(kept, ct):
    x, gate, up, w_gate, w_up = kept
    sig = jax.nn.sigmoid(gate)
    d_up = ct * gate * sig
    d_gate = ct * up * sig * (1 + gate * (1 - sig))
    d_gate = sbp.split(d_gate, 0, "model")
    # meant: d_gate = sbp.split(d_gate, 1, "model")
    dx = d_gate @ w_gate.T + d_up @ w_up.T
    return dx, x.T @ d_gate, x.T @ d_up


swiglu.defvjp(forward, backward)


def loss(params, x):
    for p in params:
        x = x + swiglu(x, p["gate"], p["up"]) @ p["down"]
    return jnp.mean(x * x)


def step(params, x):
    grads = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


layer = {"gate": f32(64, 256), "up": f32(64, 256), "down": f32(256, 64)}
types = {"gate": "model:S(1)", "up": "model:S(1)", "down": "model:S(0)"}
args = [layer, layer], f32(32, 64)
f = sbp.jit(step, mesh, in_types=([types] * 2, "data:S(0)"), out_types=[types] * 2, boxing="reduce")
