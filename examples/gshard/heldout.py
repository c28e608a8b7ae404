"""Loss on held-out text while a run trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from examples.gshard.corpus import Pair
from examples.gshard.data import encode_pairs, evaluation_batches
from examples.gshard.tokenizer import Tokenizer
from sbp.errors import SbpError
from sbp.moe.config import ModelConfig
from sbp.moe.model import Batch, loss_fn
from sbp.moe.sharding import Sharding
from sbp.moe.step import batch_shapes
from sbp.moe.tokens import PAD

_BATCHES = 2
"""Batches of held-out pairs that the loss is taken of: a small share of what lies between two
checkpoints."""


def sample(
    pairs: Sequence[Pair], source: Tokenizer, target: Tokenizer, cfg: ModelConfig, seed: int
) -> list[Batch]:
    """A few batches of held-out pairs that were drawn at random, the same for a seed; none where
    all pairs are longer than the model's sequences."""
    rows = np.random.default_rng(seed).permutation(len(pairs))
    try:
        encoded = encode_pairs([pairs[i] for i in rows], source, target, cfg)
    except SbpError:  # no pair fits: the run says so and trains without this loss
        return []
    every = evaluation_batches(encoded, cfg)
    return [batch for _, batch in itertools.islice(every, _BATCHES)]


def make_loss(cfg: ModelConfig, sharding: Sharding) -> Callable[[Any, Batch], jax.Array]:
    """A function from (parameters, batch) to the negative log-likelihood per target token, in nats,
    as it is when translating: without dropout, random routing and label smoothing."""

    def loss(params: Any, batch: Batch) -> jax.Array:
        return loss_fn(params, batch, cfg, sharding=sharding)[1].nll

    return loss


def plan_loss(
    cfg: ModelConfig, sharding: Sharding, shapes: Any, shardings: Any
) -> Callable[[Any, Sequence[Batch]], float]:
    """Plan the loss on the training mesh.

    Arguments:
      cfg: the model.
      sharding: the annotations of the training step.
      shapes: of the parameters.
      shardings: of the parameters, as the training step keeps them: nothing is moved.

    Returns:
      A function from (parameters, batches) to the loss per target token of all batches, in nats.

    Raises:
      SbpError: when the loss has no typing on the mesh.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    types = jax.tree.map(lambda sharding: sharding.spec, shardings)
    plan = sbp.jit(make_loss(cfg, sharding), mesh, in_types=(types, None)).plan(
        shapes, batch_shapes(cfg)
    )

    def mean(params: Any, batches: Sequence[Batch]) -> float:
        tokens = [int(np.sum(batch.target_out != PAD)) for batch in batches]
        losses = [plan(params, jax.tree.map(jnp.asarray, batch)) for batch in batches]
        return sum(n * float(x) for n, x in zip(tokens, losses, strict=True)) / sum(tokens)

    return mean
