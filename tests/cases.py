"""Names of test cases, a mesh without devices, and arrays without values."""

import re

import jax
import jax.numpy as jnp


def case_name(value: object) -> str:
    """A value as the name of its case. Addresses are left out: they differ between the processes
    that share the tests.

    >>> case_name({"mesh": 3})
    "{'mesh': 3}"
    """
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


GRID = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
"""A mesh to plan for."""


def shape(*dims, dtype=jnp.float32):
    """An array to plan for."""
    return jax.ShapeDtypeStruct(dims, dtype)


def descent(loss):
    """A step against the gradient of a loss of weights and more."""
    return lambda weights, *batch: jax.tree.map(
        lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, *batch)
    )
