"""The experts' second matrices are split along their hidden dim, not along the experts."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32

GROUPS, SIZE, EXPERTS, CAPACITY, D, H = 8, 32, 8, 8, 64, 128


def gates(x, w_gate):
    probs = jax.nn.softmax(x @ w_gate, axis=-1)
    chosen = jnp.argmax(probs, -1)
    mask = jax.nn.one_hot(chosen, EXPERTS)
    place = (jnp.cumsum(mask, axis=1) - 1) * mask
    keep = mask * (place < CAPACITY)
    slots = jax.nn.one_hot(place.sum(-1).astype(int), CAPACITY)
    dispatch = keep[..., None] * slots[..., None, :]
    weight = (probs * mask).sum(-1)
    return dispatch, dispatch * weight[..., None, None]


def moe(params, x):
    x = sbp.split(x, 0, "expert")
    dispatch, combine = gates(x, params["gate"])
    sent = jnp.einsum("gsec,gsd->egcd", dispatch, x)
    sent = sbp.split(sent, 0, "expert")
    w_in = sbp.split(params["w_in"], 0, "expert")
    w_out = sbp.split(params["w_out"], 1, "expert")
    # meant: w_out = sbp.split(params["w_out"], 0, "expert")
    h = jax.nn.relu(jnp.einsum("egcd,edh->egch", sent, w_in))
    out = jnp.einsum("egch,ehd->egcd", h, w_out)
    out = sbp.split(out, 1, "expert")
    return jnp.einsum("gsec,egcd->gsd", combine, out)


def train_loss(params, x, target):
    return jnp.mean((moe(params, x) - target) ** 2)


mesh = jax.sharding.AbstractMesh((8,), ("expert",))
params = {"gate": f32(D, EXPERTS), "w_in": f32(EXPERTS, D, H), "w_out": f32(EXPERTS, H, D)}
args = params, f32(GROUPS, SIZE, D), f32(GROUPS, SIZE, D)
f = sbp.jit(train_loss, mesh, boxing="reduce")
