"""Random bits, masks and index-generating primitives are the slice of the global draw, bit for bit,
on every mesh."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.run.programs import MESHES, NAMES, assert_same
from tests.slices import sliced


def draws(key, x):
    a, b, c = jax.random.split(key, 3)
    uniform = jax.random.uniform(a, x.shape)
    mask = jax.random.bernoulli(b, 0.9, x.shape)
    normal = jax.random.normal(c, (*x.shape, 3))
    return (
        uniform,
        mask,
        jnp.where(mask, x / 0.9, 0),
        normal,
        jax.random.bits(a, x.shape, "uint8"),
        jax.random.randint(b, x.shape, 0, 100),
    )


@cache
def wanted(new_style: bool, rows: int):
    """The draws on one device."""
    key = jax.random.key(7) if new_style else jax.random.PRNGKey(7)
    return jax.jit(draws)(key, jnp.ones((rows, 6)))


DRAWS = list(itertools.product(MESHES, (True, False), (16, 13)))


@pytest.mark.parametrize(("shape", "new_style", "rows"), sliced(DRAWS, 1 / 2), ids=str)
def test_draws(shape, new_style, rows):
    names = NAMES[: len(shape)]
    mesh = sbp.make_mesh(shape, names)
    key = jax.random.key(7) if new_style else jax.random.PRNGKey(7)
    x = jnp.ones((rows, 6))

    def split(key, x):
        x = sbp.split(x, 0, *names)
        return jax.tree.map(lambda y: sbp.split(y, 0, *names), draws(key, x))

    f = sbp.jit(split, mesh)
    got, want = f(key, x), wanted(new_style, rows)
    for a, b in zip(got, want, strict=True):
        if np.issubdtype(a.dtype, np.floating):
            # Transcendental functions of the same bits differ in the last place between vector
            # lengths.
            np.testing.assert_allclose(a, b, rtol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
    bits = [n for n in f.plan(key, x).program.graph.walk() if n.op == "random_bits"]
    typing = f.plan(key, x).program.typing
    if shape != (1,) and rows == 16:
        assert any(any(typing.values[n.outputs[0]]) for n in bits), (
            "no draw was split: the test would show nothing"
        )


def test_iota_and_masks():
    mesh = sbp.make_mesh((2, 4), ("x", "y"))

    def fn(x):
        x = sbp.annotate(x, x=sbp.S(0), y=sbp.S(1))
        mask = jnp.tril(jnp.ones(x.shape, bool))
        return jnp.where(mask, x, -1e9), jnp.arange(x.shape[0])[:, None] * 100 + jnp.arange(
            x.shape[1]
        ) + x.astype(int)

    x = jnp.arange(24 * 12.0).reshape(24, 12)
    assert_same(sbp.jit(fn, mesh)(x), jax.jit(fn)(x), rtol=0)


def test_a_batch_of_keys_is_one_draw():
    """Why `rng_bit_generator` has no row for a batch of keys: JAX draws once, from the first
    key."""
    keys = jnp.arange(24, dtype=jnp.uint32).reshape(6, 4)
    of_each = jax.vmap(lambda k: jax.lax.rng_bit_generator(k, (3,)))
    (node,) = [e for e in jax.make_jaxpr(of_each)(keys).eqns if e.outvars[1:]]
    assert node.invars[0].aval.shape == (4,) and node.outvars[1].aval.shape == (6, 3)
    mesh = sbp.make_mesh((4,), ("x",))
    f = sbp.jit(lambda k: of_each(sbp.annotate(k, x=sbp.S(0))), mesh)
    assert_same(f(keys), jax.jit(of_each)(keys), rtol=0)
