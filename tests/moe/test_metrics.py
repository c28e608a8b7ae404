"""Numbers of a step against counts by hand, operations against XLA's own count, and the file."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from examples.gshard.display import load_bars
from examples.gshard.presets import preset
from sbp.moe.gating import GatingMetrics
from sbp.moe.metrics import (
    MetricsLog,
    Speed,
    forward_flops,
    read_metrics,
    step_flops,
    summarize,
    utilisation,
)
from sbp.moe.model import Metrics, init_params, loss_fn
from sbp.moe.step import init_state, make_train_step
from tests.moe.routing import routed
from tests.moe.test_model import QUICK, random_batch

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
    assert values["drop"] == pytest.approx(8 / 24)
    assert values["imbalance"] == 2.0
    assert values["encoder/0/load"] == [6, 2] and values["decoder/0/load"] == [8, 0]
    assert (values["encoder/0/unused"], values["decoder/0/unused"]) == (0, 1)
    assert values["encoder/0/drop"] == pytest.approx(4 / 12)
    assert values["encoder/0/entropy"] == pytest.approx(0.4)
    assert values["decoder/0/aux"] == pytest.approx(1.2)


def test_a_dense_model_has_no_numbers_of_experts():
    none = side([0.0], [0.0])
    values = summarize(Metrics(1.0, 0.9, 0.0, 0.5, none, none))  # pyright: ignore[reportArgumentType]  # floats serve
    assert not {"aux", "drop", "skipped", "imbalance"} & set(values)
    assert not [name for name in values if "/" in name]


def test_bars_of_many_experts_share():
    assert load_bars(np.ones(2048)) == "▅" * 32


@pytest.mark.parametrize("router", ["top2", "sigmoid", "expert_choice"])
def test_entropy_of_the_routers_softmax(router):
    rng = np.random.default_rng(0)
    logits, mask = rng.standard_normal((2, 6, 4)), rng.random((2, 6)) < 0.7
    bias = np.zeros(4) if router == "sigmoid" else None
    got = routed(logits, 4, mask=mask, bias=bias, router=router).metrics.entropy
    want = 0.0
    for group, row in np.argwhere(mask):
        weights = [math.exp(x) for x in logits[group, row]]
        shares = [w / sum(weights) for w in weights]
        want -= sum(p * math.log(p) for p in shares)
    np.testing.assert_allclose(got, want, rtol=1e-5)


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
    """Of a dense model without dropout and one layer pair on each side, since XLA counts the body
    of a loop once."""
    model = dataclasses.replace(
        MODEL, experts=0, model_dim=64, ffn_dim=256, expert_dim=128, dropout=0.0, remat=False
    )
    params, batch = init_params(jax.random.key(0), model), random_batch(model, 0)

    def loss(params):
        return loss_fn(params, batch, model)[0]

    forward = jax.jit(loss, compiler_options=QUICK).lower(params).compile().cost_analysis()
    both = jax.jit(jax.grad(loss), compiler_options=QUICK).lower(params).compile().cost_analysis()
    assert forward is not None and both is not None
    np.testing.assert_allclose(sum(forward_flops(model).values()), forward["flops"], rtol=0.05)
    np.testing.assert_allclose(step_flops(model), both["flops"], rtol=0.05)


def test_operations_of_the_papers_model_by_hand():
    """GShard's 12 layers and 128 experts: each side has 6 layers, 3 of them MoE."""
    model = preset("gshard-12l-128e").model
    n, m, width, h, e, v = 128 * 16 * 128, 1024, 16 * 128, 8192, 128, 32_000
    want = {
        "projections": 2 * n * (6 + 6 + 6) * 4 * m * width,
        "scores": 2 * n * (6 + 6 + 6) * 2 * 128 * width,
        "dense": 2 * n * (3 + 3) * 2 * m * h,
        "router": 2 * n * (3 + 3) * m * e,
        "experts": 2 * n * (3 + 3) * 2 * 2 * m * h,
        "logits": 2 * n * m * v,
    }
    assert dict(forward_flops(model)) == want
    assert step_flops(model) == 3 * sum(want.values())
    assert utilisation(3e12, 2.0, 6e12) == 0.25
    rates = Speed(flops=3e12, peak=6e12).rates(100.0, 2.0)
    assert (rates["tokens_per_second"], rates["mfu"]) == (50.0, 0.25)


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
    assert steps[0] == {"step": 1, "loss": 1.0, "encoder/0/load": [1.0, 2.0]}
    assert steps[2] == {"step": 4, "loss": None, "grad_norm": None}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
