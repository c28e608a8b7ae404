"""Programs in the style of the documentation of Flax, Equinox and Optax train on a 2x4 mesh under
`sbp.jit` as they do under `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from tests.programs.models import PROGRAMS

STEPS = 3


def data(x):
    """The values of an array, and those behind keys."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_trains_as_under_jax_jit(make):
    step, state, batch = make()
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    on_data = tuple("data:S(0)" for _ in batch)
    plain = jax.jit(step)
    # A donated state comes back with the types that it had.
    planned = sbp.jit(step, mesh, in_types=(None, *on_data), donate_argnums=0)
    want, got = state, jax.tree.map(jnp.copy, state)
    losses = []
    for _ in range(STEPS):
        want, loss = plain(want, *batch)
        got, planned_loss = planned(got, *batch)
        np.testing.assert_allclose(planned_loss, loss, rtol=1e-3)
        losses.append(float(loss))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(data(a), data(b), rtol=1e-3, atol=1e-4)
    assert len(set(losses)) > 1, "the program does not train"
