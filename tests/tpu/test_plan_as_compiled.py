"""What the plan says is what the TPU compiler makes: kinds, mesh axes and counts of collectives are
those of the plan, or fewer where the compiler merges some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

import sbp
from benchmarks.plan_collectives import compared, table
from tests.run.test_shifts import ONLY_RINGS

pytestmark = pytest.mark.tpu


def mesh_of(topology, **axes):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))


def of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def assert_as_planned(plan):
    found = compared(plan, plan.lower().compile().as_text())
    assert not any(c.is_more for c in found), "\n".join(table(found))
    return {(c.kind, c.mesh_axes): c for c in found}


SCATTERED = (
    ((4096, 1024), 1),
    ((4096, 512), 1),
    ((4096, 256), 1),
    ((16, 8192), 0),
    ((12, 4096), 0),
    ((262144,), 0),
    ((3, 16, 128, 512), 1),
    ((3, 16, 128, 512), 3),
    ((1024, 3, 16, 64), 2),
    ((50, 12), 1),
)
"""Shapes with dims along which they are scattered. The compiler makes an all-reduce of most, unless
they are arranged for it."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_reduce_scatters_stay_what_they_are(dtype):
    mesh = mesh_of("v5e:4x4", x=4, d=4)

    def sums(v, *parts):
        return tuple(jnp.einsum("k,k...->...", v, p) for p in parts)

    shapes = [shape for shape, _ in SCATTERED]
    avals = [of(64, dtype=dtype), *(of(64, *s, dtype=dtype) for s in shapes)]
    f = sbp.jit(
        sums,
        mesh,
        in_types=tuple("d:S(0)" for _ in avals),
        out_types=tuple(f"d:S({dim})" for _, dim in SCATTERED),
    )
    found = assert_as_planned(f.plan(*avals))
    assert found["reduce-scatter", ("d",)].planned.count >= 8
    assert found["all-to-all", ("d",)].planned.count  # 150 elements fill no row of lanes


def test_over_a_whole_slice_there_are_two_stages():
    plan = sbp.jit(
        lambda x, y: x.T @ y,
        mesh_of("v5e:4x4", d=16),
        in_types=("d:S(0)", "d:S(0)"),
        out_types="d:S(1)",
    ).plan(of(4096, 1024), of(4096, 1024))
    found = assert_as_planned(plan)
    both = found["reduce-scatter", ("d",)]
    assert both.planned.count == both.compiled.count == 2
    assert both.planned.sent == both.compiled.sent == plan.cost.bytes_per_device


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["ring", "panels"])
def test_products_that_go_round(shape):
    names = ("x", "y")[: len(shape)]
    types = "x:S(0) y:S(1)" if len(shape) == 2 else "x:S(0)"
    plan = sbp.jit(
        lambda a, b: a @ b,
        mesh_of("v5e:2x4", **dict(zip(names, shape, strict=True))),
        in_types=(types, types),
        out_types=types,
        budgets=ONLY_RINGS,
    ).plan(of(2048, 2048), of(2048, 2048))
    found = assert_as_planned(plan)
    panels = max(shape) if len(shape) == 2 else 1
    assert {axes[0]: c.planned.count for (_, axes), c in found.items()} == {
        name: panels * (n - 1) for name, n in zip(names, shape, strict=True)
    }


def test_shifts_scans_and_sorts():
    def fn(x, w):
        near = jnp.roll(x, 1, 0) + jnp.cumsum(x, 0)
        total, _ = jax.lax.scan(lambda c, v: (c + jnp.tanh(v @ w), None), near, near[:3] @ w)
        return total, jnp.sort(x, 0)

    plan = sbp.jit(
        fn,
        mesh_of("v5e:2x4", d=8),
        in_types=("d:S(0)", "d:S(0)"),
        out_types=("d:S(0)", "d:S(0)"),
    ).plan(of(256, 256, dtype="float32"), of(256, 256, dtype="float32"))
    assert_as_planned(plan)
