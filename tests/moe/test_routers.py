"""Routers against loops over tokens that follow the text of their papers, and laws that hold for
all routers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gshard.presets import preset
from sbp.moe.config import ModelConfig
from sbp.moe.layers import expert_capacity, gate
from sbp.moe.routers import ROUTERS
from sbp.moe.step import init_state, make_train_step
from tests.moe import loops
from tests.moe.steps import routed
from tests.moe.test_model import random_batch
from tests.same import refused
from tests.slices import sliced

SIZES = [(24, 5, 4), (16, 2, 1), (40, 16, 5), (8, 3, 8)]
"""Tokens of a group, experts, capacity."""


def case(name, seed, size=24, experts=5):
    """Keyword arguments of `routed`, for 3 groups: logits, a mask, and what the router has
    besides."""
    rng = np.random.default_rng(seed)
    shape = (3, size, experts)
    made: dict[str, Any] = {
        "logits": (2 * rng.standard_normal(shape)).astype(np.float32),
        "mask": rng.random(shape[:2]) < 0.8,
    }
    if name == "noisy_top_k":
        made["noise"], made["rnd"] = rng.standard_normal((2, *shape)).astype(np.float32)
    if name == "sigmoid":
        made["bias"] = rng.uniform(-0.3, 0.3, experts).astype(np.float32)
    if name == "top2":
        made["rnd"] = rng.random(shape[:2]).astype(np.float32)
    return made


def of_group(made, g):
    """The arguments of one group, in float64."""
    arrays = {f: v[g] for f, v in made.items() if f in ("logits", "noise", "rnd") and v is not None}
    return made | {f: v.astype(np.float64) for f, v in arrays.items()} | {"mask": made["mask"][g]}


EVALUATED: dict[str, Any] = {"rnd": None}
"""Without the random numbers of training."""

TOP2 = [
    ("top2", 2, sizes, options)
    for options in ({}, {"counter": "paper"}, EVALUATED)
    for sizes in [(24, 5, 4), (24, 5, 24), (16, 2, 1), (40, 16, 5), (8, 3, 2)]
]
CASES = [
    *sliced(TOP2, 2 / 5, seed=2),
    ("top2", 2, SIZES[0], {"normalise": "after"}),
    *(("switch", 1, sizes, {}) for sizes in SIZES),
    *(("expert_choice", 2, sizes, {}) for sizes in SIZES),
    *((name, k, SIZES[0], {}) for name in ("top_k", "mixtral", "sigmoid") for k in (1, 2, 3, 5)),
    *((name, 2, SIZES[2], {}) for name in ("top_k", "mixtral", "sigmoid")),
    *(("top_k", k, SIZES[0], {"normalise": how}) for k in (2, 3) for how in ("after", "none")),
    *(("noisy_top_k", k, SIZES[0], {}) for k in (1, 2, 4)),
    ("noisy_top_k", 2, SIZES[0], EVALUATED),
]
RANKS = slice(1), slice(1, None)
"""The first choice, and later ones."""


@pytest.mark.laws
@pytest.mark.parametrize(("name", "k", "sizes", "options"), CASES)
def test_equals_a_loop_over_tokens(name, k, sizes, options):
    """G1, G2, G6, G7, G9, G10, G12, G14, G15, G16: slots and counts exactly, weights and losses to
    1e-5. The loops take each group by itself, and skip padding."""
    size, experts, capacity = sizes
    for seed in range(4 if name == "top2" else 2):
        made = {**case(name, seed, size, experts), **options}
        always: dict[str, Any] = {"aux_scale": "lingvo", "router_z_loss": 0.1}
        got = routed(capacity=capacity, router=name, experts_per_token=k, **always, **made)
        found = [loops.looped(name, capacity=capacity, k=k, **of_group(made, g)) for g in range(3)]
        for g, want in enumerate(found):
            np.testing.assert_array_equal(got.dispatch[g], want.dispatch)
            np.testing.assert_allclose(got.combine[g], want.combine, atol=1e-6)
        np.testing.assert_allclose(
            got.losses.balance, np.mean([want.loss for want in found]), rtol=1e-5
        )
        logits, mask = made["logits"].astype(np.float64), made["mask"]
        squares = np.log(np.exp(logits).sum(-1)) ** 2
        z = np.mean([rows[real].mean() for rows, real in zip(squares, mask, strict=True)])
        np.testing.assert_allclose(got.losses.z, z, rtol=1e-5)
        shares = loops.softmaxes(logits[mask])
        m = got.metrics
        np.testing.assert_allclose(m.entropy, -(shares * np.log(shares)).sum(), rtol=1e-5)
        first, later = (sum(sum(w.dropped[ranks]) for w in found) for ranks in RANKS)
        skipped = sum(want.skipped for want in found)
        counts = [m.dropped_first, m.dropped_second, m.skipped_second, m.tokens]
        np.testing.assert_array_equal(counts, [first, later, skipped, mask.sum()])
        np.testing.assert_array_equal(m.load, np.asarray(got.dispatch).sum((0, 1, 3)))
        if name != "expert_choice":
            assert float(m.demand.sum()) == k * mask.sum() - skipped
            assert float(m.demand.sum()) == float(m.load.sum()) + first + later


def test_first_choices_outrank_second_ones():
    """G4: token 0 wants expert 0 then 1, token 1 expert 1 then 0. With one slot each, a token-major
    order would give both to token 0."""
    dispatch = routed([[[2.0, 1.0], [1.0, 2.0]]], 1).dispatch[0, :, :, 0]
    np.testing.assert_array_equal(dispatch, [[1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("size", "experts", "factor", "choices", "rounding", "slots"),
    [
        (1024, 2048, 1.0, 2, "floor", 1),
        (8, 2, 4.0, 2, "floor", 8),
        (100, 16, 1.0, 2, "floor", 12),
        (100, 16, 1.0, 2, "ceil", 13),
        (100, 16, 1.0, 2, "round", 12),
        (96, 64, 1.0, 2, "floor", 3),
        (96, 64, 1.0, 2, "ceil", 3),
        (1024, 2048, 1.0, 2, "round", 1),
        (1024, 2048, 1.0, 1, "ceil", 1),
        (100, 10, 1.1, 1, "ceil", 11),
        (100, 1000, 2.9, 100, "floor", 29),
    ],
)
def test_rounding_of_the_capacity(size, experts, factor, choices, rounding, slots):
    """G3, B1: the golden table; 1.1 * 100 / 10 is 11 slots, not the 12 of floating point."""
    assert expert_capacity(size, experts, factor, choices=choices, rounding=rounding) == slots


EVEN = np.stack([np.roll([3.0, 1.0, -2.0, -4.0], s) for s in range(8)])[None].astype(np.float32)


@pytest.mark.parametrize(
    ("name", "k", "scale", "loss"),
    [
        ("top2", 2, "lingvo", 1),
        ("top2", 2, "paper", 1 / 16),
        ("switch", 1, "lingvo", 1),
        ("top_k", 2, "lingvo", 1),
        ("top_k", 3, "lingvo", 1),
        ("mixtral", 2, "lingvo", 1),
        ("noisy_top_k", 2, "lingvo", 0),
    ],
)
def test_losses_of_an_even_load(name, k, scale, loss):
    """G7, G14, B9: shares add up to 1, not to k; equal importance does not vary."""
    found = routed(
        EVEN,
        8,
        noise=EVEN if name == "noisy_top_k" else None,
        router=name,
        experts_per_token=k,
        aux_scale=scale,
    )
    np.testing.assert_allclose(found.losses.balance, loss, rtol=1e-6, atol=1e-6 * (loss == 0))
    assert found.losses.z == 0


def test_the_auxiliary_loss_evens_out_the_load():
    """M12, its load: tokens that prefer one expert spread over all by descent on the auxiliary loss
    alone. Steps with its sign turned make the load less even."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 64, 8)) + 1, jnp.float32)

    def unevenness(w):
        """The coefficient of variation of the first choices."""
        load = np.bincount(np.argmax(np.asarray(x) @ np.asarray(w), -1).ravel(), minlength=6)
        return load.std() / load.mean()

    slope = jax.jit(jax.grad(lambda w: routed(jnp.einsum("gsm,me->gse", x, w), 128).losses.balance))
    first = jnp.asarray(rng.standard_normal((8, 6)) / 2, jnp.float32)
    found = {}
    for way in (1, -1):
        w = first
        for _ in range(200):
            w = w - way * 0.3 * slope(w)
        found[way] = unevenness(w)
    assert found[1] < 0.5 * unevenness(first) < unevenness(first) < found[-1]


