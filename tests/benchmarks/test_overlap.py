"""The forms of a loop over layers compute the same gradients."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.overlap import AXIS, FORMS, SHAPE, gradients
from benchmarks.steps.program import Mark
from benchmarks.steps.transformer import Axes, block, specs_of, weights_of

SMALL = dataclasses.replace(SHAPE, layers=3, width=32, heads=4, hidden=64, batch=4, length=8)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_one_device(form):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda w: jnp.asarray(rng.normal(0, 0.1, w.shape), jnp.float32),
        weights_of(SMALL)["blocks"],
    )
    x = jnp.asarray(rng.normal(0, 1, (SMALL.batch, SMALL.length, SMALL.width)), jnp.bfloat16)

    def loss(params):
        y = x
        for n in range(SMALL.layers):
            y = block(jax.tree.map(lambda w, n=n: w[n], params), y, SMALL, Axes(), Mark())
        return jnp.mean(y.astype(jnp.float32) ** 2)

    specs = specs_of(SMALL, Axes(batch=AXIS, weights=AXIS))["blocks"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), (AXIS,))
    f = jax.shard_map(
        partial(gradients, form, SMALL),
        mesh=mesh,
        in_specs=(specs, P(AXIS, None, None)),
        out_specs=specs,
        check_vma=False,
    )
    # The sums over tokens are rounded to bfloat16 on each device.
    wanted = jax.grad(loss)(params)
    for name, found in jax.jit(f)(params, x).items():
        error = np.linalg.norm(found - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 0.02, name
