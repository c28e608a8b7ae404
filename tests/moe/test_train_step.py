"""The training step: gradients that are not finite, norms of gradients, microbatches, the dtype of
each computation, optimizers and schedules."""

import dataclasses
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sbp
from sbp.moe.config import TrainConfig
from sbp.moe.layers import attention, keys_values, rms_norm
from sbp.moe.model import init_params, loss_fn
from sbp.moe.step import (
    SCHEDULES,
    adafactor,
    gradients,
    init_state,
    make_train_step,
    round_at_random,
    sqrt_decay,
)
from tests.moe.steps import planned_step, run_step
from tests.moe.test_model import MODEL, TRAIN, random_batch
from tests.same import assert_close, equations_in, refused

MIXED = dataclasses.replace(MODEL, dtype="bfloat16")

planned = lambda train, model=MODEL: planned_step(model, train, (("data", 2), ("expert", 4)))


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
    return math.sqrt(
        sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(tree))
    )


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
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.params, after.optimizer),
        (state.params, state.optimizer),
    )


def test_a_finite_step_reports_the_norm_of_the_whole_gradient(plan):
    state, batch = init_state(MODEL, TRAIN), random_batch(MODEL, 0)
    after, metrics = run_step(plan, state, batch)
    assert float(metrics.skipped_step) == 0.0
    np.testing.assert_allclose(metrics.grad_norm, norm_of(gradients_of_the_first_step()), rtol=1e-4)
    assert all(
        np.any(a != b)
        for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True)
    )


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
    """The gradients of a batch whose first group has padding only. There is no random routing and
    no dropout, since their draws would differ."""
    with jax.enable_x64(True):
        model = dataclasses.replace(MODEL, dtype="float64")
        params = init_params(jax.random.key(0), model)
        batch = jax.tree.map(lambda x: jnp.asarray(x).at[0].set(0), random_batch(model, 3))
        step = jax.jit(lambda p: gradients(p, batch, model, microbatches=microbatches))
        return jax.device_get(step(params))


@pytest.mark.parametrize("microbatches", [2, 8])
def test_microbatches_add_up_to_the_batch(microbatches):
    """Microbatches have unlike numbers of real tokens here."""
    want, metrics = gradients_of_a_batch(1)
    got, sums = gradients_of_a_batch(microbatches)
    assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert_close(sums, metrics, rtol=1e-9, atol=0)


def test_gradients_of_microbatches_are_reduced_once():
    """Four microbatches of the same tokens send what one batch does; with a reduction in each, they
    would send three times the gradients more."""
    model = dataclasses.replace(MODEL, groups=32)
    one, four = (planned(dataclasses.replace(TRAIN, accumulate=n), model) for n in (1, 4))
    weights = sum(4 * x.size for x in jax.tree.leaves(init_state(MODEL, TRAIN).params))
    assert four.cost.bytes_per_device - one.cost.bytes_per_device < weights / 4


def test_microbatches_divide_the_groups():
    refused(
        "accumulate is 3; it must divide the 8 groups",
        make_train_step,
        MODEL,
        dataclasses.replace(TRAIN, accumulate=3),
    )


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


dtypes = lambda tree: {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(MIXED, "float32"), (dataclasses.replace(MODEL, dtype="float64"), "float64")],
)
def test_parameters_statistics_and_losses_have_the_dtype_of_the_policy(model, dtype):
    with jax.enable_x64(dtype == "float64"):
        state = jax.eval_shape(lambda: init_state(model, TRAIN))
        after, metrics = jax.eval_shape(make_train_step(model, TRAIN), state, random_batch(model))
    for one in (state, after):
        assert dtypes(one.params) == {dtype}
        assert dtypes(one.optimizer) - {"int32", "int64"} == {dtype}
    assert dtypes((metrics.loss, metrics.nll, metrics.aux)) == {dtype}


