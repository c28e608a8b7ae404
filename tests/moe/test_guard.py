"""Steps that are not finite, norms of gradients, microbatches and AdamW."""

import dataclasses
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.gshard.presets import preset
from sbp import SbpError
from sbp.moe.model import init_params, loss_fn
from sbp.moe.step import gradients, init_state, make_train_step
from tests.moe.routing import assert_same_counts
from tests.moe.steps import planned_step, run_step
from tests.moe.test_model import random_batch

MODEL, TRAIN = preset("tiny-test").model, preset("tiny-test").train
AXES = (("data", 2), ("expert", 4))


def planned(train, model=MODEL):
    return planned_step(model, train, AXES)


def poisoned(state, expert, value):
    """The state with one weight of one expert, which one row of devices holds, set to a value."""
    moe = state.params["encoder"]["moe"]
    other = {**moe, "expert_in": moe["expert_in"].at[0, expert, 0, 0].set(value)}
    encoder = {**state.params["encoder"], "moe": other}
    return state._replace(params={**state.params, "encoder": encoder})


@cache
def gradients_of_the_first_step():
    params, batch = init_state(MODEL, TRAIN).params, random_batch(MODEL, 0)
    key = jax.random.fold_in(jax.random.key(TRAIN.seed + 1), 0)
    loss = jax.grad(lambda p: loss_fn(p, batch, MODEL, key=key), has_aux=True)
    return jax.device_get(jax.jit(loss)(params)[0])


def norm_of(tree):
    squares = [np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(tree)]
    return math.sqrt(sum(squares))


@pytest.fixture(scope="module")
def plan():
    return planned(TRAIN)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_on_one_device_is_skipped_on_all(plan, value):
    state = poisoned(init_state(MODEL, TRAIN), 5, value)
    after, metrics = run_step(plan, state, random_batch(MODEL, 0))
    flags = [float(shard.data) for shard in metrics.skipped_step.addressable_shards]
    assert flags == [1.0] * 8 and not math.isfinite(float(metrics.grad_norm))
    assert int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, after.optimizer, state.optimizer)


def test_a_finite_step_reports_the_norm_of_the_whole_gradient(plan):
    state, batch = init_state(MODEL, TRAIN), random_batch(MODEL, 0)
    after, metrics = run_step(plan, state, batch)
    assert float(metrics.skipped_step) == 0.0
    want = norm_of(gradients_of_the_first_step())
    np.testing.assert_allclose(metrics.grad_norm, want, rtol=1e-4)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), after.params, state.params)
    assert all(jax.tree.leaves(changed))


def test_clipping_scales_all_gradients_by_one_number():
    """Read from AdamW's second moment, which is (1 - beta2) g^2 after one step."""
    batch = random_batch(MODEL, 0)
    train = dataclasses.replace(TRAIN, optimizer="adamw", schedule="constant")
    grads = gradients_of_the_first_step()
    norm = norm_of(grads)
    for limit, scale in ((norm / 4, 1 / 4), (2 * norm, 1.0)):
        clipped = dataclasses.replace(train, clip_norm=limit)
        after, metrics = jax.jit(make_train_step(MODEL, clipped))(init_state(MODEL, train), batch)
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)  # before clipping
        for moment, g in zip(*map(jax.tree.leaves, (after.optimizer[0].nu, grads)), strict=True):
            want = (1 - train.beta2) * np.square(scale * g)
            np.testing.assert_allclose(moment, want, rtol=2e-3, atol=1e-9 * float(want.max()))


@cache
def gradients_of_a_batch(microbatches):
    """Of a batch whose first group is padding alone. Without random routing and dropout, whose
    draws differ."""
    with jax.enable_x64(True):
        model = dataclasses.replace(MODEL, dtype="float64")
        params = init_params(jax.random.key(0), model)
        batch = jax.tree.map(lambda x: jnp.asarray(x).at[0].set(0), random_batch(model, 3))
        step = jax.jit(lambda p: gradients(p, batch, model, microbatches=microbatches))
        return jax.device_get(step(params))


@pytest.mark.parametrize("microbatches", [2, 8])
def test_microbatches_add_up_to_the_batch(microbatches):
    """Also where they have unlike numbers of real tokens."""
    want, metrics = gradients_of_a_batch(1)
    got, sums = gradients_of_a_batch(microbatches)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    for a, b in zip(*map(jax.tree.leaves, (sums, metrics)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_gradients_of_microbatches_are_reduced_once():
    """Four microbatches of the same tokens send what one batch does; with a reduction in each, they
    would send three times the gradients more."""
    model = dataclasses.replace(MODEL, groups=32)
    one, four = (planned(dataclasses.replace(TRAIN, accumulate=n), model) for n in (1, 4))
    weights = sum(4 * x.size for x in jax.tree.leaves(init_state(MODEL, TRAIN).params))
    assert four.cost.bytes_per_device - one.cost.bytes_per_device < weights / 4


def test_a_step_of_microbatches_on_a_mesh_is_that_of_one_device():
    train = dataclasses.replace(TRAIN, accumulate=4)
    plan, batch = planned(train), random_batch(MODEL, 0)
    state = init_state(MODEL, train)
    after, got = run_step(plan, state, batch)
    single, want = jax.jit(make_train_step(MODEL, train))(state, batch)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    np.testing.assert_allclose(got.grad_norm, want.grad_norm, rtol=1e-4)
    assert_same_counts(got.encoder, want.encoder)
    for a, b in zip(*map(jax.tree.leaves, (after.params, single.params)), strict=True):
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b))) <= 1e-4 * np.abs(b).max()


def test_microbatches_divide_the_groups():
    with pytest.raises(SbpError, match="accumulate is 3; it must divide the 8 groups"):
        make_train_step(MODEL, dataclasses.replace(TRAIN, accumulate=3))


def test_adamw_is_optaxs():
    train = dataclasses.replace(
        TRAIN, optimizer="adamw", schedule="constant", learning_rate=1e-3, weight_decay=0.1
    )
    plan, batch = planned(train), random_batch(MODEL, 0)
    state = init_state(MODEL, train)
    after, _ = run_step(plan, state, batch)
    grads = gradients_of_the_first_step()
    peer = optax.adamw(1e-3, 0.9, 0.98, weight_decay=0.1)
    updates, _ = peer.update(grads, peer.init(state.params), state.params)
    # The rate of a step is that of the ramp's end here: the preset has no ramp.
    want = optax.apply_updates(state.params, updates)
    for a, b, g in zip(*map(jax.tree.leaves, (after.params, want, grads)), strict=True):
        # Where a gradient is rounding noise, so is the sign of AdamW's first update.
        clear = np.abs(g) > 1e-3 * np.abs(g).max()
        np.testing.assert_allclose(np.asarray(a)[clear], np.asarray(b)[clear], rtol=1e-4, atol=1e-6)
