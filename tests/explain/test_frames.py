"""Dims are those of the user's line, where a library moves them."""

import jax
import jax.numpy as jnp
import pytest

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


# ---- dims of jax.vmap ---------------------------------------------------------------------------


def pinned_inside(x, w):
    def one(row):
        row = sbp.split(row, 1, "d")
        return row @ sbp.split(w, 1, "d")

    return jax.vmap(one)(x)


def pinned_outside(x, w):
    x, w = sbp.split(x, 2, "d"), sbp.split(w, 1, "d")
    return jax.vmap(lambda row: jnp.tanh(row) @ w)(x)


def met_inside(x, w):
    def one(a, b):
        a, b = sbp.split(a, 0, "d"), sbp.split(b, 1, "d")
        return jnp.tanh(a) + jnp.tanh(b)

    return jax.vmap(one)(x, x)


@pytest.mark.parametrize(
    "program,told",
    [
        (
            pinned_inside,
            (
                "row is S(1) on `d` under vmap, the contracted dim",
                "w is S(1) on `d` under vmap, not contracted",
            ),
        ),
        (
            pinned_outside,
            (
                "jnp.tanh(row) is S(2), w is S(1): they cannot meet here, in dims of the",
                "x is S(2) on `d`: dim 2 of 8x16x16",
                "w is S(1) on `d`, not contracted",
            ),
        ),
        (
            met_inside,
            (
                "a as S(0) and b as S(1) cannot meet in",
                "a is S(0) on `d` under vmap: dim 0 of 16x16",
                "b is S(1) on `d` under vmap: dim 1 of 16x16",
            ),
        ),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_dims_under_vmap_are_those_that_the_user_wrote(program, told):
    """Where it is not known which of the user's dims a dim is, that is said."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16, 16), (16, 16))]
    (found,) = sbp.jit(program, MESH, boxing="explicit").check(*args).diagnostics
    said = "\n".join([found.title, *(label.text for label in found.labels)])
    assert all(text in said for text in told), said
    assert found.rule.endswith(", dims of the batched arrays")
