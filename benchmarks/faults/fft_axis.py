"""The signal is split along the dim of its Fourier transform."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32, mesh


def filter_bank(signal, kernel):
    spectrum = jnp.fft.fft(signal, axis=1)
    shaped = spectrum * kernel[None, :, None]
    return jnp.fft.ifft(shaped, axis=1).real


def gated(p, x):
    return jax.nn.sigmoid(x @ p["gate"]) * jnp.tanh(x @ p["value"])


def layer(p, x):
    x = sbp.split(x, 1, "model")
    # meant: x = sbp.split(x, 2, "model")
    with sbp.policy("explicit", "model"):
        y = filter_bank(x, p["kernel"])
    return x + gated(p, sbp.replicate(y, "model"))


def network(params, x):
    for p in params["layers"]:
        x = layer(p, x)
    return x.mean(1) @ params["head"]


def loss(params, x, y):
    return jnp.mean((network(params, x) - y) ** 2)


D, LENGTH = 64, 128
p = {"kernel": f32(LENGTH), "gate": f32(D, D), "value": f32(D, D)}
params = {"layers": [p, p], "head": f32(D, 4)}
args = params, f32(8, LENGTH, D), f32(8, 4)
f = sbp.jit(loss, mesh, in_types=(None, "data:S(0)", "data:S(0)"))
