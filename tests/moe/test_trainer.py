"""The training loop on batches that are no text."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from sbp import SbpError
from sbp.moe.checkpoint import Checkpoints, describe, read_params
from sbp.moe.config import BOS, ModelConfig, TrainConfig
from sbp.moe.devices import make_mesh
from sbp.moe.metrics import read_metrics
from sbp.moe.model import Batch
from sbp.moe.step import plan_train_step
from sbp.moe.trainer import Trainer

SIZES: dict[str, Any] = dict.fromkeys(
    ("model_dim", "ffn_dim", "expert_dim", "source_vocab", "target_vocab"), 16
)
LAYERS: dict[str, Any] = {
    "experts": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "heads": 2,
    "head_dim": 8,
}
ROWS: dict[str, Any] = {
    "source_length": 4,
    "target_length": 4,
    "groups": 2,
    "sequences_per_group": 2,
}
MODEL = ModelConfig(**SIZES, **LAYERS, **ROWS)
TRAIN = TrainConfig(steps=4, optimizer="adamw", learning_rate=0.01, checkpoint_every=2)


class Copies:
    """Targets that copy their sources."""

    def __init__(self):
        self.place = 0

    def __next__(self):
        self.place += 1
        rng = np.random.default_rng(self.place)
        rows = rng.integers(4, 16, (2, 2, 4), np.int32)
        shifted = np.pad(rows[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=BOS)
        return Batch(source=rows, target_in=shifted, target_out=rows)

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


@pytest.fixture(scope="module")
def plan():
    return plan_train_step(MODEL, TRAIN, make_mesh((("expert", 2),)))


def train(plan, folder, stop=lambda: 0, **options):
    """The state at the end, the signal, the steps that a callback saw, and what was said."""
    seen, said = [], []
    options = dataclasses.replace(TRAIN, **options)
    with Checkpoints(folder, describe(MODEL, options, "copies")) as checkpoints:
        trainer = Trainer(
            model=MODEL,
            train=options,
            plan=plan,
            batches=Copies(),
            checkpoints=checkpoints,
            heldout=lambda state: 1.0,
            say=said.append,
        )
        state, signal = trainer.fit(
            trainer.begin(), [lambda step, values: seen.append((step, values))], stop=stop
        )
    return jax.device_get(state), signal, seen, said


def test_a_stopped_run_resumes_as_if_it_had_not_stopped(plan, tmp_path):
    whole, signal, seen, said = train(plan, tmp_path / "whole")
    assert (signal, said, [step for step, _ in seen]) == (0, [], [1, 2, 3, 4])
    assert ["heldout_nll" in values for _, values in seen] == [False, True, False, True]
    _, signal, seen, _ = train(plan, tmp_path / "parts", stop=lambda: 15)
    assert (signal, len(seen)) == (15, 1)
    state, _, seen, said = train(plan, tmp_path / "parts")
    assert said == ["resumed at step 1"] and [step for step, _ in seen] == [2, 3, 4]
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    losses = [[line["loss"] for line in read_metrics(tmp_path / f)] for f in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_parameters_are_read_from_the_newest_checkpoint(plan, tmp_path):
    state, *_ = train(plan, tmp_path)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: state.params)
    params = read_params(tmp_path, shapes, jax.tree.map(lambda _: here, shapes))
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


def test_steps_that_are_not_finite_end_the_run(plan, tmp_path):
    with pytest.raises(SbpError, match=r"steps 1 to 2 were skipped.*no checkpoint is there yet"):
        train(Infinite(plan), tmp_path, max_skipped=2, checkpoint_every=9)
    assert [line["skipped_step"] for line in read_metrics(tmp_path)] == [1.0, 1.0]


class Infinite:
    """A plan with infinite weights in every step."""

    def __init__(self, plan):
        self.in_shardings, self.plan = plan.in_shardings, plan

    def __call__(self, state, batch):
        return self.plan(state._replace(params=jax.tree.map(lambda w: w / 0, state.params)), batch)
