"""Which calls share a plan, and which plans are kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.api import jit
from tests.same import assert_same_results, both

SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "prng": lambda: jax.default_prng_impl("rbg"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "rank promotion": lambda: jax.numpy_rank_promotion("warn"),
    "nans": lambda: jax.debug_nans(True),
    "keys": lambda: jax.legacy_prng_key("error"),
    "bits": lambda: jax.default_device(jax.devices()[1]),
}


def traced(log, x, y):
    """A function whose trace depends on settings of JAX, and that notes each trace."""
    log.append(None)
    noise = jax.random.uniform(jax.random.key(0), (4,))
    return jnp.arange(4.0) @ jnp.arange(4.0), x * y, noise


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_each_setting_of_jax_has_its_own_plan(setting, mesh):
    log = []
    plain, ours = both(functools.partial(traced, log), mesh)
    args = np.float32(2), np.float32(3)
    assert_same_results(plain(*args), ours(*args))
    with setting():
        assert_same_results(plain(*args), ours(*args))
        count = len(log)
        ours(*args)
    assert_same_results(plain(*args), ours(*args))
    assert len(log) == count, "a call that has a plan is not traced again"


def test_a_mesh_of_the_context_is_no_other_signature(mesh):
    log = []
    f = sbp.jit(functools.partial(traced, log), mesh)
    x = jnp.ones(8)
    f.plan(x, x)
    with jax.set_mesh(mesh):
        f(x, x)
    assert len(log) == 1


def test_static_arguments_of_equal_value_and_other_type(mesh):
    f = sbp.jit(lambda x, n: x * n, mesh, static_argnums=1)
    assert [f(jnp.ones(4, jnp.int32), n).dtype for n in (1, 1.0, True)] == [
        jnp.int32,
        jnp.float32,
        jnp.int32,
    ]


def test_the_plan_that_was_not_used_for_longest_is_dropped(mesh, monkeypatch):
    monkeypatch.setattr(jit, "MOST_PLANS", 2)
    log = []
    f = sbp.jit(functools.partial(traced, log), mesh)
    one, two, three = (jnp.ones(n) for n in (1, 2, 3))
    f(one, one)
    f(two, two)
    f(one, one)
    with pytest.warns(sbp.SbpWarning, match="many-plans: traced was called with more than 2"):
        f(three, three)  # drops the plan of `two`
    f(one, one)
    assert len(log) == 3
    f(two, two)
    assert len(log) == 4


def test_clear_cache(mesh):
    log = []
    f = sbp.jit(functools.partial(traced, log), mesh)
    for _ in range(2):
        f(jnp.ones(8), 1.0)
        f(jnp.ones(8), jnp.ones(8))
    assert len(log) == 2
    f.clear_cache()
    f(jnp.ones(8), jnp.ones(8))
    assert len(log) == 3
