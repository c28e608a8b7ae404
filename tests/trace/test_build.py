"""The graph of a function: which equations become nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.trace.build import trace

SHAPE = jax.ShapeDtypeStruct((8,), jnp.float32)


def by_platform(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tan)


@pytest.mark.parametrize(
    ("platform", "ops"),
    [("cpu", ["sin"]), ("tpu", ["cos"]), ("cuda", ["tan"]), (None, ["platform_index", "cond"])],
)
def test_only_the_branch_of_the_platform_is_traced(platform: str | None, ops: list[str]):
    graph, _ = trace(by_platform, [SHAPE], platform=platform)
    assert [n.op for n in graph.nodes if n.op not in ("clamp", "convert_element_type")] == ops


def test_the_platform_is_that_of_the_mesh():
    """`hardware=` says what is modelled; a mesh of devices runs on its own platform. The gradient
    and the mapped function have the branch too."""
    mesh = jax.make_mesh((8,), ("x",))
    x = jnp.arange(8.0)
    for fn, want in (
        (by_platform, jnp.sin(x)),
        (jax.grad(lambda x: by_platform(x).sum()), jnp.cos(x)),
        (jax.vmap(by_platform), jnp.sin(x)),
    ):
        np.testing.assert_allclose(sbp.jit(fn, mesh, hardware="tpu-v5e")(x), want, rtol=1e-6)
    abstract = jax.sharding.AbstractMesh((8,), ("x",))
    nodes = sbp.jit(by_platform, abstract, hardware="tpu-v5e").plan(SHAPE).program.graph.nodes
    assert [n.op for n in nodes] == ["cos"]