def test_products_take_bfloat16_alone():
    """All products of the forward pass but those of the two routers, tokens times [M, E]."""
    params, batch = init_params(jax.random.key(0), MIXED), random_batch(MIXED)
    found = [
        [v.aval for v in (*equation.invars, *equation.outvars)]
        for equation in equations_in(jax.make_jaxpr(lambda p: loss_fn(p, batch, MIXED)[0])(params))
        if equation.primitive.name == "dot_general"
    ]
    short = [avals for avals in found if {a.dtype for a in avals[:2]} == {jnp.dtype("bfloat16")}]
    others = [avals for avals in found if avals not in short]
    # Of a pair of layers 4 x 6 products of attention, with cross-attention twice as many, two of
    # the dense layer, four of the MoE layer besides the router's; and the logits.
    assert len(short) == 2 * 6 + 4 * 6 + 2 * (2 + 4) + 1
    assert [[a.dtype for a in avals] for avals in others] == [[jnp.float32] * 3] * 2
    assert all(avals[2].shape[-1] == MIXED.experts for avals in others)


def test_a_norm_of_bfloat16_has_the_statistic_of_float64():
    """A sum of 4096 squares in bfloat16 would stop growing at 256 of them."""
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16).at[0, 0].set(5.0)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt(np.mean(wide**2) + 1e-6)
    np.testing.assert_allclose(
        np.asarray(rms_norm(x, jnp.ones(4096)), np.float64), want, rtol=2**-8
    )


def test_softmax_of_bfloat16_sums_to_one_over_many_places():
    """Equal scores over 2048 places: each weight is 2**-11, and values are found again."""
    eye = jnp.ones((1, 1, 1), jnp.bfloat16)
    params: dict[str, jax.Array] = {name: eye for name in ("query", "key", "value", "output")}
    x = jnp.zeros((1, 1, 1), jnp.bfloat16)
    memory = keys_values(params, jnp.ones((1, 2048, 1), jnp.bfloat16), 1)
    allowed = jnp.ones((1, 1, 1, 2048), bool)
    np.testing.assert_allclose(
        float(attention(params, x, memory, allowed)[0, 0, 0]), 1.0, rtol=2**-7
    )


@cache
def moved(model, steps=3):
    """The part of the weights of dense layers that a very small rate changes."""
    train = dataclasses.replace(TRAIN, learning_rate=2e-4, warmup_steps=1, ramp_steps=0)
    step, state = jax.jit(make_train_step(model, train)), init_state(model, train)
    before = np.asarray(state.params["encoder"]["dense"]["w_in"], np.float32)
    for seed in range(steps):
        state, metrics = step(state, random_batch(model, seed))
        assert float(metrics.skipped_step) == 0
    after = state.params["encoder"]["dense"]["w_in"]
    assert after.dtype == model.weight_dtype
    return float(np.mean(np.asarray(after, np.float32) != before))


def test_small_updates_move_masters_of_float32_and_not_those_of_bfloat16():
    short = dataclasses.replace(MIXED, param_dtype="bfloat16")
    assert moved(MIXED) > 0.95 and moved(short) < 0.3
    assert moved(short) < moved(dataclasses.replace(short, rounding="stochastic"))


def test_gradients_of_microbatches_are_added_in_float32():
    short = dataclasses.replace(MIXED, param_dtype="bfloat16")
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), short))
    grads, _ = jax.eval_shape(
        lambda p: gradients(p, random_batch(short), short, microbatches=4), params
    )
    assert dtypes(grads) == {"float32"}


def test_rounding_at_random_is_right_in_the_mean_and_never_further_than_one_step():
    x = jnp.asarray([1.0 + 2**-10, -3.0 - 2**-9, 2.0**-130, 0.0, 1.5, 255.9], jnp.float32)
    like = jnp.zeros(len(x), jnp.bfloat16)
    draws = jax.vmap(lambda k: round_at_random(k, x, like))(
        jax.random.split(jax.random.key(0), 40_000)
    )
    assert draws.dtype == jnp.bfloat16
    wide = np.asarray(draws, np.float64)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(np.asarray(x, np.float64)), 1e-300))) - 7)
    assert (np.abs(wide - np.asarray(x, np.float64)) < step).all()
    np.testing.assert_allclose(
        wide.mean(axis=0), np.asarray(x, np.float64), atol=float(step.max()) * 0.01
    )
    assert (wide[:, 4] == 1.5).all()  # what bfloat16 has stays


