"""What the faulty programs share: shapes and the usual mesh."""

import jax
import jax.numpy as jnp

mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)
