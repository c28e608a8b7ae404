"""Loops as they run on TPU (`sbp.run.interpret`, `sbp.run.interpret`), on simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp

BF16 = jnp.bfloat16


def mesh():
    return jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])


def on_tpu(fn, in_types):
    """The function with the plan for a TPU, which runs on the simulated devices."""
    return sbp.jit(fn, mesh(), in_types=in_types, hardware="tpu-v5e")


def same(fn, in_types, *args):
    f = on_tpu(fn, in_types)
    with jax.numpy_dtype_promotion("standard"):
        expected, got = jax.jit(fn)(*args), f(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-2, atol=1e-6
        )
    return f.plan(*args)


def lowered(plan):
    return plan.lower().as_text()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_scan_has_its_carry_and_its_stacks(reverse, length, unroll):
    def fn(x, xs):
        def turn(c, x):
            i, c = c
            return (i + 1, c + x), {"sum": c, "index": i, "twice": 2 * x, "fixed": jnp.float32(3)}

        return lax.scan(turn, (0, x), xs, length=length, reverse=reverse, unroll=unroll)

    rng = np.random.default_rng(length)
    x, xs = rng.normal(size=8), rng.normal(size=(length, 8))
    same(fn, ("d:S(0)", "d:S(1)" if length else None), np.float32(x), np.float32(xs))


def test_a_scan_without_slices_and_one_without_stacks():
    def fn(x):
        y, powers = lax.scan(lambda c, _: (c * x, c), x, length=4)
        z, none = lax.scan(lambda c, p: (c + p, None), y, powers)
        return y, powers, z, none

    same(fn, ("d:S(0)",), np.arange(1.0, 9.0, dtype=np.float32))


def test_scans_in_scans_and_their_gradients():
    def fn(w, x):
        def inner(c, w):
            return jnp.tanh(c @ w), c.sum()

        def outer(c, w):
            c, sums = lax.scan(inner, c, w)
            return c, sums

        def loss(w):
            y, sums = lax.scan(jax.checkpoint(outer), x, w)
            return jnp.sum(y**2) + jnp.sum(sums)

        return jax.value_and_grad(loss)(w)

    rng = np.random.default_rng(0)
    w = np.float32(rng.normal(size=(3, 2, 8, 8)) / 3)
    same(fn, (None, "d:S(0)"), w, np.float32(rng.normal(size=(8, 8))))


def test_a_scan_of_keys():
    def fn(key):
        def turn(key, _):
            key, other = jax.random.split(key)
            return key, (other, jax.random.normal(other, (8,)))

        return lax.scan(turn, key, length=3)

    same(fn, None, jax.random.key(0))


SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9)


def test_a_cast_of_slices_stays_in_the_loop_and_gives_the_same_bits():
    def fn(xs):
        def turn(c, x):
            return c, lax.bitcast_convert_type(x.astype(BF16), jnp.uint16)

        return lax.scan(turn, 0, xs)[1]

    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, size=(4, 1014), dtype=np.uint32).view(np.float32)
    xs = np.concatenate([bits, np.tile(np.array(SPECIAL, np.float32), (4, 1))], 1)
    f = on_tpu(fn, ("d:S(1)",))
    assert "reduce_precision" in lowered(f.plan(xs))
    numbers = ~np.isnan(xs)
    expected, got = np.asarray(fn(xs)), np.asarray(f(xs))
    np.testing.assert_array_equal(got[numbers], expected[numbers])
    assert np.isnan(got.view(BF16)[~numbers].astype(np.float32)).all()


def loop_with(cast_of):
    def fn(w, x):
        return lax.scan(lambda c, w: (jnp.tanh(cast_of(c, w)), None), x, w)[0]

    return fn


W = jax.ShapeDtypeStruct((3, 8, 8), "float32")
X = jax.ShapeDtypeStruct((8, 8), BF16)


@pytest.mark.parametrize(
    ("cast_of", "kept"),
    [
        (lambda c, w: c @ w.astype(BF16), True),
        (lambda c, w: c @ w.T.astype(BF16), True),
        (lambda c, w: c @ lax.optimization_barrier((c, w))[1].astype(BF16), True),
        (lambda c, w: c @ (2 * w).astype(BF16), False),
        (lambda c, w: c @ w.astype(jnp.float16).astype(BF16), False),
        (lambda c, w: (c.astype(jnp.float32) @ w).astype(BF16), False),
    ],
)
def test_casts_of_slices_as_they_are_are_kept(cast_of, kept):
    with jax.numpy_dtype_promotion("standard"):
        plan = on_tpu(loop_with(cast_of), (None, "d:S(0)")).plan(W, X)
    assert ("reduce_precision" in lowered(plan)) == kept


def test_a_loop_in_a_loop_has_its_casts_ahead_of_both():
    inner = loop_with(lambda c, w: c @ w.astype(BF16))
    plan = on_tpu(lambda w, x: lax.fori_loop(0, 4, lambda _, x: inner(w, x), x), (None, "d:S(0)"))
    assert "reduce_precision" not in lowered(plan.plan(W, X))


def test_of_a_gathered_stack_the_compiler_moves_the_cast_ahead_of_the_gather():
    inner = loop_with(lambda c, w: c @ w.astype(BF16))
    f = on_tpu(lambda w, x: inner(sbp.replicate(w, "d"), x), ("d:S(1)", "d:S(0)"))
    plan = f.plan(W, X)
    assert "all_gather" in lowered(plan)
    assert "reduce_precision" not in lowered(plan)


def test_on_other_platforms_a_scan_is_that_of_jax():
    fn = loop_with(lambda c, w: c @ w.astype(BF16))
    f = sbp.jit(fn, mesh(), in_types=(None, "d:S(0)"))
    assert "reduce_precision" not in lowered(f.plan(W, X))
