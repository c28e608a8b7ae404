"""Greedy decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sbp.moe.config import ModelConfig
from sbp.moe.model import BOS, EOS, PAD, Memory, decode, encode
from sbp.moe.sharding import PLAIN, Sharding


def make_greedy_decoder(
    cfg: ModelConfig, sharding: Sharding = PLAIN
) -> Callable[[Any, jax.Array], jax.Array]:
    """A function from (parameters, source [G, n, T_source]) to target ids [G, n, T_target], PAD
    behind EOS.

    Each step runs the decoder over the whole prefix again: the group's capacity then cuts the same
    tokens as it would with the target given, and no cache has to follow routing.
    """

    def greedy(params: Any, source: jax.Array) -> jax.Array:
        memory, _, _ = encode(params, source, cfg, sharding=sharding)
        places = jnp.arange(cfg.target_length)
        # A group filled up with padding has nothing to say: it starts, and stays, at PAD.
        alive = jnp.any(source != PAD, axis=-1)
        first = jnp.where(alive, BOS, PAD)[..., None] * (places == 0)

        def step(
            carry: tuple[jax.Array, jax.Array], place: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            target_in, alive = carry
            logits, _, _ = decode(params, Memory(memory, source), target_in, cfg, sharding=sharding)
            ids = jnp.argmax(logits, axis=-1).reshape(target_in.shape)
            # One-hot instead of a dynamic slice: a select is local however the tensor is split.
            here = jnp.sum(jnp.where(places == place, ids, 0), axis=-1)
            token = jnp.where(alive, here, PAD)
            alive = alive & (token != EOS) & (token != PAD)
            written = jnp.where(
                (places == place + 1) & alive[..., None], token[..., None], target_in
            )
            return (written, alive), token

        _, tokens = jax.lax.scan(step, (first.astype(jnp.int32), alive), places)
        return jnp.moveaxis(tokens, 0, -1)

    return greedy
