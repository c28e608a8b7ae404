"""Properties of the whole model, configurations that are refused, and numbers of a step against
counts by hand and XLA's own count."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gshard.config import override
from examples.gshard.display import load_bars
from examples.gshard.presets import preset
from sbp.moe.config import BOS, EOS, PAD
from sbp.moe.layers import GatingMetrics, dropout, positions
from sbp.moe.model import Batch, Memory, Metrics, decode, encode, init_params, loss_fn
from sbp.moe.step import init_state, make_train_step, stacked_dims
from sbp.moe.trainer import (
    MetricsLog,
    rates,
    read_metrics,
    step_flops,
    summarize,
)
from tests.same import refused

CFG = dataclasses.replace(
    preset("tiny-test").model,
    source_vocab=20,
    target_vocab=20,
    source_length=6,
    target_length=5,
    groups=2,
    experts=4,
    dropout=0.0,
)


# Whole steps take longer to compile than to run here.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def random_batch(cfg, seed=0):
    rng = np.random.default_rng(seed)

    def rows(length):
        x = rng.integers(4, cfg.target_vocab, (cfg.sequences, length))
        for row, n in zip(x, rng.integers(2, length + 1, cfg.sequences), strict=True):
            row[n - 1] = EOS
            row[n:] = PAD
        return x.reshape(cfg.groups, cfg.sequences_per_group, length).astype(np.int32)

    target = rows(cfg.target_length)
    shifted = np.concatenate([np.full((*target.shape[:2], 1), BOS), target[..., :-1]], -1)
    return Batch(
        rows(cfg.source_length), np.where(target == PAD, PAD, shifted).astype(np.int32), target
    )


def test_decoder_sees_no_later_token():
    # Capacity must not bind here: a later token's first choice may evict an earlier one's second
    # choice, as the paper has it.
    cfg = dataclasses.replace(CFG, eval_capacity_factor_per_choice=4.0)
    params = init_params(jax.random.key(0), cfg)
    batch = random_batch(cfg)
    full = np.full_like(batch.target_in, 7)
    memory, _, _ = encode(params, batch.source, cfg)
    base, _, _ = decode(params, Memory(memory, batch.source), full, cfg)
    changed = full.copy()
    changed[..., 3] = 9
    other, _, _ = decode(params, Memory(memory, batch.source), changed, cfg)
    shape = (cfg.groups, cfg.sequences_per_group, cfg.target_length, -1)
    difference = np.abs(np.asarray(base - other)).reshape(shape).max((0, 1, 3))
    np.testing.assert_allclose(difference[:3], 0, atol=1e-5)
    assert (difference[3:] > 1e-3).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_cross_entropy_and_excludes_aux(smoothing):
    """M5, against the formula; the negative log-likelihood is without smoothing."""
    cfg = dataclasses.replace(CFG, label_smoothing=smoothing)
    params, batch = init_params(jax.random.key(0), cfg), random_batch(cfg)
    total, metrics = loss_fn(params, batch, cfg)
    memory, _, _ = encode(params, batch.source, cfg)
    logits, _, _ = decode(params, Memory(memory, batch.source), batch.target_in, cfg)
    logits = np.asarray(logits, np.float64)
    labels = batch.target_out.reshape(logits.shape[:2])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    exact = np.eye(cfg.target_vocab)[labels]
    smoothed = (1 - smoothing) * exact + smoothing / cfg.target_vocab
    loss, nll = (-(q * log_p).sum(-1)[labels != PAD].mean() for q in (smoothed, exact))
    wanted = [loss, nll, loss + cfg.aux_coefficient * 2 * metrics.aux]
    np.testing.assert_allclose([metrics.loss, metrics.nll, total], wanted, rtol=1e-5)


def test_steps_are_deterministic_and_remat_changes_nothing():
    cfg = dataclasses.replace(CFG, dropout=0.1)
    with_remat, without = (
        jax.jit(
            make_train_step(dataclasses.replace(cfg, remat=remat), TRAIN), compiler_options=QUICK
        )
        for remat in (True, False)
    )
    losses = []
    for step in (with_remat, with_remat, without):
        state, run = init_state(cfg, TRAIN), []
        for seed in range(3):
            state, metrics = step(state, random_batch(cfg, seed))
            run.append(float(metrics.loss))
        losses.append(run)
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-5)


def test_dropout_keeps_the_mean():
    x = jnp.ones((100, 100))
    y = np.asarray(dropout(x, 0.1, jax.random.key(0)))
    assert set(np.unique(y).round(5)) == {0.0, np.float32(1 / 0.9).round(5)}
    assert abs(y.mean() - 1) < 0.02
    assert dropout(x, 0.1, None) is x


def test_a_dense_model_has_the_layers_of_two_experts():
    """A model without experts has as many weights as one with two, no routing, and a loss like any
    other model."""
    dense = dataclasses.replace(CFG, experts=0)
    params, batch = init_params(jax.random.key(0), dense), random_batch(dense)
    wide, moe = params["encoder"]["wide"], init_params(jax.random.key(0), CFG)["encoder"]["moe"]
    for one, two in (("w_in", "expert_in"), ("w_out", "expert_out")):
        assert wide[one].size == 2 * moe[two].size // CFG.experts
    total, metrics = loss_fn(params, batch, dense)
    assert float(total) == float(metrics.loss) and float(metrics.aux) == 0
    assert not np.any(metrics.encoder.load) and metrics.encoder.load.shape == (1, 1)
    assert np.all(np.asarray(metrics.encoder.tokens) == np.sum(batch.source != PAD))
    grads = jax.grad(lambda p: loss_fn(p, batch, dense)[0])(params)
    assert all(np.any(g) for g in jax.tree.leaves(grads["decoder"]["wide"]))


def test_stacked_dims_mark_layers_and_experts():
    depths = stacked_dims(jax.eval_shape(lambda: init_params(jax.random.key(0), CFG)))
    assert depths["logits"] == 0
    assert depths["encoder"]["dense"]["w_in"] == depths["decoder"]["moe"]["gate"] == 1
    assert depths["decoder"]["moe"]["expert_out"] == 2


MODELS = [
    ({"expert": "4"}, r"no option 'expert'; did you mean \"experts\""),
    ({"experts": "many"}, "experts needs a value like 8, not 'many'"),
    ({"encoder_layers": "3"}, "encoder_layers is 3; with moe_every 2, .* it must be even"),
    ({"model_dim": "0"}, "model_dim is 0; it must be at least 1"),
    ({"groups": "-2"}, "groups is -2"),
    ({"dropout": "1"}, "dropout is 1.0; it must be at least 0 and below 1"),
    ({"dropout": "nan"}, "dropout is nan"),
    ({"aux_coefficient": "inf"}, "aux_coefficient is inf; .* a finite number"),
    ({"dtype": "bfloat"}, "dtype is 'bfloat'; did you mean \"bfloat16\""),
    ({"counter": "papers"}, "counter is 'papers'; did you mean \"paper\""),
    ({"router": "mixtrall"}, "router is 'mixtrall'; did you mean \"mixtral\""),
    ({"dispatch": "sorted"}, "dispatch is 'sorted'; did you mean \"sort\""),
    ({"router": "expert_choice"}, "looks at later tokens, which a decoder must not; set decod"),
    ({"router": "switch", "experts_per_token": "2"}, '"switch" uses 1 expert for each token'),
    (
        {"router": "top_k", "experts_per_token": "9"},
        "experts_per_token is 9, but there are 8 experts",
    ),
    ({"router": "switch", "normalise": "after"}, 'but the weights of router "switch"'),
    ({"router": "top_k", "counter": "paper"}, 'counter "paper" works only with router "top2"'),
    ({"router": "noisy_top_k", "aux_scale": "paper"}, 'does not work with router "noisy_top_k"'),
    (
        {"router": "expert_choice", "decoder_router": "top2", "dispatch": "sort"},
        'dispatch "sort" does not work with router "expert_choice"',
    ),
    ({"experts": "0", "shared_experts": "1"}, "shared_experts needs routed experts"),
    ({"router_z_loss": "-1"}, "router_z_loss is -1.0"),
    ({"shared_experts": "-1"}, "shared_experts is -1"),
    ({"kv_heads": "3"}, "kv_heads is 3; it must divide the 2 heads"),
    ({"head_dim": "5", "position": "rotary"}, "head_dim is 5; rotary"),
    ({"position": "rotaty"}, 'did you mean "rotary"'),
    ({"encoder_layers": "0", "target_vocab": "30"}, "has one vocabulary"),
    ({"encoder_layers": "0", "target_vocab": "400", "decoder_router": "switch"}, "set router"),
    ({"moe_every": "3"}, "moe_every is 3"),
    ({"rounding": "stochastic"}, 'rounding "stochastic" needs param_dtype "bfloat16"'),
    ({"dtype": "float64", "param_dtype": "bfloat16"}, "needs parameters of float64"),
    ({"rounding": "random"}, "rounding is 'random'"),
]
RUNS = [
    ({"seed": "-5"}, "seed is -5"),
    ({"learning_rate": "nan"}, "learning_rate is nan"),
    ({"learning_rate": "-1"}, "learning_rate is -1.0"),
    ({"steps": "0"}, "steps is 0; it must be at least 1"),
    ({"corpus": "catalogs"}, "corpus is 'catalogs'; did you mean \"catalogues\""),
]


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [(part, *row) for part, table in (("model", MODELS), ("train", RUNS)) for row in table],
)
def test_a_configuration_that_cannot_be_is_refused(part, options, message):
    refused(f"^unknown-option: .*{message}", override, getattr(preset("tiny-test"), part), options)


def test_text_is_read_as_the_type_of_its_option():
    found = override(CFG, {"remat": "false", "dropout": "0.2"})
    assert (found.remat, found.dropout) == (False, 0.2)
    refused(r'no preset \'tiny_mt\'; did you mean "tiny-mt"', preset, "tiny_mt")
    refused(
        r"^unknown-option: heads must be a whole number, got 2\.5$",
        dataclasses.replace,
        CFG,
        heads=2.5,
    )


MODEL, TRAIN = preset("tiny-test").model, preset("tiny-test").train


def side(load, demand, entropy=4.0):
    counts = ([10.0], [load], [1.0], [3.0], [8.0], [demand], [entropy])
    return GatingMetrics(*(np.asarray(x, np.float32) for x in counts))


def test_summary_recounts_drops():
    encoder, decoder = side([6.0, 2.0], [9.0, 3.0]), side([8.0, 0.0], [12.0, 0.0])
    aux = np.asarray([1.0, 1.2], np.float32)
    values = summarize(
        Metrics(1.0, 0.9, 1.1, 0.5, encoder, decoder, 2.0, 0.0, 3.0, 0.1, aux)  # pyright: ignore[reportArgumentType]  # floats serve
    )
    assert values["tokens"] == 20 and values["skipped_steps"] == 3
    assert values["drop"] == pytest.approx(8 / 24) and values["imbalance"] == 2.0
    exact = {
        "encoder/0/load": [6, 2],
        "decoder/0/load": [8, 0],
        "encoder/0/unused": 0,
        "decoder/0/unused": 1,
    }
    assert values.items() >= exact.items()
    near = {"encoder/0/drop": 4 / 12, "encoder/0/entropy": 0.4, "decoder/0/aux": 1.2}
    assert {name: values[name] for name in near} == pytest.approx(near)


def test_a_dense_model_has_no_numbers_of_experts():
    none = side([0.0], [0.0])
    values = summarize(Metrics(1.0, 0.9, 0.0, 0.5, none, none))  # pyright: ignore[reportArgumentType]  # floats serve
    assert not {"aux", "drop", "skipped", "imbalance"} & set(values)
    assert not [name for name in values if "/" in name]


def test_bars_of_many_experts_share():
    assert load_bars(np.ones(2048)) == "▅" * 32


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_the_rate_and_the_count_of_skipped_steps(optimizer):
    """The schedule goes by updates, not by steps: a step that was skipped does not count."""
    train = dataclasses.replace(
        TRAIN, optimizer=optimizer, schedule="linear", learning_rate=1.0, steps=10
    )
    step = jax.jit(make_train_step(MODEL, train), compiler_options=QUICK)
    good, batch = init_state(MODEL, train), random_batch(MODEL, 0)
    after, metrics = step(good, batch)
    assert (float(metrics.learning_rate), float(metrics.skipped_steps)) == (1.0, 0.0)
    bad = jax.tree.map(lambda x: x * math.nan, after.params)
    worse, metrics = step(after._replace(params=bad), batch)
    np.testing.assert_allclose(metrics.learning_rate, 0.9, rtol=1e-6)
    assert float(metrics.skipped_steps) == 1.0
    _, metrics = step(worse._replace(params=after.params), batch)
    np.testing.assert_allclose(metrics.learning_rate, 0.9, rtol=1e-6)
    assert float(metrics.skipped_steps) == 1.0


def test_operations_are_those_that_xla_counts():
    """The model is dense, has no dropout, and has one pair of layers on each side, since XLA counts
    the body of a loop once."""
    model = dataclasses.replace(
        MODEL, experts=0, model_dim=64, ffn_dim=256, expert_dim=128, dropout=0.0, remat=False
    )
    params, batch = init_params(jax.random.key(0), model), random_batch(model, 0)
    loss = lambda params: loss_fn(params, batch, model)[0]
    forward = jax.jit(loss, compiler_options=QUICK).lower(params).compile().cost_analysis()
    both = jax.jit(jax.grad(loss), compiler_options=QUICK).lower(params).compile().cost_analysis()
    assert forward is not None and both is not None
    flops = step_flops(model)
    np.testing.assert_allclose([flops / 3, flops], [forward["flops"], both["flops"]], rtol=0.05)


def test_operations_of_the_papers_model_by_hand():
    """GShard's 12 layers and 128 experts: each side has 6 layers, 3 of them MoE."""
    model = preset("gshard-12l-128e").model
    n, m, width, h, e, v = 128 * 16 * 128, 1024, 16 * 128, 8192, 128, 32_000
    forward = {
        "projections": 2 * n * (6 + 6 + 6) * 4 * m * width,
        "scores": 2 * n * (6 + 6 + 6) * 2 * 128 * width,
        "dense": 2 * n * (3 + 3) * 2 * m * h,
        "router": 2 * n * (3 + 3) * m * e,
        "experts": 2 * n * (3 + 3) * 2 * 2 * m * h,
        "logits": 2 * n * m * v,
    }
    assert step_flops(model) == 3 * sum(forward.values())
    found = rates(100.0, 2.0, flops=3e12, peak=6e12)
    assert (found["tokens_per_second"], found["mfu"]) == (50.0, 0.25)


def test_the_file_goes_on_behind_the_checkpoint(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in range(1, 6):
            log.write(step, {"loss": float(step), "encoder/0/load": [1.0, 2.0]})
    damaged = (tmp_path / "metrics.jsonl").read_bytes().replace(b'"step": 2', b'"st\xffp": 2')
    (tmp_path / "metrics.jsonl").write_bytes(damaged + b"[]\n")
    # Killed while it wrote step 6; the checkpoint is of step 3.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with MetricsLog(tmp_path, 3) as log:
        log.write(4, {"loss": math.nan, "grad_norm": math.inf})
    steps = read_metrics(tmp_path)
    assert [one["step"] for one in steps] == [1, 3, 4]
    assert steps[::2] == [
        {"step": 1, "loss": 1.0, "encoder/0/load": [1.0, 2.0]},
        {"step": 4, "loss": None, "grad_norm": None},
    ]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_positions_of_an_odd_width_end_with_zeros():
    even, odd = positions(5, 8), positions(5, 9)
    np.testing.assert_array_equal(odd, np.pad(even, [(0, 0), (0, 1)]))
