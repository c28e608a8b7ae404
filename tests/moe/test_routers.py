"""Routers against loops over tokens, and what holds of all of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gshard.config import override
from examples.gshard.presets import preset
from sbp.errors import SbpError
from sbp.moe.config import ModelConfig
from sbp.moe.gating import expert_capacity, gate
from sbp.moe.routers import ROUTERS, balanced_bias
from sbp.moe.step import init_state, make_train_step
from tests.moe import loops
from tests.moe.routing import routed
from tests.moe.test_model import random_batch

SIZES = [(24, 5, 4), (16, 2, 1), (40, 16, 5), (8, 3, 8)]


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


def loop(name, made, g, capacity, k):
    """The loop of one group."""
    logits, mask = made["logits"][g].astype(np.float64), made["mask"][g]
    match name:
        case "switch" | "expert_choice":
            return getattr(loops, name)(logits, mask, capacity)
        case "noisy_top_k":
            noise, normal = (made[n][g].astype(np.float64) for n in ("noise", "rnd"))
            return loops.noisy_top_k(logits, mask, capacity, k, noise, normal)
        case "sigmoid":
            return loops.sigmoid(logits, mask, capacity, k, made["bias"].astype(np.float64))
        case _:
            return getattr(loops, name)(logits, mask, capacity, k)


CASES = [
    *(("switch", 1, *sizes) for sizes in SIZES),
    *(("expert_choice", 2, *sizes) for sizes in SIZES),
    *((name, k, *SIZES[0]) for name in ("top_k", "mixtral", "sigmoid") for k in (1, 2, 3, 5)),
    *((name, 2, *SIZES[2]) for name in ("top_k", "mixtral", "sigmoid")),
    *(("noisy_top_k", k, *SIZES[0]) for k in (1, 2, 4)),
]


@pytest.mark.parametrize(("name", "k", "size", "experts", "capacity"), CASES)
def test_equals_a_loop_over_tokens(name, k, size, experts, capacity):
    """G14, G15, G16: slots and counts exactly, weights and losses to 1e-5."""
    for seed in range(2):
        made = case(name, seed, size, experts)
        got = routed(
            capacity=capacity, router=name, experts_per_token=k, aux_scale="lingvo", **made
        )
        auxes, missed = [], 0
        for g in range(3):
            combine, dispatch, aux, dropped = loop(name, made, g, capacity, k)
            np.testing.assert_array_equal(got.dispatch[g], dispatch)
            np.testing.assert_allclose(got.combine[g], combine, atol=1e-6)
            auxes.append(aux)
            missed += dropped
        np.testing.assert_allclose(got.aux, np.mean(auxes), rtol=1e-5)
        m = got.metrics
        assert float(m.dropped_first + m.dropped_second) == missed
        np.testing.assert_array_equal(m.load, np.asarray(got.dispatch).sum((0, 1, 3)))
        if name != "expert_choice":
            assert float(m.demand.sum()) == k * made["mask"].sum() == float(m.load.sum()) + missed


@pytest.mark.parametrize("normalise", ["before", "after", "none"])
@pytest.mark.parametrize("k", [2, 3])
def test_weights_are_divided_by_their_sum_before_or_after_capacity(normalise, k):
    """G9: before, rows add up to 1 where all choices are kept and to less elsewhere; after, to 1 or
    0; without, weights are the softmax's."""
    made = case("top_k", 4)
    made["mask"][:] = True
    capacity = 4 * k
    options = {"router": "top_k", "experts_per_token": k, "normalise": normalise}
    got = routed(capacity=capacity, **options, **made)
    for g in range(3):
        logits, mask = made["logits"][g].astype(np.float64), made["mask"][g]
        want = loops.top_k(logits, mask, capacity, k, normalise)
        np.testing.assert_allclose(got.combine[g], want[0], atol=1e-6)
    rows, kept = np.asarray(got.combine).sum((2, 3)), np.asarray(got.dispatch).sum((2, 3))
    assert 0 < (kept < k).mean() < 1
    if normalise == "before":
        np.testing.assert_allclose(rows[kept == k], 1, rtol=1e-6)
        assert (rows[kept < k] < 0.999).all()
    if normalise == "after":
        np.testing.assert_allclose(rows, kept > 0, rtol=1e-6)


def test_top2_normalised_after_random_routing():
    """G9: a second choice that random routing left out leaves all weight to the first."""
    made = case("top2", 2)
    got = routed(capacity=24, normalise="after", **made)
    rows, kept = np.asarray(got.combine).sum((2, 3)), np.asarray(got.dispatch).sum((2, 3))
    np.testing.assert_allclose(rows, made["mask"], rtol=1e-6)
    assert set(kept[made["mask"]]) == {1, 2}


