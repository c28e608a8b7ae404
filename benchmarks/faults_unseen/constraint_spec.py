"""A sharding in JAX's own words has its axes in the wrong places."""

import jax
from jax.sharding import NamedSharding, PartitionSpec as Spec

import sbp
from benchmarks.fault_shapes import f32

mesh = jax.sharding.AbstractMesh(
    (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)


def hold(x, *dims):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, Spec(*dims)))


def gated_mlp(p, x):
    gate = hold(jax.nn.silu(x @ p["gate"]), "data", None, "model")
    up = hold(x @ p["up"], "data", "model", None)
    # meant:     up = hold(x @ p["up"], "data", None, "model")
    with sbp.policy("explicit"):
        both = gate * up
    return hold(both @ p["down"], "data", None, None)


def model(params, x):
    for p in params:
        x = x + gated_mlp(p, x)
    return x


p = {"gate": f32(64, 256), "up": f32(64, 256), "down": f32(256, 64)}
args = [p, p], f32(8, 16, 64)
f = sbp.jit(model, mesh, in_types=(None, "data:S(0)"))
