"""The training step through sbp.jit on 8 simulated devices against jax.jit on one."""

import dataclasses

import jax
import numpy as np

import sbp
from sbp.moe.presets import preset
from sbp.moe.sharding import sharding_of
from sbp.moe.step import batch_shapes, init_state, make_train_step
from tests.moe.routing import assert_same_counts
from tests.moe.test_model import random_batch

AXES = (("data", 2), ("expert", 4))


def test_twenty_float64_steps_equal_one_device():
    """Free-running, dropout and random routing included: the same losses to 1e-9 and the same
    routing, and no rule is missing."""
    with jax.enable_x64(True):
        model, train = (
            dataclasses.replace(preset("tiny-test").model, dtype="float64"),
            preset("tiny-test").train,
        )
        mesh = sbp.make_mesh([size for _, size in AXES], [name for name, _ in AXES])
        shapes = jax.eval_shape(lambda: init_state(model, train))
        plan = sbp.jit(
            make_train_step(model, train, sharding_of(AXES)), mesh, donate_argnums=(0,)
        ).plan(shapes, batch_shapes(model))
        single = jax.jit(make_train_step(model, train))
        split = jax.device_put(init_state(model, train), plan.in_shardings[0])
        whole = init_state(model, train)
        for seed in range(20):
            batch = random_batch(model, seed)
            split, got = plan(split, batch)
            whole, want = single(whole, batch)
            np.testing.assert_allclose(got.loss, want.loss, rtol=1e-9)
            np.testing.assert_allclose(got.aux, want.aux, rtol=1e-9)
            for side in ("encoder", "decoder"):
                assert_same_counts(getattr(got, side), getattr(want, side))
        assert int(split.step) == 20