def test_two_of_top_k_are_gshards():
    """G4, G16: general top-k with two choices, Mixtral and GShard without random routing agree."""
    made = case("top_k", 8, size=40, experts=8)
    want = routed(capacity=7, **made)
    for name in ("top_k", "mixtral"):
        got = routed(capacity=7, router=name, **made)
        np.testing.assert_array_equal(got.dispatch, want.dispatch)
        np.testing.assert_allclose(got.combine, want.combine, atol=1e-6)


def test_switch_keeps_the_ceiling_of_its_capacity():
    """G15, K20: counted from 0, a capacity of 2.5 keeps 3 tokens of an expert, not 2."""
    cfg = ModelConfig(router="switch", experts=8)
    capacity = expert_capacity(
        16, 8, 1.25, choices=cfg.choices, rounding=ROUTERS["switch"].rounding
    )
    assert capacity == 3
    logits = np.tile(np.asarray([0, 0, 9, 0, 0, 0, 0, 0], np.float32), (2, 16, 1))
    got = routed(logits, capacity, router="switch")
    np.testing.assert_array_equal(got.metrics.load, [0, 0, 6, 0, 0, 0, 0, 0])
    assert got.metrics.dropped_first == 26
    # Its weight is the probability itself: a normalised one would be 1 and give no gradient.
    slope = jax.grad(lambda x: routed(x, 3, router="switch").combine.sum())(jnp.asarray(logits))
    assert np.abs(slope[:, :3]).max() > 1e-4


