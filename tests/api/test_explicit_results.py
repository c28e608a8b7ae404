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


@pytest.mark.parametrize("make_mesh", [sbp.make_mesh, jax.make_mesh], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", [*AMBIGUOUS, *OTHERS])
def test_plain_jax_takes_results(name, make_mesh):
    """On explicit axes JAX refuses the operations whose result it cannot place."""
    args = jnp.arange(128.0).reshape(16, 8), jnp.ones((8, 8))
    mesh = make_mesh((2, 4), ("data", "model"))
    got = sbp.jit(lambda e, w: (e + 0, w + 0), mesh, TYPES, TYPES)(*args)
    after = {**AMBIGUOUS, **OTHERS}[name]
    if make_mesh is jax.make_mesh and name in AMBIGUOUS:
        with pytest.raises(Exception, match="ambiguous"):
            after(*got)
    else:
        np.testing.assert_allclose(after(*got), after(*args))
