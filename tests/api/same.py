"""Compares a call of `sbp.jit` with the same call of `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np

import sbp


def both(fn, mesh, **options):
    """The function under `jax.jit` and under `sbp.jit` with the same options."""
    return jax.jit(fn, **options), sbp.jit(fn, mesh, **options)


def assert_same_results(want, got) -> None:
    """Structure, kind of leaf, shape, dtype, weak type and values are equal; floats up to
    rounding."""
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert isinstance(b, jax.Array) == isinstance(a, jax.Array)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if a.dtype == jax.dtypes.float0:
            continue
        a, b = np.asarray(a), np.asarray(b)
        if np.issubdtype(a.dtype, np.inexact):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


def outcome(call) -> str:
    """What a call ends in, for comparison of errors: `ok`, or those of `TypeError`, `ValueError`
    and `OverflowError` that its exception is."""
    try:
        call()
    except (TypeError, ValueError, OverflowError, sbp.SbpError) as error:
        kinds = (TypeError, ValueError, OverflowError)
        return " ".join(k.__name__ for k in kinds if isinstance(error, k)) or repr(error)
    return "ok"
