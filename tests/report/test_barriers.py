"""Reports of rematerialised programs, whose values pass barriers of several operands."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp


def loss(weights, x):
    for w in weights:
        x = jax.checkpoint(lambda x, w: jax.nn.relu(x @ w[0]) @ w[1])(x, w)
    return (x**2).sum()


@pytest.mark.parametrize("hardware", ["cpu", "tpu-v5e", "tpu-v5p", "h100"])
@pytest.mark.parametrize("rows", [64, 8192])
def test_a_partial_value_before_a_barrier(rows, hardware):
    shapes = [[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 2048), (2048, 512))]] * 3
    x = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
    mesh = AbstractMesh((2, 4), ("data", "model"))
    pinned = ([["data:B model:S(1)", "data:B model:S(0)"]] * 3, "data:S(0) model:B")
    for in_types in (None, pinned):
        report = sbp.jit(
            jax.value_and_grad(loss), mesh, hardware=hardware, in_types=in_types
        ).check(shapes, x)
        assert report.ok
        assert report.program is not None
        assert "needed by" in report.text() or not report.program.cost.bytes_per_device
