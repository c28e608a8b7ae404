"""Values and gradients of the reference programs on every mesh equal `jax.jit` on one device; and
random bits are the slice of the global draw, bit for bit."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.run.programs import CASES, MESHES, NAMES, Case, arguments, function_of
from tests.same import assert_same_results
from tests.slices import sliced

pytestmark = pytest.mark.laws


def assert_same(got, want, rtol=2e-5) -> None:
    """Integers and booleans exactly, floats relative to the largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = rtol * max(1e-30, float(np.abs(np.asarray(b)).max(initial=0)))
        assert_same_results(b, a, rtol=rtol, atol=atol)


@cache
def wanted(case: Case):
    """The single-device result: annotations are the identity outside sbp.jit."""
    return jax.jit(function_of(case, NAMES))(*arguments(case))


@pytest.mark.parametrize(
    ("case", "shape"),
    sliced(itertools.product(CASES, MESHES), 1 / 2),
    ids=lambda x: (
        x.name if isinstance(x, Case) else "x".join(map(str, x)) if isinstance(x, tuple) else ""
    ),
)
def test_equals_one_device(case: Case, shape: tuple[int, ...]):
    names = NAMES[: len(shape)]
    f = sbp.jit(function_of(case, names), sbp.make_mesh(shape, names))
    assert_same(f(*arguments(case)), wanted(case))


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_all_inputs_split(case: Case, shape: tuple[int, ...]):
    """The same from other types: every first dim that divides is split at the boundary, so
    conversions and uneven slices run too."""
    names = NAMES[: len(shape)]
    mesh = sbp.make_mesh(shape, names)

    def split_first(path, leaf):
        total = 1
        atoms = {}
        for name, n in zip(names, shape, strict=True):
            if leaf.shape and leaf.shape[0] % (total * n) == 0:
                atoms[name], total = sbp.S(0), total * n
        return sbp.NdSbp(atoms)

    f = sbp.jit(function_of(case, names), mesh, in_types=(split_first,) * len(case.shapes))
    assert_same(f(*arguments(case)), wanted(case))


# ---- random bits ---------------------------------------------------------------------------------


def draws(key, x):
    a, b, c = jax.random.split(key, 3)
    mask = jax.random.bernoulli(b, 0.9, x.shape)
    return (
        jax.random.uniform(a, x.shape),
        mask,
        jnp.where(mask, x / 0.9, 0),
        jax.random.normal(c, (*x.shape, 3)),
        jax.random.bits(a, x.shape, "uint8"),
        jax.random.randint(b, x.shape, 0, 100),
    )


@pytest.mark.parametrize(
    ("shape", "new_style", "rows"),
    sliced(list(itertools.product(MESHES, (True, False), (16, 13))), 1 / 2),
    ids=str,
)
def test_draws(shape, new_style, rows):
    names = NAMES[: len(shape)]
    key = jax.random.key(7) if new_style else jax.random.PRNGKey(7)
    x = jnp.ones((rows, 6))

    def split(key, x):
        x = sbp.split(x, 0, *names)
        return jax.tree.map(lambda y: sbp.split(y, 0, *names), draws(key, x))

    f = sbp.jit(split, sbp.make_mesh(shape, names))
    got, want = f(key, x), jax.jit(draws)(key, x)
    # Transcendental functions of the same bits differ in the last place between vector lengths.
    assert_same_results(want, got, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(want[0]))
    bits = [n for n in f.plan(key, x).program.graph.walk() if n.op == "random_bits"]
    typing = f.plan(key, x).program.typing
    if shape != (1,) and rows == 16:
        assert any(any(typing.values[n.outputs[0]]) for n in bits), (
            "no draw was split: the test would show nothing"
        )


@pytest.mark.parametrize(
    ("shape", "impl", "count"),
    sliced(list(itertools.product(MESHES, ("rbg", "unsafe_rbg"), (16, 13))), 1 / 2),
    ids=str,
)
def test_draws_of_a_batch_of_keys_of_hardware_generators(shape, impl, count):
    """The draws of all keys are one stream, which each device draws as a whole."""
    names = NAMES[: len(shape)]
    keys = jax.random.split(jax.random.key(3, impl=impl), count)

    def draw(keys):
        return jax.vmap(lambda k: (jax.random.bits(k, (37,)), jax.random.normal(k, (5,))))(keys)

    def split(keys):
        return jax.tree.map(lambda y: sbp.split(y, 0, *names), draw(sbp.split(keys, 0, *names)))

    f = sbp.jit(split, sbp.make_mesh(shape, names))
    got, want = f(keys), jax.jit(draw)(keys)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
