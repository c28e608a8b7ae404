"""The mixture-of-experts layer (GShard section 3.1, Algorithm 2); activations are [G, S, M].

Dims: G groups, S tokens of a group, M model, E experts, H hidden, C slots of an expert in a group.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

import sbp
from sbp.moe.config import ModelConfig
from sbp.moe.gating import Gating, GatingMetrics, RouterLosses, gate
from sbp.moe.sharding import Sharding

Params = Mapping[str, jax.Array]
Dot = Callable[[jax.Array, jax.Array], jax.Array]

EXPERT_WEIGHTS = ("expert_in", "expert_linear", "expert_out")
"""Parameters with a leading dim E; `expert_linear` in experts with SwiGLU only."""


def moe_feed_forward(
    params: Params,
    x: jax.Array,
    mask: jax.Array,
    cfg: ModelConfig,
    *,
    key: jax.Array | None = None,
    sharding: Sharding,
) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
    """Mixture-of-experts feed-forward.

    Arguments:
      params: gate [M, E], expert_in and, with SwiGLU, expert_linear [E, M, H], expert_out [E, H,
        M]; noise [M, E] or bias [E] of the router; shared_in, shared_linear, shared_out of the
        shared experts.
      x: [G, S, M].
      mask: [G, S], true for real tokens.
      cfg: the model.
      key: randomness of the router when training, None when not.
      sharding: the mesh axes of groups and experts.

    Returns:
      outputs [G, S, M], zero for tokens without a slot; the auxiliary losses; counts.
    """
    gating = gate(params, x, mask, cfg, key=key)
    weights = {
        name: sharding.split_experts(params[name]) for name in EXPERT_WEIGHTS if name in params
    }
    outputs = DISPATCHES[cfg.dispatch](weights, x, gating, sharding)
    if cfg.shared_experts:
        shared = {name: params[f"shared_{name.removeprefix('expert_')}"] for name in weights}
        outputs = outputs + expert(shared, x, jnp.matmul)
    return sharding.split_groups(outputs), gating.losses, gating.metrics


def expert(weights: Params, x: jax.Array, into: Dot, out: Dot | None = None) -> jax.Array:
    """An expert: relu(x W_in) W_out, or SwiGLU, (silu(x W_in) * x W_linear) W_out, where it has
    that weight (Shazeer 2020).

    Arguments:
      weights: of the experts.
      x: their inputs.
      into: the product with W_in and W_linear.
      out: the product with W_out, where it is another.
    """
    hidden = into(x, weights["expert_in"])
    if "expert_linear" in weights:
        hidden = jax.nn.silu(hidden) * into(x, weights["expert_linear"])
    else:
        hidden = jax.nn.relu(hidden)
    return (out or into)(hidden, weights["expert_out"])


def _each_expert(weights: Params, dispatched: jax.Array) -> jax.Array:
    """Each expert on its slots: [E, G, C, M] to [G, E, C, M]."""
    return expert(
        weights,
        dispatched,
        lambda x, w: jnp.einsum("egcm,emh->egch", x, w),
        lambda h, w: jnp.einsum("egch,ehm->gecm", h, w),
    )


def by_einsum(weights: Params, x: jax.Array, gating: Gating, sharding: Sharding) -> jax.Array:
    """Algorithm 2: one-hot products take tokens to slots, and slots to tokens."""
    combine, dispatch = gating.slots()
    dispatched = jnp.einsum("gsec,gsm->egcm", dispatch.astype(x.dtype), x)
    dispatched = sharding.split_experts(dispatched)
    outputs = _each_expert(weights, dispatched)
    return jnp.einsum("gsec,gecm->gsm", combine.astype(x.dtype), outputs)


def by_gather(weights: Params, x: jax.Array, gating: Gating, sharding: Sharding) -> jax.Array:
    """Section 3.2: in regions by hand, each device takes the rows of its own groups."""
    groups = sharding.groups.type("group")
    take = sbp.manual(
        jax.vmap(lambda x, token: x.at[token].get(mode="fill", fill_value=0)),
        in_types=(groups, groups),
        out_types=groups,
    )
    put = sbp.manual(
        jax.vmap(lambda x, token, rows: jnp.zeros_like(x).at[token].add(rows, mode="drop")),
        in_types=(groups, groups, groups),
        out_types=groups,
    )
    token, weight = sbp.manual(
        jax.vmap(gating.tokens_of_slots), in_types=(groups,) * 3, out_types=groups
    )(gating.taken, gating.place, gating.weights)
    dispatched = jnp.swapaxes(take(x, token), 0, 1)
    outputs = _each_expert(weights, sharding.split_experts(dispatched))
    return put(x, token, weight[..., None].astype(x.dtype) * outputs)


def by_sort(weights: Params, x: jax.Array, gating: Gating, sharding: Sharding) -> jax.Array:
    """Without a capacity: the devices along an expert axis have the same tokens, each computes its
    own experts on tokens sorted by expert (`jax.lax.ragged_dot`), and their sum is partial."""
    inner = sharding.experts.get("expert", ())
    outer = [axis for axis in sharding.groups.get("group", ()) if axis not in inner]
    layout = sbp.Layout({"group": outer, "expert": inner})
    tokens, experts = layout.type("group"), layout.type("expert")
    pairs, partial = layout.type("group", None, "expert"), dict.fromkeys(inner, sbp.P)

    def own(x: jax.Array, taken: jax.Array, gates: jax.Array, weights: Params) -> jax.Array:
        rows, count = x.reshape(-1, x.shape[-1]), min(gating.choices, taken.shape[-1])
        mine, chosen = jax.lax.top_k(taken, count)
        gate = jnp.take_along_axis(gates, chosen, axis=-1) * mine
        # Places without a token come last, behind all experts.
        chosen = jnp.where(mine > 0, chosen, taken.shape[-1]).ravel()
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=taken.shape[-1])
        out = expert(
            weights, rows[order // count], lambda rows, w: jax.lax.ragged_dot(rows, w, sizes)
        )
        out = jnp.where((mine > 0).ravel()[order, None], out, 0)
        out = out * gate.ravel()[order, None].astype(x.dtype)
        return jnp.zeros_like(rows).at[order // count].add(out).reshape(x.shape)

    region = sbp.manual(
        own, in_types=(tokens, pairs, pairs, experts), out_types=sbp.NdSbp({**tokens, **partial})
    )
    return region(x, gating.taken, gating.weights, weights)


DISPATCHES: Mapping[str, Callable[[Params, jax.Array, Gating, Sharding], jax.Array]] = {
    "einsum": by_einsum,
    "gather": by_gather,
    "sort": by_sort,
}
"""Ways of tokens to experts and back, by the name that `ModelConfig.dispatch` gives."""
