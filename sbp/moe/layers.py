"""Layers of the GShard Transformer as plain functions of plain pytrees; activations are [G, S, M].

Dims: G groups, n sequences per group, T tokens per sequence, S = n * T, M model, A heads of width
D, H hidden, E experts, C slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sbp.moe.config import ModelConfig
from sbp.moe.gating import GatingMetrics, expert_capacity, top2_gating
from sbp.moe.sharding import Sharding

Params = Mapping[str, jax.Array]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale-only root-mean-square norm over the last dim, as lingvo's GShard models have it
    (epsilon 1e-6)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero entries with probability `rate` and scale the others up; the identity when `key` is
    None."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def subkey(key: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """The key of place `index` under `key`; None stays None (not training)."""
    return None if key is None else jax.random.fold_in(key, index)


def attention(
    params: Params,
    x: jax.Array,
    memory: jax.Array,
    allowed: jax.Array,
    *,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Multi-head attention inside each sequence.

    There is no 1/sqrt(D): it is folded into the initial scale of `query`.

    Arguments:
      params: query, key, value [M, A, D], output [A, D, M].
      x: [G, S, M] queries.
      memory: [G, S', M] keys and values.
      allowed: [G, n, T or 1, T'], true where a query may look; n is the sequences per group.
      rate, key: dropout on the attention weights.

    Returns:
      [G, S, M].
    """
    (groups, size, width), sequences = x.shape, allowed.shape[1]
    queries = x.reshape(groups, sequences, size // sequences, width)
    keys = memory.reshape(groups, sequences, memory.shape[1] // sequences, width)
    q = jnp.einsum("gntm,mad->gnatd", queries, params["query"])
    k = jnp.einsum("gnum,mad->gnaud", keys, params["key"])
    v = jnp.einsum("gnum,mad->gnaud", keys, params["value"])
    scores = jnp.einsum("gnatd,gnaud->gnatu", q, k)
    # A finite minimum: a row of padding alone stays finite (uniform), where -inf would give NaN.
    scores = jnp.where(allowed[:, :, None], scores, jnp.asarray(-1e9, scores.dtype))
    weights = dropout(jax.nn.softmax(scores, axis=-1), rate, key)
    mixed = jnp.einsum("gnatu,gnaud->gnatd", weights, v)
    return jnp.einsum("gnatd,adm->gntm", mixed, params["output"]).reshape(groups, size, width)


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    """Dense feed-forward: relu(x @ w_in) @ w_out, for x [G, S, M]; no biases."""
    return jax.nn.relu(x @ params["w_in"]) @ params["w_out"]


def moe_feed_forward(
    params: Params,
    x: jax.Array,
    mask: jax.Array,
    cfg: ModelConfig,
    *,
    rnd: jax.Array | None = None,
    sharding: Sharding,
) -> tuple[jax.Array, jax.Array, GatingMetrics]:
    """Mixture-of-experts feed-forward (GShard section 3.1, Algorithm 2).

    Arguments:
      params: gate [M, E], expert_in [E, M, H], expert_out [E, H, M].
      x: [G, S, M].
      mask: [G, S], true for real tokens.
      cfg: the model.
      rnd: [G, S] uniform numbers for random routing when training, None when not.
      sharding: the mesh axes of groups and experts.

    Returns:
      outputs [G, S, M], zero for tokens without a slot; the auxiliary loss; counts.
    """
    experts = params["gate"].shape[-1]
    factor = cfg.eval_capacity_factor_per_choice if rnd is None else cfg.capacity_factor_per_choice
    capacity = expert_capacity(x.shape[1], experts, factor)
    # The router is float32 whatever the model is: 16-bit logits change the chosen experts of
    # several per cent of the tokens.
    router = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("gsm,me->gse", x.astype(router), params["gate"].astype(router))
    gating = top2_gating(
        logits, capacity, mask=mask, rnd=rnd, counter=cfg.counter, aux_scale=cfg.aux_scale
    )
    expert_in = sharding.split_experts(params["expert_in"])
    expert_out = sharding.split_experts(params["expert_out"])
    dispatched = jnp.einsum("gsec,gsm->egcm", gating.dispatch.astype(x.dtype), x)
    dispatched = sharding.split_experts(dispatched)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", dispatched, expert_in))
    outputs = jnp.einsum("egch,ehm->gecm", hidden, expert_out)
    combined = jnp.einsum("gsec,gecm->gsm", gating.combine.astype(x.dtype), outputs)
    return sharding.split_groups(combined), gating.aux, gating.metrics
