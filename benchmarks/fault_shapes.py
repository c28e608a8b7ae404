"""Shapes and the usual mesh of the programs in `benchmarks/faults`."""

import jax
import jax.numpy as jnp

mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
