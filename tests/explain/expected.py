"""Meshes and shapes of small programs."""

import jax
import jax.numpy as jnp

MESH = jax.sharding.AbstractMesh((8,), ("tensor",))
MESH_2D = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


SQUARE = shape(1024, 1024)
