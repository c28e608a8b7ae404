"""The training step: loss, gradients, Adafactor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sbp.moe.config import ModelConfig, TrainConfig
from sbp.moe.model import Batch, Metrics, init_params, loss_fn, stacked_dims
from sbp.moe.optimizer import Adafactor, AdafactorState, adafactor, sqrt_decay
from sbp.moe.sharding import PLAIN, Sharding

Tree = Any


class TrainState(NamedTuple):
    """All that a step reads and writes; the random keys follow from the seed and the step."""

    step: jax.Array
    params: Tree
    optimizer: AdafactorState


def make_optimizer(model: ModelConfig, train: TrainConfig) -> Adafactor:
    """The optimiser of a run."""
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    schedule = sqrt_decay(train.learning_rate, train.warmup_steps, train.ramp_steps)
    return adafactor(stacked_dims(shapes), schedule, min_dim_to_factor=train.min_dim_to_factor)


def init_state(model: ModelConfig, train: TrainConfig) -> TrainState:
    """The state before the first step, from `train.seed`."""
    params = init_params(jax.random.key(train.seed), model)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(model, train).init(params))


def batch_shapes(model: ModelConfig) -> Batch:
    """Shapes of one batch, to plan without data."""
    lead = (model.groups, model.sequences_per_group)
    source = jax.ShapeDtypeStruct((*lead, model.source_length), jnp.int32)
    target = jax.ShapeDtypeStruct((*lead, model.target_length), jnp.int32)
    return Batch(source, target, target)


def make_train_step(
    model: ModelConfig, train: TrainConfig, sharding: Sharding = PLAIN
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run, for `sbp.jit` or `jax.jit`."""
    optimizer = make_optimizer(model, train)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # A key of its own for every step, from the seed: a resumed run draws what an uninterrupted
        # one would have.
        key = jax.random.fold_in(jax.random.key(train.seed + 1), state.step)
        grads, metrics = jax.grad(loss_fn, has_aux=True)(
            state.params, batch, model, key=key, sharding=sharding
        )
        updates, opt = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        return TrainState(state.step + 1, params, opt), metrics

    return train_step
