"""On the TPU compiler: a step that takes and returns `sbp.Padded` moves no more than its plan, and
takes its state in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

import sbp
from tests.run.test_collectives import assert_within_plan

pytestmark = pytest.mark.tpu

ROWS = sbp.padded("data:S(0)")


def adam(state, x):
    loss = lambda w: (jnp.tanh(x @ w) ** 2).mean()
    g = jax.grad(loss)(state["w"])
    m, v = 0.9 * state["m"] + 0.1 * g, 0.99 * state["v"] + 0.01 * g * g
    return {"w": state["w"] - 0.1 * m / (jnp.sqrt(v) + 1e-8), "m": m, "v": v}


def test_adam_step():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v3:2x2").devices
    mesh = Mesh(np.array(devices), ("data",))
    w = jax.ShapeDtypeStruct((1301, 700), jnp.float32)
    x = jax.ShapeDtypeStruct((64, 1301), jnp.float32)
    f = sbp.jit(adam, mesh, (ROWS, "data:S(0)"), ROWS, donate_argnums=0)
    plan = f.plan({"w": w, "m": w, "v": w}, x)
    assert_within_plan(plan, (8,))
    compiled = plan.lower().compile()
    part = -(-1301 // 8) * 700 * 4
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * part
    even = sbp.jit(adam, mesh, (None, "data:S(0)"), donate_argnums=0)
    whole = even.plan({"w": w, "m": w, "v": w}, x).lower().compile().memory_analysis()
    assert memory.argument_size_in_bytes < 0.2 * whole.argument_size_in_bytes