@pytest.mark.parametrize(
    ("size", "experts", "factor", "choices", "rounding", "slots"),
    [
        (100, 16, 1.0, 2, "floor", 12),
        (100, 16, 1.0, 2, "ceil", 13),
        (100, 16, 1.0, 2, "round", 12),
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


def test_noise_of_zero_and_equal_importance():
    """G14: without noise the router is deterministic and equals Mixtral's; the importance loss of
    an even load is 0."""
    made = case("noisy_top_k", 3)
    made["rnd"][:] = 0
    plain = {**made, "rnd": None}
    a, b = (
        routed(capacity=9, router="noisy_top_k", aux_scale="lingvo", **m) for m in (made, plain)
    )
    np.testing.assert_array_equal(a.combine, b.combine)
    c = routed(made["logits"], 9, mask=made["mask"], router="mixtral", aux_scale="lingvo")
    np.testing.assert_allclose(b.combine, c.combine, atol=1e-6)
    even = np.stack([np.roll([3.0, 1.0, -2.0, -4.0], s) for s in range(8)])[None].astype(np.float32)
    balanced = routed(even, 8, noise=even, router="noisy_top_k", aux_scale="lingvo")
    np.testing.assert_allclose(balanced.aux, 0, atol=1e-6)


def test_balance_loss_of_an_even_load_is_one_for_any_number_of_choices():
    """B9: shares add up to 1, not to k."""
    even = np.stack([np.roll([3.0, 1.0, -2.0, -4.0], s) for s in range(8)])[None].astype(np.float32)
    for name, k in (("switch", 1), ("top_k", 2), ("top_k", 3), ("mixtral", 2)):
        aux = routed(even, 8, router=name, experts_per_token=k, aux_scale="lingvo").aux
        np.testing.assert_allclose(aux, 1, rtol=1e-6)


def test_z_loss():
    """The mean over real tokens of the squared log-sum-exp; none without a coefficient."""
    made = case("top_k", 0)
    logits, mask = made["logits"].astype(np.float64), made["mask"]
    squares = np.log(np.exp(logits).sum(-1)) ** 2
    want = np.mean([squares[g][mask[g]].mean() for g in range(3)])
    got = routed(capacity=4, router_z_loss=0.1, **made)
    np.testing.assert_allclose(got.losses.z, want, rtol=1e-5)
    assert routed(capacity=4, **made).losses.z == 0


def test_biases_even_out_the_load():
    """The bias chooses and does not weigh; updated from the load, it makes a skewed load even."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((2, 256, 8)) + np.linspace(-2, 2, 8)).astype(np.float32)

    def of(bias):
        return routed(logits, 256, router="sigmoid", bias=bias)

    bias, loads = jnp.zeros(8), []
    for _ in range(100):
        loads.append(np.asarray(of(bias).metrics.demand))
        bias = balanced_bias(bias, jnp.asarray(loads[-1]), 0.01)
    spread = [load.std() / load.mean() for load in (loads[0], loads[-1])]
    assert spread[0] > 0.5 and spread[1] < 0.1
    np.testing.assert_allclose(np.asarray(of(bias).combine).sum((2, 3)), 1, rtol=1e-5)
    slope = jax.grad(lambda b: of(b).combine.sum())(bias)
    assert not np.any(slope)


def test_a_training_step_moves_biases_by_the_load_alone():
    """Neither decay nor a gradient changes them: each moves by the rate, towards the mean load."""
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


@pytest.mark.parametrize("name", ROUTERS)
def test_padding_changes_nothing_for_real_tokens(name):
    """G12: padding behind the tokens of each group, capacity as it was."""
    made = case(name, 5, size=16)
    made["mask"][:] = True
    rng = np.random.default_rng(1)
    longer = dict(made)
    for field, value in made.items():
        if field != "bias":
            extra = rng.random((3, 8, *value.shape[2:])) * 5
            longer[field] = np.concatenate([value, extra.astype(value.dtype)], axis=1)
    longer["mask"][:, 16:] = False
    scale = {"aux_scale": "lingvo", "router_z_loss": 0.1, "router": name}
    plain, padded = (routed(capacity=4, **scale, **m) for m in (made, longer))
    np.testing.assert_array_equal(plain.combine, padded.combine[:, :16])
    assert not np.any(padded.combine[:, 16:])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain.losses, padded.losses
    )
    jax.tree.map(np.testing.assert_array_equal, plain.metrics, padded.metrics)


@pytest.mark.parametrize("name", ROUTERS)
def test_groups_are_independent(name):
    """G6: permuted groups are routed as before, and no gradient crosses them."""
    made = case(name, 1)
    order = np.asarray([2, 0, 1])
    moved = {f: v if f == "bias" else v[order] for f, v in made.items()}
    scale = {"aux_scale": "lingvo", "router": name}
    whole = routed(capacity=4, **scale, **made)
    np.testing.assert_array_equal(
        whole.combine[order], routed(capacity=4, **scale, **moved).combine
    )

    def sums(x):
        return routed(capacity=4, **scale, **{**made, "logits": x}).combine.sum((1, 2, 3))

    slopes = np.asarray(jax.jacobian(sums)(jnp.asarray(made["logits"])))
    for g in range(3):
        assert not np.any(slopes[g][np.arange(3) != g])


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
    cfg = ModelConfig(experts=32, dtype=dtype)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 512, 64)), dtype)
    params = {"gate": jnp.asarray(rng.uniform(-0.2, 0.2, (64, 32)), dtype)}
    exact = np.asarray(x, np.float64) @ np.asarray(params["gate"], np.float64)
    want = np.sort(np.argsort(-exact, -1)[..., :2])
    cfg = dataclasses.replace(cfg, eval_capacity_factor_per_choice=32.0)
    taken = gate(params, x, jnp.ones((2, 512), bool), cfg).taken
    np.testing.assert_array_equal(np.sort(np.argsort(-np.asarray(taken), -1)[..., :2]), want)
    low = np.asarray(jnp.einsum("gsm,me->gse", x, params["gate"]), np.float32)
    assert (np.sort(np.argsort(-low, -1)[..., :2]) != want).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "mixtrall"}, "router is 'mixtrall'; did you mean \"mixtral\""),
        ({"dispatch": "sorted"}, "dispatch is 'sorted'; did you mean \"sort\""),
        ({"router": "expert_choice"}, "looks at later tokens, which a decoder must not; set decod"),
        ({"router": "switch", "experts_per_token": "2"}, '"switch" has 1 experts for each token'),
        ({"router": "top_k", "experts_per_token": "9"}, "experts_per_token is 9, of 8 experts"),
        ({"router": "switch", "normalise": "after"}, 'but the weights of router "switch"'),
        ({"router": "top_k", "counter": "paper"}, 'counter "paper" lets choices that random'),
        ({"router": "noisy_top_k", "aux_scale": "paper"}, "has variances"),
        (
            {"router": "expert_choice", "decoder_router": "top2", "dispatch": "sort"},
            'dispatch "sort" has no capacity',
        ),
        ({"experts": "0", "shared_experts": "1"}, "shared_experts stand beside routed ones"),
        ({"router_z_loss": "-1"}, "router_z_loss is -1.0"),
        ({"shared_experts": "-1"}, "shared_experts is -1"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(options, message):
    with pytest.raises(SbpError, match=message):
        override(preset("tiny-test").model, options)