def test_rounding_keeps_what_is_not_finite_and_other_dtypes():
    x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 3.39e38], jnp.float32)
    got = np.asarray(round_at_random(jax.random.key(0), x, jnp.zeros(4, jnp.bfloat16)), np.float32)
    assert got[0] == np.inf and got[1] == -np.inf and np.isnan(got[2])
    many = jnp.full(100_000, 3.39e38, jnp.float32)  # above the largest number of bfloat16
    assert np.isfinite(round_at_random(jax.random.key(0), many, many.astype(jnp.bfloat16))).all()
    assert round_at_random(jax.random.key(0), x, x) is x


def test_rounding_draws_the_same_bits_on_every_mesh():
    x = {"a": drawn(8, 6), "b": drawn(24, seed=1)}
    like = jax.tree.map(lambda v: v.astype(jnp.bfloat16), x)
    key = jax.random.key(3)
    want = jax.jit(round_at_random)(key, x, like)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (want, like)), strict=True))
    for sizes in ((8,), (2, 4)):
        names = ("data", "expert")[: len(sizes)]
        split = " ".join(f"{name}:S(0)" for name in names)
        types = (None, split, split)
        got = sbp.jit(round_at_random, sbp.make_mesh(sizes, names), in_types=types)(key, x, like)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_step_of_bfloat16_masters_is_the_same_on_a_mesh():
    """Rounding draws the same bits on every mesh, so weights differ where sums do: rarely."""
    model = dataclasses.replace(MODEL, param_dtype="bfloat16", rounding="stochastic")
    plan = planned(TRAIN, model)
    state, batch = init_state(model, TRAIN), random_batch(model, 0)
    got, _ = run_step(plan, state, batch)
    want, _ = jax.jit(make_train_step(model, TRAIN))(state, batch)
    pairs = [
        (np.asarray(a), np.asarray(b))
        for a, b in zip(*map(jax.tree.leaves, (got.params, want.params)), strict=True)
        if a.dtype == jnp.bfloat16
    ]
    assert np.mean(np.concatenate([(a == b).ravel() for a, b in pairs])) > 0.98


def test_the_policy_is_said():
    assert MIXED.precision == (
        "activations and products bfloat16; norms, softmax, router, loss and optimiser float32;"
        " parameters float32"
    )


def updated(optimizer, params, grads) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after gradients, one after the other."""
    state = optimizer.init(params)
    for g in grads:
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def drawn(*shape, seed=9):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("lead", "shape"),
    [
        ((), (160, 130)),
        ((), (130,)),
        ((), (4, 130)),
        ((3,), (20, 24)),
        ((3, 2), (20, 24)),
    ],
)
def test_adafactor_is_optaxs_on_each_matrix(lead, shape):
    """M3: stacked weights are optimised one by one."""
    schedule, smallest = sqrt_decay(0.5, 4), 16 if lead else 128
    w, *grads = (drawn(*lead, *shape, seed=seed) for seed in (9, 0, 1, 2))
    ours = adafactor({"w": len(lead)}, schedule, min_dim_to_factor=smallest)
    got, state = updated(ours, {"w": w}, [{"w": g} for g in grads])
    assert state.updates == 3
    if lead:
        assert (state.v_row["w"].shape, state.v_col["w"].shape) == ((*lead, 20), (*lead, 24))
    theirs = optax.adafactor(schedule, min_dim_size_to_factor=smallest)
    for index in np.ndindex(*lead):
        want, _ = updated(theirs, w[index], [g[index] for g in grads])
        np.testing.assert_allclose(got["w"][index], want, rtol=1e-6)


def test_more_experts_than_width_is_not_factored_over_experts():
    """Optax by itself would."""
    optimizer = adafactor({"w": 1}, sqrt_decay(), min_dim_to_factor=16)
    assert optimizer.init({"w": drawn(40, 20, 24)}).v_row["w"].shape == (40, 20)


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
        TrainConfig(),
        schedule=name,
        learning_rate=5.0,
        warmup_steps=100,
        ramp_steps=10,
        steps=100,
    )
    for step, rate in rates.items():
        assert float(SCHEDULES[name](train)(step)) == pytest.approx(rate, rel=1e-5, abs=1e-6)


def test_the_papers_schedule():
    """M4: the appendix's numbers."""
    rate = sqrt_decay()
    for step, value in ((1, 0.01), (10_000, 0.01), (40_000, 0.005), (1_000_000, 0.001)):
        np.testing.assert_allclose(rate(step), value, rtol=1e-6)
