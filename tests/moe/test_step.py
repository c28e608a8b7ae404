"""The whole training step (forward, backward, Adafactor) on every mesh, against jax.jit on one
device."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest

import sbp
from examples.gshard.presets import preset
from sbp.moe.step import init_state, make_train_step, plan_train_step
from tests.moe.routing import assert_same_counts
from tests.moe.test_model import random_batch
from tests.slices import EXHAUSTIVE, sliced

MESHES = (
    (("expert", 1),),
    (("expert", 2),),
    (("expert", 4),),
    (("expert", 8),),
    (("data", 2), ("expert", 4)),
    (("data", 4), ("expert", 2)),
    (("pod", 2), ("data", 2), ("expert", 2)),
)


def planned_step(model, train, axes):
    mesh = sbp.make_mesh([size for _, size in axes], [name for name, _ in axes])
    return plan_train_step(model, train, mesh)


@cache
def initial():
    """The state before the first step, as host arrays."""
    return jax.device_get(init_state(preset("tiny-test").model, preset("tiny-test").train))


def assert_same_routing(got, want):
    for side in ("encoder", "decoder"):
        assert_same_counts(getattr(got, side), getattr(want, side))


@cache
def wanted():
    """The state and the metrics after one step on one device, as host arrays."""
    model, train = preset("tiny-test").model, preset("tiny-test").train
    step = jax.jit(make_train_step(model, train))
    return jax.device_get(step(initial(), random_batch(model, 0)))


@pytest.mark.laws
@pytest.mark.parametrize(
    "axes",
    sliced(MESHES, 1 / 7, laws=2 / 7, seed=1),
    ids=lambda a: "x".join(str(n) for _, n in a),
)
def test_one_step_on_every_mesh(axes):
    """Loss, routing and the new parameters: a wrong gradient anywhere would show in them.

    `make laws` leaves out five of the meshes.
    """
    model, train = preset("tiny-test").model, preset("tiny-test").train
    plan = planned_step(model, train, axes)
    batch = random_batch(model, 0)
    want_state, want = wanted()
    got_state, got = plan(jax.device_put(initial(), plan.in_shardings[0]), batch)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    np.testing.assert_allclose(got.aux, want.aux, rtol=1e-5)
    assert_same_routing(got, want)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got_state)[0], jax.tree.leaves(want_state), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        if np.issubdtype(a.dtype, np.floating):
            # Adafactor divides by the root of squares: where a gradient is rounding noise, so is
            # its normalised update.
            scale = float(np.abs(b).max(initial=0.0)) or 1.0
            assert np.mean(np.abs(a - b)) <= 1e-4 * scale, jax.tree_util.keystr(path)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.laws
@pytest.mark.skipif(not EXHAUSTIVE, reason="`make laws` runs it")
def test_twenty_float32_steps_each_from_the_same_state():
    """Free-running float32 drifts by itself; from one state, each step agrees to 1e-5 with the same
    routing."""
    model, train = preset("tiny-test").model, preset("tiny-test").train
    model = dataclasses.replace(model, dropout=0.1)
    plan = planned_step(model, train, (("data", 2), ("expert", 4)))
    single = jax.jit(make_train_step(model, train))
    state = initial()
    for seed in range(20):
        batch = random_batch(model, seed)
        _, got = plan(jax.device_put(jax.device_get(state), plan.in_shardings[0]), batch)
        state, want = single(state, batch)
        np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
        assert_same_routing(got, want)
