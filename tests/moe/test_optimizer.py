"""Adafactor against optax and against one run per expert; the schedule against the paper's
numbers."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sbp.moe.config import TrainConfig
from sbp.moe.step import SCHEDULES, adafactor, sqrt_decay


def steps(optimizer: Any, params: Any, seeds: Any = range(3)) -> tuple[Any, Any]:
    state = optimizer.init(params)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        grads = jax.tree.map(
            lambda w, rng=rng: jnp.asarray(rng.standard_normal(w.shape), w.dtype), params
        )
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def weights(*shape):
    return jnp.asarray(np.random.default_rng(9).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("shape", [(160, 130), (130,), (4, 130)])
def test_equals_optax_on_one_matrix(shape):
    schedule = sqrt_decay(1.0, 10)
    ours, state = steps(adafactor({"w": 0}, schedule), {"w": weights(*shape)})
    theirs, _ = steps(optax.adafactor(schedule), {"w": weights(*shape)})
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=1e-6)
    assert state.updates == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_stacked_weights_are_optimised_one_by_one(depth):
    lead = (3, 2)[:depth]
    schedule = sqrt_decay(0.5, 4)
    w = weights(*lead, 20, 24)
    optimizer = adafactor({"w": depth}, schedule, min_dim_to_factor=16)
    grads = [np.random.default_rng(s).standard_normal(w.shape).astype(np.float32) for s in range(3)]
    params: Any = {"w": w}
    state = optimizer.init(params)
    assert state.v_row["w"].shape == (*lead, 20) and state.v_col["w"].shape == (*lead, 24)
    for g in grads:
        updates, state = optimizer.update({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
    single = optax.adafactor(schedule, min_dim_size_to_factor=16)
    for index in np.ndindex(*lead):
        one: Any = w[index]
        one_state = single.init(one)
        for g in grads:
            update, one_state = single.update(jnp.asarray(g[index]), one_state, one)
            one = optax.apply_updates(one, update)
        np.testing.assert_allclose(params["w"][index], one, rtol=1e-6)


def test_more_experts_than_width_is_not_factored_over_experts():
    w = weights(40, 20, 24)
    state = adafactor({"w": 1}, sqrt_decay(), min_dim_to_factor=16).init({"w": w})
    assert state.v_row["w"].shape == (40, 20)
    plain: Any = optax.scale_by_factored_rms(min_dim_size_to_factor=16).init({"w": w})
    assert plain.v_row["w"].shape == (
        20,
        24,
    ), "optax factors over the experts here: the pitfall that ours avoids"


def test_textbook_update():
    w = np.asarray(weights(20, 24), np.float64)
    g = np.random.default_rng(1).standard_normal((20, 24))
    got, _ = steps(
        adafactor({"w": 0}, lambda _: jnp.float32(0.1), min_dim_to_factor=16),
        {"w": weights(20, 24)},
        [1],
    )
    row, col = (g**2 + 1e-30).mean(1), (g**2 + 1e-30).mean(0)
    u = g / np.sqrt(np.outer(row, col) / row.mean())
    u /= max(1.0, np.sqrt((u**2).mean()))
    np.testing.assert_allclose(got["w"], w - 0.1 * max(np.sqrt((w**2).mean()), 1e-3) * u, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("constant", {0: 0.5, 4: 2.5, 9: 5.0, 50: 5.0}),
        ("linear", {0: 0.5, 9: 5 * 0.91, 50: 2.5, 100: 0.0}),
        ("cosine", {25: 5 * (1 + math.cos(math.pi / 4)) / 2, 50: 2.5, 100: 0.0}),
        ("sqrt_decay", {0: 0.05, 4: 0.25, 9: 0.5, 24: 0.5, 99: 0.5, 400: 0.25}),
    ],
)
def test_schedules(name, rates):
    """M4, and the other schedules, with a ramp of ten steps."""
    train = dataclasses.replace(
        TrainConfig(), schedule=name, learning_rate=5.0, warmup_steps=100, ramp_steps=10, steps=100
    )
    for step, rate in rates.items():
        assert float(SCHEDULES[name](train)(step)) == pytest.approx(rate, rel=1e-5, abs=1e-6)


def test_the_papers_schedule():
    """M4: the appendix's numbers."""
    rate = sqrt_decay()
    for step, value in ((1, 0.01), (10_000, 0.01), (40_000, 0.005), (1_000_000, 0.001)):
        np.testing.assert_allclose(rate(step), value, rtol=1e-6)
