"""A value that is read in several types is converted along a tree; what its search leaves out is
said."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import B, S

AXES = (("data", 2), ("model", 4))
TYPES = [
    {"data": a, "model": b} for a, b in itertools.product((B, S(0), S(1), S(2)), (B, S(0), S(1)))
]


def read_in(count):
    """A program that reads a tensor in so many types besides its own."""

    def program(x):
        x = sbp.annotate(x, data=S(2), model=S(2))
        return sum(jnp.sum(jnp.sin(sbp.annotate(x, **t))) for t in TYPES[:count])

    return program


@pytest.mark.parametrize("count", [4, 5, 9])
def test_one_order_of_conversions_is_said(count):
    f = sbp.jit(read_in(count), jax.sharding.AbstractMesh((2, 4), ("data", "model")))
    plan = f.plan(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32))
    assert plan.program.unordered_values == (count > 4)
    text = "sbp tried only one order for the conversions of 1 value to more than 4 types"
    assert (text in plan.report().text(400)) == (count > 4)


@pytest.mark.parametrize("count", [3, 9])
def test_the_tree_gives_every_reader_its_value(count):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8, 8)), jnp.float32)
    mesh = sbp.make_mesh([n for _, n in AXES], [name for name, _ in AXES])
    np.testing.assert_allclose(
        sbp.jit(read_in(count), mesh)(x), read_in(count)(x), rtol=2e-5, atol=2e-5
    )