def test_a_training_step_moves_biases_by_the_load_alone():
    """Neither weight decay nor a gradient changes a bias. Each step moves it by the rate, towards
    the mean load."""
    shown = preset("tiny-test")
    model = dataclasses.replace(shown.model, router="sigmoid", router_bias_rate=0.25, remat=False)
    train = dataclasses.replace(shown.train, optimizer="adamw", weight_decay=0.5)
    state = init_state(model, train)
    step = jax.jit(make_train_step(model, train))
    want = {side: np.zeros((1, 8)) for side in ("encoder", "decoder")}
    for seed in range(2):
        state, metrics = step(state, random_batch(model, seed))
        for side, bias in want.items():
            demand = np.asarray(getattr(metrics, side).demand)
            bias += 0.25 * np.sign(demand.mean(-1, keepdims=True) - demand)
            np.testing.assert_array_equal(state.params[side]["moe"]["bias"], bias)
            assert np.any(bias)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: expert_capacity(512, 2048), "no slot"),
        (lambda: expert_capacity(8, 2, rounding="up"), '`rounding` must be one of "floor", "ceil"'),
        (lambda: routed(jnp.zeros((1, 4, 2)), 0), "at least one slot"),
    ],
)
def test_capacity_of_nothing_is_refused(call, said):
    refused(said, call)


