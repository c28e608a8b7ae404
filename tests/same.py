"""Compares trees of arrays, and a call of `sbp.jit` with the same call of `jax.jit`; errors that a
call raises."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import _jax
from sbp.signatures import register, unregister


def both(fn, mesh, **options):
    """The function under `jax.jit` and under `sbp.jit` with the same options."""
    return jax.jit(fn, **options), sbp.jit(fn, mesh, **options)


@contextmanager
def registered(primitive: Any, rows: Any = (), **options: Any) -> Iterator[None]:
    """Registers a signature while the context lasts."""
    register(primitive, rows, **options)
    try:
        yield
    finally:
        unregister(primitive)


def assert_close(got, want, *, rtol, atol) -> None:
    """Checks that two trees of arrays have nearly equal leaves."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


def checked_plan(fn, mesh, *args, rtol=1e-4, atol=1e-4, **options) -> sbp.Plan:
    """Plans a function, and checks that the plan and `jax.jit` give the same results."""
    f = sbp.jit(fn, mesh, **options)
    assert_close(f(*args), jax.jit(fn)(*args), rtol=rtol, atol=atol)
    return f.plan(*args)


def assert_same_results(want, got, rtol=1e-5, atol=1e-5) -> None:
    """Structure, kind of leaf, shape, dtype, weak type and values are equal; floats up to
    rounding."""
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        aval = lambda x: (
            isinstance(x, jax.Array),
            x.shape,
            x.dtype,
            getattr(x, "weak_type", False),
        )
        assert aval(a) == aval(b)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if a.dtype == jax.dtypes.float0:
            continue
        a, b = np.asarray(a), np.asarray(b)
        if np.issubdtype(a.dtype, np.inexact):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(a, b)


def refused(said: str | None, call, *args, kind=Exception, **kwargs) -> sbp.SbpError:
    """The error of sbp that a call raises. Its text matches the pattern `said`, and it is also an
    instance of `kind`, which is what JAX raises for the same call."""
    with pytest.raises(sbp.SbpError, match=said) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, kind)
    return caught.value


def equations_in(jaxpr) -> Iterator[Any]:
    """The equations of a jaxpr and of all jaxprs in it."""
    for equation in _jax.open_jaxpr(jaxpr)[0].eqns:
        yield equation
        for inner in _jax.jaxprs_in(equation):
            yield from equations_in(inner)


def outcome(call) -> str:
    """How a call ends: `ok`, or which of `TypeError`, `ValueError` and `OverflowError` its
    exception is an instance of. Tests compare a call of JAX with the same call of sbp."""
    try:
        call()
    except (TypeError, ValueError, OverflowError, sbp.SbpError) as error:
        kinds = (TypeError, ValueError, OverflowError)
        return " ".join(k.__name__ for k in kinds if isinstance(error, k)) or repr(error)
    return "ok"


def printed_under_all_hash_seeds(program: str) -> str:
    """Runs a program in processes with different hash seeds, checks that all print the same text,
    and returns the text."""
    command, root = [sys.executable, "-c", program], Path(__file__).parents[1]
    run = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True, check=True)
    (text,) = {
        run(command, env=os.environ | {"PYTHONHASHSEED": seed}).stdout for seed in ("0", "4242")
    }
    return text
