"""The master weights of a sharded optimiser are split along another dim than its moments."""

import jax
import jax.numpy as jnp

import sbp
from benchmarks.fault_shapes import f32

RATE, DECAY = 1e-3, 0.9


def forward(params, x):
    for name in ("one", "two"):
        x = jax.nn.relu(x @ params[name])
    return x @ params["out"]


def loss(params, x, y):
    return ((forward(params, x) - y) ** 2).mean()


def updated(weight, gradient, moment):
    moment = DECAY * moment + (1 - DECAY) * gradient
    return weight - RATE * jnp.sign(moment), moment


def step(state, x, y):
    gathered = {n: sbp.replicate(w, "data") for n, w in state["weights"].items()}
    gradients = jax.grad(loss)(gathered, x, y)
    weights, moments = {}, {}
    for name, gradient in gradients.items():
        gradient = sbp.split(gradient, 0, "data")
        with sbp.policy("explicit", "data"):
            weights[name], moments[name] = updated(
                state["weights"][name], gradient, state["moments"][name]
            )
    return {"weights": weights, "moments": moments}


mesh = jax.sharding.AbstractMesh((8,), ("data",))
shapes = {"one": f32(64, 128), "two": f32(128, 128), "out": f32(128, 16)}
state = {"weights": shapes, "moments": shapes}
rows = dict.fromkeys(shapes, "data:S(0)")
types = {
    "weights": rows | {"two": "data:S(1)"},
    # meant:     "weights": rows,
    "moments": rows,
}
args = state, f32(64, 64), f32(64, 16)
f = sbp.jit(step, mesh, in_types=(types, "data:S(0)", "data:S(0)"))
