"""Dims are those of the user's line, where a library moves them."""

import jax
import jax.numpy as jnp

import sbp

MESH = jax.sharding.AbstractMesh((8,), ("d",))


def test_the_dims_of_a_transform_along_another_dim():
    def program(x):
        x = sbp.split(x, 1, "d")
        y = jnp.fft.fft(x, axis=1)
        return jnp.abs(y)

    x = jax.ShapeDtypeStruct((7, 16, 24), jnp.float32)  # dim 0 does not divide
    (found,) = sbp.jit(program, MESH, boxing="explicit").check(x).diagnostics
    assert found.primary is not None
    assert found.primary.text == "x is S(1) here, which fft does not take"
    rows = {(*r.inputs, *r.outputs) for r in found.rows}
    assert rows == {("B", "B"), ("S(2)", "S(2)")}
    assert any("split x on dim 2" in h.text and "y becomes S(2)" in h.text for h in found.helps)