def test_a_group_of_padding_alone_is_finite():
    got = routed(jnp.zeros((1, 4, 3)), 2, mask=jnp.zeros((1, 4), bool))
    assert float(got.losses.balance) == 0 and (np.asarray(got.combine) == 0).all()


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_equal_finite_differences(name):
    """G8: of the weights and of the losses, by the logits."""
    with jax.enable_x64(True):
        made = {f: v.astype(np.float64) if f != "mask" else v for f, v in case(name, 6).items()}
        shape = made["logits"].shape
        rng = np.random.default_rng(2)
        probe = jnp.asarray(rng.standard_normal((*shape, 4)))

        def value(logits):
            got = routed(
                capacity=4,
                router=name,
                aux_scale="lingvo",
                router_z_loss=0.1,
                **{**made, "logits": logits},
            )
            return jnp.sum(got.combine * probe) + got.losses.balance + got.losses.z

        slope = np.asarray(jax.grad(value)(jnp.asarray(made["logits"])))
        assert slope.dtype == np.float64
        for _ in range(3):
            way = rng.standard_normal(shape)
            ahead, behind = (float(value(made["logits"] + h * way)) for h in (1e-6, -1e-6))
            np.testing.assert_allclose(
                np.sum(slope * way), (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8
            )


ROWS = [(1e4, -1e4, -1e4), (-1e4, 1e4, 0.0), (0.0, 0.0, 0.0), (-1e4, 3e4, 3e4), (-1e4,) * 3]


@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "expert_choice"])
@pytest.mark.parametrize("row", ROWS)
def test_saturated_and_tied_gates(name, row):
    """G11: different experts, of equal ones the lowest indices, and nothing that is not finite."""
    extra: dict[str, Any] = (
        {"noise": np.asarray([[row]], np.float32)} if name == "noisy_top_k" else {}
    )
    if name == "sigmoid":
        extra["bias"] = np.zeros(3, np.float32)

    def of(logits):
        return routed(logits, 2, router=name, aux_scale="lingvo", router_z_loss=0.1, **extra)

    logits = jnp.asarray([[row]], jnp.float32)
    scores = np.asarray(jax.nn.sigmoid(logits))[0, 0] if name == "sigmoid" else np.asarray(row)
    got, k = of(logits), ROUTERS[name].choices
    taken = np.asarray(got.dispatch).sum(-1)[0, 0]
    assert taken.nonzero()[0].tolist() == sorted(loops.ordered(scores)[:k])
    slopes = jax.grad(lambda x: of(x).combine.sum() + sum(of(x).losses))(logits)
    for value in (*jax.tree.leaves(got), slopes):
        assert np.isfinite(value).all()


def test_expert_choice_of_saturated_and_tied_gates():
    """G11: the earliest of equal tokens, and each token in a slot of its own."""
    logits = np.tile(np.asarray(ROWS[:4], np.float32), (2, 1, 1))
    got = routed(logits, 2, router="expert_choice")
    for g in range(2):
        want = loops.expert_choice(logits[g].astype(np.float64), np.ones(4, bool), 2)
        np.testing.assert_array_equal(got.dispatch[g], want[1])
    assert np.isfinite(got.combine).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_router_is_float32_in_a_16_bit_model(dtype):
    """G13: the two experts of each token are those of float64; a 16-bit router has others."""
    cfg = ModelConfig(experts=32, dtype=dtype, eval_capacity_factor_per_choice=32.0)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 512, 64)), dtype)
    params = {"gate": jnp.asarray(rng.uniform(-0.2, 0.2, (64, 32)), dtype)}
    exact = np.asarray(x, np.float64) @ np.asarray(params["gate"], np.float64)
    want = np.sort(np.argsort(-exact, -1)[..., :2])
    taken = gate(params, x, jnp.ones((2, 512), bool), cfg).taken
    np.testing.assert_array_equal(np.sort(np.argsort(-np.asarray(taken), -1)[..., :2]), want)
    low = np.asarray(jnp.einsum("gsm,me->gse", x, params["gate"]), np.float32)
    assert (np.sort(np.argsort(-low, -1)[..., :2]) != want).any()
