"""Plain JAX code on the results of a plan, by the axis types of the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp

TOKENS = jnp.zeros((4, 2), jnp.int32)
TYPES = ("data:S(0) model:S(1)", "model:S(1)")
AMBIGUOUS = {
    "take": lambda e, w: e[TOKENS],
    "matmul": lambda e, w: e @ w.T,
}
OTHERS = {
    "reshape": lambda e, w: e.reshape(4, 4, 8),
    "concatenate": lambda e, w: jnp.concatenate([e, e]),
    "add": lambda e, w: e + jnp.ones_like(e),
}


def results(mesh):
    e, w = jnp.arange(128.0).reshape(16, 8), jnp.ones((8, 8))
    return (e, w), sbp.jit(lambda e, w: (e + 0, w + 0), mesh, TYPES, TYPES)(e, w)


@pytest.mark.parametrize("name", [*AMBIGUOUS, *OTHERS])
def test_plain_jax_takes_results_on_auto_axes(name):
    args, got = results(sbp.make_mesh((2, 4), ("data", "model")))
    after = {**AMBIGUOUS, **OTHERS}[name]
    np.testing.assert_allclose(after(*got), after(*args))


def test_jax_refuses_ambiguous_operations_on_explicit_axes():
    args, got = results(jax.make_mesh((2, 4), ("data", "model")))
    for after in OTHERS.values():
        np.testing.assert_allclose(after(*got), after(*args))
    for after in AMBIGUOUS.values():
        with pytest.raises(Exception, match="ambiguous"):
            after(*got)
