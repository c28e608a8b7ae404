"""What computes in which dtype: against float64, and where 16 bits would lose."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from examples.gshard.presets import preset
from sbp.moe.attention import attention, keys_values
from sbp.moe.layers import rms_norm
from sbp.moe.model import init_params, loss_fn
from sbp.moe.step import gradients, init_state, make_train_step, round_at_random
from tests.moe.steps import planned_step, run_step
from tests.moe.test_model import random_batch

MODEL, TRAIN = preset("tiny-test").model, preset("tiny-test").train
MIXED = dataclasses.replace(MODEL, dtype="bfloat16")
AXES = (("data", 2), ("expert", 4))


def dtypes(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


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
    found = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.append([v.aval for v in (*equation.invars, *equation.outvars)])
            for sub in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")
            ):
                if hasattr(sub, "jaxpr"):
                    look(sub.jaxpr)

    look(jax.make_jaxpr(lambda p: loss_fn(p, batch, MIXED)[0])(params).jaxpr)
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


def test_the_loss_of_mixed_precision_is_that_of_float64_within_bfloat16():
    batch = random_batch(MODEL, 1)
    params = init_params(jax.random.key(0), MIXED)
    mixed, _ = jax.jit(lambda p: loss_fn(p, batch, MIXED))(params)
    with jax.enable_x64(True):
        wide = dataclasses.replace(MODEL, dtype="float64")
        exact = jax.tree.map(lambda w: jnp.asarray(np.asarray(w), jnp.float64), params)
        want, _ = jax.jit(lambda p: loss_fn(p, batch, wide))(exact)
    assert float(mixed) != float(want)
    np.testing.assert_allclose(float(mixed), float(want), rtol=0.02)


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
    assert moved(MIXED) > 0.95
    assert moved(short) < 0.3
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
    rng = np.random.default_rng(0)
    x = {"a": rng.standard_normal((8, 6)), "b": rng.standard_normal(24)}
    x = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), x)
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
    plan = planned_step(model, TRAIN, AXES)
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
