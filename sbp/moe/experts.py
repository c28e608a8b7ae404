"""The mixture-of-experts layer (GShard section 3.1, Algorithm 2); activations are [G, S, M].

Dims: G groups, S tokens of a group, M model, E experts, H hidden, C slots of an expert in a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sbp.moe.config import ModelConfig
from sbp.moe.gating import GatingMetrics, expert_capacity, top2_gating
from sbp.moe.sharding import Sharding

Params = Mapping[str, jax.Array]


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
