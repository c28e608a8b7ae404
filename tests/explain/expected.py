"""Meshes and shapes of small programs."""

import jax

from tests.cases import GRID as GRID, shape

MESH = jax.sharding.AbstractMesh((8,), ("tensor",))
MESH_2D = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))


SQUARE = shape(1024, 1024)
