"""What one loop stacks for a later one is held in whole tiles of a TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp.run.interpret import Stacks

LAYERS, WIDTH = 3, 128


def loss(w, x):
    """Tokens (group, expert, slot, width) are exchanged in each layer, and again in its
    gradient."""

    def body(x, w):
        sent = sbp.split(x, 1, "d")
        out = sbp.split(jnp.tanh(jnp.einsum("gecm,mn->gecn", sent, w)), 0, "d")
        return x + jnp.tanh(out), None

    return (lax.scan(jax.checkpoint(body), sbp.split(x, 0, "d"), w)[0] ** 2).mean()


def step(w, x):
    return w - jax.grad(loss)(w, x)


def planned(mesh, slots, hardware="tpu-v3"):
    f = sbp.jit(step, mesh, ("B", "d:S(0)"), "B", hardware=hardware, memory_limit=2**40)
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return f.plan(w, jax.ShapeDtypeStruct((16, 16, slots, WIDTH), jnp.float32))


def stacked(slots, hardware="tpu-v3"):
    """Whether the second loop takes exchanged tokens in their own shape, four dims and the
    layers."""
    plan = planned(jax.sharding.AbstractMesh((4,), ("d",)), slots, hardware)
    assert plan.program.removed
    return f"tensor<{LAYERS}x16x4x{slots}x{WIDTH}xf32>" in plan.lower().as_text()


def test_slots_that_fill_no_rows_of_a_tile_are_stacked_as_a_matrix():
    assert not stacked(2) and not stacked(6)


def test_what_fills_tiles_is_stacked_as_it_is():
    assert stacked(8)


def test_only_a_tpu_has_tiles():
    assert stacked(2, "h100")


def test_a_stack_that_is_read_outside_of_loops_keeps_its_shape():
    program = planned(jax.sharding.AbstractMesh((4,), ("d",)), 2).program
    kept = program.graph.avals.keys() - program.request.graph.avals.keys()
    (register,) = Stacks(program.block, frozenset(kept)).registers
    returned = dataclasses.replace(program.block, outputs=(*program.block.outputs, register))
    assert not Stacks(returned, frozenset(kept)).registers


@pytest.mark.parametrize("devices", [4, 8])
def test_results_are_those_of_one_device(devices):
    plan = planned(sbp.make_mesh((devices,), ("d",)), 2)
    assert plan.program.removed
    key, other = jax.random.split(jax.random.key(0))
    w = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 16
    x = jax.random.normal(other, (16, 16, 2, WIDTH))
    np.testing.assert_allclose(plan(w, x), step(w, x), rtol=1e-5, atol=1e-6)
