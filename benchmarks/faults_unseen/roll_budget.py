"""The sequence is split where a convolution in time shifts it; a budget allows no permutes."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def causal_conv(x, w):
    past = [jnp.pad(x, ((0, 0), (k, 0), (0, 0)))[:, : x.shape[1]] for k in range(4)]
    return sum(p * w[k] for k, p in enumerate(past))


def mixer(p, x):
    x = sbp.split(x, 1, "model")
    # meant: x = sbp.split(x, 2, "model")
    h = causal_conv(x, p["conv"])
    return jax.nn.silu(h) * x


def block(p, x):
    y = mixer(p, x @ p["w_in"])
    return x + y @ p["w_out"]


def stack(params, x):
    for p in params:
        x = block(p, x)
    return x


def mean_pool(params, x):
    return stack(params, x).mean(1)


p = {"w_in": f32(64, 128), "conv": f32(4, 128), "w_out": f32(128, 64)}
args = [p, p], f32(8, 64, 64)
budgets = [sbp.forbid("permute", axis="model"), sbp.forbid("all_gather", axis="model")]
f = sbp.jit(mean_pool, mesh, in_types=("B", "data:S(0)"), budgets=budgets, out_types="data:S(0)")
