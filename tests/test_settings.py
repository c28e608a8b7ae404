"""Settings that a function makes for a part of itself hold there, as under `jax.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import xla_metadata
from jax.experimental.xla_metadata import set_xla_metadata

import sbp
from sbp._jax import Settings
from tests.same import assert_same_results

X = jnp.arange(8.0 * 16).reshape(8, 16)


@pytest.fixture(scope="module")
def mesh():
    return sbp.make_mesh((2, 4), ("data", "model"))


def draws(x):
    """The same key under both kinds of counters."""
    key = jax.random.key(3)
    first = jax.random.uniform(key, x.shape)
    with jax.threefry_partitionable(not Settings.current().threefry_partitionable):
        return first, jax.random.uniform(key, x.shape), jax.random.split(key, 3)


def draws_in_a_loop(x):
    def step(carry, _):
        with jax.threefry_partitionable(False):
            return carry + jax.random.normal(jax.random.key(1), x.shape), None

    return jax.lax.scan(step, x, None, length=2)[0]


def wide(x):
    with jax.enable_x64(True):
        y = x.astype(jnp.float64) * 1.0000000001
        return y, jnp.arange(16) * 2**40 + x.astype(jnp.int64), (y - x).astype(jnp.float32)


def test_a_plan_compiles_under_the_settings_that_it_was_made_under(mesh):
    f, key = sbp.jit(lambda key: jax.random.uniform(key, (8,)), mesh), jax.random.key(3)
    plan = f.plan(key)
    with jax.threefry_partitionable(not Settings.current().threefry_partitionable):
        text, got = plan.lower().as_text(), plan(key)
    assert_same_results(jax.random.uniform(key, (8,)), got)
    assert plan.lower().as_text() == text


@pytest.mark.parametrize("fn", [draws, draws_in_a_loop, wide], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("out", [None, "data:S(0)"])
def test_values_are_those_of_jit(mesh, fn, out):
    with jax.numpy_dtype_promotion("standard"):
        types = None if out is None else lambda path, x: out if x.ndim == 2 else None
        assert_same_results(jax.jit(fn)(X), sbp.jit(fn, mesh, out_types=types)(X))


def test_metadata_reaches_the_compiled_program(mesh):
    def tagged(x, w):
        with set_xla_metadata(kind="product", stage=3):
            y = x @ w
        return jnp.tanh(y)

    for jitted in (jax.jit(tagged), sbp.jit(tagged, mesh, ("data:S(0)", "model:S(1)"))):
        lines = jitted.lower(X, X.T).as_text().splitlines()
        marked = [line for line in lines if 'kind = "product"' in line and 'stage = "3"' in line]
        assert marked and all("dot_general" in line for line in marked)


@pytest.mark.skipif(
    not hasattr(xla_metadata, "xla_metadata_call"), reason="this JAX has no xla_metadata_call"
)
def test_metadata_of_a_call_reaches_the_operations_inside(mesh):
    call: Any = getattr(xla_metadata, "xla_metadata_call")  # noqa: B009 the lowest JAX lacks it
    tagged = call(kind="block")(lambda x, w: jnp.tanh(x @ w) * 2)
    f = sbp.jit(lambda x, w: tagged(x, w) + 1, mesh, ("data:S(0)", "model:S(1)"))
    marked = [line for line in f.lower(X, X.T).as_text().splitlines() if 'kind = "block"' in line]
    assert not [op for op in ("dot_general", "tanh", "multiply") if op not in "\n".join(marked)]
    assert_same_results(jax.jit(tagged)(X, X.T) + 1, f(X, X.T))


def test_metadata_of_a_value_reaches_the_compiled_program(mesh):
    def tagged(x, w):
        product: Any = set_xla_metadata(x @ w, kind="product")
        return jnp.tanh(product)

    f = sbp.jit(tagged, mesh, ("data:S(0)", "model:S(1)"))
    assert any('kind = "product"' in line for line in f.lower(X, X.T).as_text().splitlines())
    assert not f.check(X, X.T).diagnostics
