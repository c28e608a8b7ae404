"""Top-2 gating with capacity: GShard's Algorithm 1, vectorised over groups."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sbp.errors import SbpError

Array = Any  # a jax.Array inside a step, a numpy array outside


class GatingMetrics(NamedTuple):
    """Counts of one MoE layer, as *sums* over groups and tokens: a split tensor's count is a
    partial sum.

    Attributes:
      tokens: real (not padding) tokens, a scalar.
      load: [E] tokens dispatched to each expert, both choices.
      dropped_first: first choices over capacity.
      dropped_second: second choices over capacity.
      skipped_second: second choices left out by random routing.
    """

    tokens: Array
    load: Array
    dropped_first: Array
    dropped_second: Array
    skipped_second: Array


class Gating(NamedTuple):
    """What gating decides for tokens [G, S] over E experts of C slots.

    Attributes:
      combine: [G, S, E, C] weight of each slot's output in the token's output.
      dispatch: [G, S, E, C] 1 where the token fills the slot. Kept apart from `combine`: a weight
        that underflows must not lose a token whose slot is taken.
      aux: the auxiliary loss, a scalar: mean over groups.
      metrics: counts.
    """

    combine: jax.Array
    dispatch: jax.Array
    aux: jax.Array
    metrics: GatingMetrics


def expert_capacity(group_size: int, experts: int, capacity_factor_per_choice: float = 1.0) -> int:
    """Slots of one expert in one group: floor(2 * S / E * factor); GShard's fractional capacity is
    factor 1.

    Raises:
      SbpError: when an expert would have no slot.
    """
    capacity = math.floor(2 * group_size * capacity_factor_per_choice / experts)
    if capacity < 1:
        raise SbpError(
            f"an expert has no slot: floor(2 * {group_size} tokens per group * factor"
            f" {capacity_factor_per_choice} / {experts} experts) is 0; use larger groups, fewer"
            " experts or a larger capacity factor"
        )
    # More slots than tokens can never be filled: a token takes at most one slot of an expert.
    return min(capacity, group_size)


def top2_gating(
    logits: jax.Array,
    capacity: int,
    *,
    mask: jax.Array | None = None,
    rnd: jax.Array | None = None,
    counter: str = "lingvo",
    aux_scale: str = "paper",
) -> Gating:
    """Route each token to its two best experts (GShard section 2.2, Algorithm 1).

    In a group all first choices come before every second choice; inside a rank, tokens come in
    order. The two weights are normalised over the pair *before* capacity and random routing.

    Arguments:
      logits: [G, S, E], in the router's dtype.
      capacity: C, slots per expert and group; see `expert_capacity`.
      mask: [G, S], true for real tokens. Padding takes no slot, adds nothing to `aux` and gets a
          zero row.
      rnd: [G, S] uniform in [0, 1): the second choice is kept where 2 * g2 > rnd (training). None
        keeps it always, so evaluation is deterministic.
      counter: "lingvo": a second choice that random routing leaves out takes no slot. "paper": it
        does, as in the literal listing, whose counters advance outside the `if`.
      aux_scale: "paper": mean over experts of (c_e / S) * m_e. "lingvo": E^2 times that.
    """
    if capacity < 1:
        raise SbpError(f"capacity is {capacity}; an expert needs at least one slot")
    dtype = logits.dtype
    real = jnp.ones(logits.shape[:2], dtype) if mask is None else mask.astype(dtype)
    gates = jax.nn.softmax(logits, axis=-1)

    first, second = _two_best(logits)
    gate1, gate2 = jnp.sum(gates * first, axis=-1), jnp.sum(gates * second, axis=-1)
    # gate1 is at least 1 / E, so the pair's sum needs no epsilon.
    weight1, weight2 = gate1 / (gate1 + gate2), gate2 / (gate1 + gate2)

    first, second = first * real[..., None], second * real[..., None]
    aux = _auxiliary_loss(gates, first, real, aux_scale)

    wanted = second
    if rnd is not None:
        kept = 2.0 * jax.lax.stop_gradient(weight2) > rnd.astype(dtype)
        wanted = second * kept.astype(dtype)[..., None]

    before1, before2 = _places(first, wanted if counter == "lingvo" else second)
    placed1 = first * (before1 < capacity).astype(dtype)
    placed2 = wanted * (before2 < capacity).astype(dtype)

    slots1, slots2 = _slots(placed1, before1, capacity), _slots(placed2, before2, capacity)
    combine = weight1[..., None, None] * slots1 + weight2[..., None, None] * slots2
    metrics = GatingMetrics(
        tokens=jnp.sum(real),
        load=jnp.sum(placed1 + placed2, axis=(0, 1)),
        dropped_first=jnp.sum(first - placed1),
        dropped_second=jnp.sum(wanted - placed2),
        skipped_second=jnp.sum(second - wanted),
    )
    return Gating(combine=combine, dispatch=slots1 + slots2, aux=aux, metrics=metrics)


def _two_best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One-hot first and second choices [G, S, E] of logits [G, S, E].

    The second choice is the best of the rest by logit. To set the first choice's *gate* to zero and
    take argmax returns expert 0 where the softmax is saturated, even if expert 0 was the first
    choice.
    """
    dtype, experts = logits.dtype, logits.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(logits, axis=-1), experts, dtype=dtype)
    rest = jnp.where(first > 0, -jnp.inf, logits)
    return first, jax.nn.one_hot(jnp.argmax(rest, axis=-1), experts, dtype=dtype)


def _places(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slot numbers [G, S, E] of first and second choices: how many tokens took the expert before.

    Second choices come after all first ones. First choices beyond capacity are counted too; that
    changes nothing, since no second choice fits then either way.
    """
    before = jnp.cumsum(first, axis=1) - first
    return before, jnp.cumsum(second, axis=1) - second + jnp.sum(first, axis=1, keepdims=True)


def _auxiliary_loss(
    gates: jax.Array, first: jax.Array, real: jax.Array, aux_scale: str
) -> jax.Array:
    """Mean over groups of (1/E) sum_e (c_e / S) * m_e, with S the group's real tokens (Algorithm 1,
    line 13).

    c_e counts first choices before capacity cuts any; it carries no gradient, which flows through
    m_e alone.
    """
    experts = gates.shape[-1]
    tokens = jnp.maximum(jnp.sum(real, axis=1), 1.0)[:, None]
    fraction = jnp.sum(first, axis=1) / tokens
    mean_gate = jnp.sum(gates * real[..., None], axis=1) / tokens
    aux = jnp.mean(jnp.sum(fraction * mean_gate, axis=-1)) / experts
    return aux * experts**2 if aux_scale == "lingvo" else aux


def _slots(placed: jax.Array, before: jax.Array, capacity: int) -> jax.Array:
    """[G, S, E, C] one-hot of the slot that each placed choice fills, from placed and before [G, S,
    E]."""
    position = jnp.sum(placed * before, axis=-1).astype(jnp.int32)
    slot = jax.nn.one_hot(position, capacity, dtype=placed.dtype)
    return placed[..., None] * slot[..., None, :]
