"""Host memory on the TPU compiler: the compiled program copies to and from it as that of `jax.jit`
does, and holds there what the plan says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sbp

pytestmark = pytest.mark.tpu

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
HOST_BYTES = ("host_argument", "host_output", "host_temp", "host_alias")
DEVICE_BYTES = ("argument", "output", "temp", "alias")


def mesh_of():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return Mesh(np.array(devices).reshape(2, 4), ("x", "y"))


def arrays(mesh, shape, dtype, *specs):
    """Shapes split by specs; a spec behind "host" is one in host memory."""
    for spec in specs:
        kind = "pinned_host" if spec[:1] == ("host",) else None
        sharding = NamedSharding(mesh, P(*spec[kind is not None :]), memory_kind=kind)
        yield jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def figures(compiled, names):
    found = compiled.memory_analysis()
    return {name: getattr(found, f"{name}_size_in_bytes") for name in names}


def text_of(compiled):
    text = compiled.as_text()
    assert text is not None
    return text


def adam(w, m, v, g):
    m, v = jax.device_put(m, DEVICE), jax.device_put(v, DEVICE)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), jax.device_put(m, HOST), jax.device_put(v, HOST)


def test_an_optimiser_state_in_host_memory():
    mesh = mesh_of()
    on, host = ("x", "y"), ("host", "x", "y")
    args = tuple(arrays(mesh, (2048, 8192), jnp.float32, on, host, host, on))
    donated: Any = {"donate_argnums": (0, 1, 2)}
    plan = sbp.jit(adam, mesh, **donated).plan(*args)
    mine, jaxs = plan.lower().compile(), jax.jit(adam, **donated).lower(*args).compile()
    assert figures(mine, HOST_BYTES) == figures(jaxs, HOST_BYTES)
    assert figures(mine, DEVICE_BYTES) == figures(jaxs, DEVICE_BYTES)
    assert text_of(mine).count("S(5)") == text_of(jaxs).count("S(5)") > 0
    assert plan.cost.host_memory_bytes == figures(mine, HOST_BYTES)["host_argument"]


def loss(policy):
    def layer(x, w):
        return x + jnp.sin(checkpoint_name(x @ w, "hidden")), None

    return lambda ws, x: lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0].sum()


def test_offloaded_activations_leave_device_memory():
    mesh, layers = mesh_of(), 4
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["hidden"]}
    memories = {"offload_src": "device", "offload_dst": "pinned_host"}
    offloads = jax.checkpoint_policies.save_and_offload_only_these_names(**names, **memories)
    saves = jax.checkpoint_policies.save_only_these_names("hidden")
    (ws,) = arrays(mesh, (layers, 1024, 1024), jnp.float32, ())
    (x,) = arrays(mesh, (65536, 1024), jnp.float32, (("x", "y"),))
    weights, rows = ws.sharding, x.sharding

    def compiled(jit, policy):
        fn = jax.grad(loss(policy), argnums=1)
        options = {"in_shardings": (weights, rows), "out_shardings": rows}
        return jit(fn, **options).lower(ws, x).compile()

    def sbp_jit(fn, **options):
        return sbp.jit(fn, mesh, **options)

    mine, jaxs = compiled(sbp_jit, offloads), compiled(jax.jit, offloads)
    kept = layers * 65536 * 1024 * 4 // 8
    assert figures(mine, HOST_BYTES) == figures(jaxs, HOST_BYTES)
    assert figures(mine, HOST_BYTES)["host_temp"] == kept
    assert text_of(mine).count("S(5)") == text_of(jaxs).count("S(5)") > 0
    assert figures(mine, DEVICE_BYTES)["temp"] <= 1.01 * figures(jaxs, DEVICE_BYTES)["temp"]
    on_device = figures(compiled(sbp_jit, saves), DEVICE_BYTES)["temp"]
    assert figures(mine, DEVICE_BYTES)["temp"] <= on_device - kept // 2


def test_a_conversion_of_a_host_value_compiles():
    mesh = mesh_of()
    (h,) = arrays(mesh, (4096, 4096), jnp.float32, ("host", "x"))
    columns = NamedSharding(mesh, P(None, "x"), memory_kind="pinned_host")
    plan = sbp.jit(lambda h: h, mesh, out_shardings=columns).plan(h)
    kinds = [s.kind for planned in plan.program.boxes() for s in planned.box.steps]
    assert kinds == ["to_device", "all_to_all", "to_host"]
    found = figures(plan.lower().compile(), HOST_BYTES)
    assert found["host_argument"] == found["host_output"] == 4096 * 4096 * 4 // 2
