"""Layers of the GShard Transformer as plain functions of plain pytrees; activations are [G, S, M].

Dims: G groups, n sequences per group, T tokens per sequence, S = n * T, M model, A heads of width
D, H hidden, E experts, C slots of an expert in a group."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sbp
from sbp.errors import SbpError
from sbp.kinds import NUMBER, Kind, is_whole, one_of, takes
from sbp.moe.config import ModelConfig
from sbp.moe.routers import ROUTERS, Choices, Scores, balanced_bias, expert_choice, union, z_loss
from sbp.moe.sharding import Sharding

Params = Mapping[str, jax.Array]


def wide_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of statistics over values of a dtype.

    >>> wide_dtype("bfloat16"), wide_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    return jnp.promote_types(dtype, jnp.float32)


_WIDE = ("norm", "gate", "noise", "bias")
"""Weights that are used as they are: of norms and routers."""


def cast_weights(params: Any, dtype: Any) -> Any:
    """The weights of a layer in the dtype in which it computes, but those of norms and routers."""

    def cast(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
        return w if path[-1].key in _WIDE else w.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale-only root-mean-square norm over the last dim, as lingvo's GShard models have it
    (epsilon 1e-6); in float32 at least."""
    wide = x.astype(wide_dtype(x.dtype))
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6) * scale
    return y.astype(x.dtype)


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


def feed_forward(params: Params, x: jax.Array) -> jax.Array:
    """Dense feed-forward: relu(x @ w_in) @ w_out, for x [G, S, M]; no biases."""
    return jax.nn.relu(x @ params["w_in"]) @ params["w_out"]


# ---- attention ----------------------------------------------------------------------------------
# Attention inside each sequence, and the positions of tokens. Dims: G groups, n sequences of a
# group, T tokens of one, M model, A heads of queries and K heads of keys and values, of width D.


class KeysValues(NamedTuple):
    """What attention looks at, both [G, n, K, T', D]."""

    keys: jax.Array
    values: jax.Array


class Rotary(NamedTuple):
    """Rotary positions (RoFormer, Su et al. 2021, section 3.2.2): entries i and i + D / 2 of a head
    are turned by the angle place * base ** (-2 i / D), so that the product of a query and a key
    depends on how far apart they are.

    Attributes:
      places: [T] or [G, n, T], of each token.
      base: what makes the wavelengths; 10,000 in the paper.
    """

    places: jax.Array
    base: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """Heads [G, n, A, T, D], turned; in float32 at least.

        >>> rotary = Rotary(jnp.array([0, 1]), 10_000.0)
        >>> rotary(jnp.ones((1, 1, 1, 2, 2)))[0, 0, 0].round(2).tolist()[0]
        [1.0, 1.0]
        """
        wide, half = wide_dtype(x.dtype), x.shape[-1] // 2
        rates = jnp.asarray(self.base ** -(np.arange(half) / half), wide)
        angles = self.places[..., None, :, None].astype(wide) * rates
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def keys_values(
    params: Params, memory: jax.Array, sequences: int, rotary: Rotary | None = None
) -> KeysValues:
    """Keys and values of tokens [G, S', M], with n sequences in a group; keys turned by their
    places."""
    groups, size, width = memory.shape
    rows = memory.reshape(groups, sequences, size // sequences, width)
    keys = jnp.einsum("gnum,mad->gnaud", rows, params["key"])
    values = jnp.einsum("gnum,mad->gnaud", rows, params["value"])
    return KeysValues(rotary(keys) if rotary else keys, values)


def attention(
    params: Params,
    x: jax.Array,
    memory: KeysValues,
    allowed: jax.Array,
    *,
    rotary: Rotary | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Multi-head attention inside each sequence.

    Each head of keys and values serves A / K heads of queries, one behind the other (grouped-query
    attention, Ainslie et al. 2023). There is no 1/sqrt(D): it is
    folded into the initial scale of `query`.

    Arguments:
      params: query [M, A, D], output [A, D, M].
      x: [G, S, M] queries.
      memory: keys and values of T' tokens of each sequence.
      allowed: [G, n, T or 1, T'], true where a query may look; n is the sequences per group.
      rotary: the places of the queries; None without rotary positions.
      drop: dropout, of the attention weights.

    Returns:
      [G, S, M].
    """
    (groups, size, width), sequences = x.shape, allowed.shape[1]
    queries = x.reshape(groups, sequences, size // sequences, width)
    q = jnp.einsum("gntm,mad->gnatd", queries, params["query"])
    q = rotary(q) if rotary else q
    heads, shared = q.shape[2], memory.keys.shape[2]
    a = "a" if heads == shared else "ar"  # r: the queries of one head of keys
    if heads != shared:
        q = q.reshape(*q.shape[:2], shared, heads // shared, *q.shape[3:])
    wide = wide_dtype(x.dtype)
    scores = jnp.einsum(f"gn{a}td,gnaud->gn{a}tu", q, memory.keys, preferred_element_type=wide)
    # A finite minimum: a row of padding alone stays finite (uniform), where -inf would give NaN.
    scores = jnp.where(
        jnp.expand_dims(allowed, range(2, 2 + len(a))), scores, jnp.asarray(-1e9, scores.dtype)
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    weights = drop(weights) if drop else weights
    mixed = jnp.einsum(f"gn{a}tu,gnaud->gn{a}td", weights, memory.values)
    if heads != shared:
        mixed = mixed.reshape(*mixed.shape[:2], heads, *mixed.shape[4:])
    return jnp.einsum("gnatd,adm->gntm", mixed, params["output"]).reshape(groups, size, width)


def positions(length: int, width: int) -> np.ndarray:
    """Sinusoidal position signal [T, M] (sines, then cosines; wavelengths 2 pi to 10 000 * 2 pi),
    float64. An odd width has a last column of zeros, as in Tensor2Tensor."""
    rates = 10_000.0 ** -(np.arange(width // 2) / max(width // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles), np.zeros((length, width % 2))], axis=-1)


# ---- packing ------------------------------------------------------------------------------------
# Rows of a batch that hold several pairs of sequences.


Array = Any  # a jax.Array inside a step, a numpy array outside


class Segments(NamedTuple):
    """Which pair of its row each token belongs to, int32: 1 for the first, 0 where padded.

    Attributes:
      source: [..., T_source].
      target: [..., T_target].
    """

    source: Array
    target: Array


def same_segment(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether two tokens are of one pair: [..., T] and [..., T'] to [..., T, T']."""
    return queries[..., :, None] == keys[..., None, :]


def places(segments: jax.Array) -> jax.Array:
    """The place of each token in its own segment [..., T], from 0.

    >>> places(np.array([1, 1, 1, 2, 2, 0]))[:5].tolist()
    [0, 1, 2, 0, 1]
    """
    before = np.tri(segments.shape[-1], k=-1, dtype=bool)
    return jnp.sum(same_segment(segments, segments) & before, axis=-1, dtype=jnp.int32)


def signal_of(cfg: ModelConfig, length: int, segments: jax.Array | None) -> jax.Array | None:
    """What is added to embeddings, None with rotary positions: the position signal of T tokens,
    [T, M]; of packed ones [..., T], counted from the start of each segment: [..., T, M]."""
    if cfg.position == "rotary":
        return None
    table = jnp.asarray(positions(length, cfg.model_dim))
    return table if segments is None else jnp.take(table, places(segments), axis=0)


# ---- gating -------------------------------------------------------------------------------------
# A router's choices under a capacity (GShard's Algorithm 1, vectorised over groups).


class GatingMetrics(NamedTuple):
    """Counts of one MoE layer, as *sums* over groups and tokens: a split tensor's count is a
    partial sum.

    Attributes:
      tokens: real (not padding) tokens, a scalar.
      load: [E] tokens dispatched to each expert.
      dropped_first: first choices over capacity; tokens that no expert took, in expert choice.
      dropped_second: later choices over capacity.
      skipped_second: second choices left out by random routing.
      demand: [E] choices of each expert before capacity cuts any; `load` in expert choice.
      entropy: of the softmax of each real token's logits, in nats, summed.
    """

    tokens: Array
    load: Array
    dropped_first: Array
    dropped_second: Array
    skipped_second: Array
    demand: Array
    entropy: Array


class RouterLosses(NamedTuple):
    """Auxiliary losses of one MoE layer, scalars: means over groups.

    Attributes:
      balance: of an uneven load; each router has its own.
      z: of large logits; 0 where `router_z_loss` is 0.
    """

    balance: Array
    z: Array


class Gating(NamedTuple):
    """What gating decides for tokens [G, S] over E experts.

    A token has at most one slot of an expert.

    Attributes:
      taken: [G, S, E] 1 where the expert takes the token. Kept apart from `weights`: a weight that
        underflows must not lose a token whose slot is taken.
      place: [G, S, E] which slot of the expert, where taken.
      weights: [G, S, E] weight of the expert's output in the token's output, where taken.
      capacity: C, slots of an expert in a group.
      choices: experts that take a token, at most.
      losses: the auxiliary losses.
      metrics: counts.
    """

    taken: jax.Array
    place: jax.Array
    weights: jax.Array
    capacity: int
    choices: int
    losses: RouterLosses
    metrics: GatingMetrics

    def slots(self) -> tuple[jax.Array, jax.Array]:
        """Algorithm 1's `combine` weights and `dispatch` mask, [G, S, E, C]."""
        place = self.place.astype(jnp.int32)
        dispatch = self.taken[..., None] * jax.nn.one_hot(
            place, self.capacity, dtype=self.taken.dtype
        )
        return self.weights[..., None] * dispatch, dispatch

    def tokens_of_slots(
        self, taken: jax.Array, place: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Which token each slot of one group holds, S where it is empty, and its weight: [E, C]
        both, from that group's rows [S, E]."""
        size, experts = taken.shape
        slot = jnp.where(taken > 0, place, self.capacity).astype(jnp.int32)
        empty = jnp.full((experts, self.capacity), size, jnp.int32)
        tokens = jnp.arange(size, dtype=jnp.int32)[:, None]
        token = empty.at[jnp.arange(experts), slot].set(tokens, mode="drop")
        expert = jnp.arange(experts)[:, None]
        return token, weights.at[token, expert].get(mode="fill", fill_value=0)


_ROUNDED = {"floor": math.floor, "ceil": math.ceil, "round": round}


@takes(
    "expert_capacity",
    experts=Kind("a whole number of 1 or more", lambda x: is_whole(x) and x >= 1),
    capacity_factor_per_choice=NUMBER,
    rounding=one_of(tuple(_ROUNDED)),
)
def expert_capacity(
    group_size: int,
    experts: int,
    capacity_factor_per_choice: float = 1.0,
    *,
    choices: int = 2,
    rounding: str = "floor",
) -> int:
    """Slots of one expert in one group: `choices` * S / E * factor, rounded; GShard's fractional
    capacity is 2S/E, Switch's the ceiling of factor * S / E.

    Arguments:
      group_size: S.
      experts: E.
      capacity_factor_per_choice: slots for each choice; exact as its decimals say.
      choices: experts of a token.
      rounding: "floor", "ceil" or "round" (halves to even).

    Raises:
      SbpError: `bad-argument` when an expert would have no slot, `unknown-option` for another
        rounding.

    >>> expert_capacity(100, 16), expert_capacity(100, 16, 1.25, choices=1, rounding="ceil")
    (12, 8)
    """
    exact = choices * group_size * Fraction(str(capacity_factor_per_choice)) / experts
    capacity = _ROUNDED[rounding](exact)
    if capacity < 1:
        raise SbpError(
            f"an expert has no slot: {rounding}({choices} * {group_size} tokens per group * factor"
            f" {capacity_factor_per_choice} / {experts} experts) is 0; use larger groups, fewer"
            " experts or a larger capacity factor"
        )
    # More slots than tokens can never be filled: a token takes at most one slot of an expert.
    return min(capacity, group_size)


def gate(
    params: Params, x: jax.Array, mask: jax.Array, cfg: ModelConfig, *, key: jax.Array | None = None
) -> Gating:
    """Route tokens, with the configuration's router.

    Arguments:
      params: gate [M, E], and what the router has besides.
      x: [G, S, M].
      mask: [G, S], true for real tokens. Padding takes no slot and adds nothing to a loss.
      cfg: the model.
      key: randomness when training, None when not, so that evaluation is deterministic.
    """
    # The router is float32 whatever the model is: 16-bit logits change the chosen experts of
    # several per cent of the tokens.
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    router, shape = ROUTERS[cfg.router], (*mask.shape, params["gate"].shape[-1])

    def logits(name: str) -> jax.Array:
        weight = params[name].astype(dtype)
        return jnp.einsum("gsm,me->gse", x.astype(dtype), weight, precision="highest")

    draw = router.draw(key, shape, dtype) if key is not None and router.draw is not None else None
    seen = Scores(
        logits=logits("gate"),
        real=mask.astype(dtype),
        draw=draw,
        noise=logits("noise") if "noise" in router.weights else None,
        bias=params["bias"].astype(dtype) if "bias" in router.weights else None,
    )
    return route(seen, capacity_of(cfg, mask.shape[1], training=key is not None), cfg)


def capacity_of(cfg: ModelConfig, group_size: int, *, training: bool) -> int:
    """Slots of an expert in a group of the model; the whole group without a capacity (`sort`)."""
    if cfg.dispatch == "sort":
        return group_size
    factor = cfg.capacity_factor_per_choice if training else cfg.eval_capacity_factor_per_choice
    rounding = (
        ROUTERS[cfg.router].rounding if cfg.capacity_rounding == "router" else cfg.capacity_rounding
    )
    return expert_capacity(group_size, cfg.experts, factor, choices=cfg.choices, rounding=rounding)


def route(seen: Scores, capacity: int, cfg: ModelConfig) -> Gating:
    """The configuration's router on given scores, under a capacity.

    In a group all first choices come before every second choice; inside a rank, tokens come in
    order.
    """
    if capacity < 1:
        raise SbpError(
            f"capacity is {capacity}; an expert needs at least one slot: raise"
            " capacity_factor_per_choice, or use larger groups"
        )
    z = z_loss(seen.logits, seen.real) if cfg.router_z_loss else jnp.zeros((), seen.logits.dtype)
    choose, entropy = ROUTERS[cfg.router].choose, _entropy(seen)
    if choose is None:
        taken, place, gates = expert_choice(seen, capacity)
        load, none = jnp.sum(taken, axis=(0, 1)), jnp.zeros((), taken.dtype)
        alone = seen.real * (jnp.sum(taken, axis=-1) == 0)
        metrics = GatingMetrics(jnp.sum(seen.real), load, jnp.sum(alone), none, none, load, entropy)
        losses = RouterLosses(none, z)
        return Gating(taken, place, gates, capacity, load.size, losses, metrics)
    choices = choose(seen, cfg.choices)
    real = seen.real[..., None]
    ranks = tuple(rank * real for rank in choices.ranks)
    wanted = tuple(rank * real for rank in choices.wanted)
    placed, place = _place(wanted if cfg.counter == "lingvo" else ranks, wanted, capacity)
    taken = union(placed)
    weights = _normalize(choices, taken, cfg)
    scale = 1.0 if cfg.aux_scale == "lingvo" else seen.logits.shape[-1] ** -2
    metrics = GatingMetrics(
        tokens=jnp.sum(seen.real),
        load=jnp.sum(taken, axis=(0, 1)),
        dropped_first=jnp.sum(wanted[0] - placed[0]),
        dropped_second=jnp.sum(union(wanted) - wanted[0] - taken + placed[0]),
        skipped_second=jnp.sum(union(ranks) - union(wanted)),
        demand=jnp.sum(union(wanted), axis=(0, 1)),
        entropy=entropy,
    )
    losses = RouterLosses(choices.balance * scale, z)
    return Gating(taken, place, weights, capacity, len(ranks), losses, metrics)


def _entropy(seen: Scores) -> jax.Array:
    """Entropy of the softmax over the experts, in nats, summed over real tokens."""
    logs = jax.nn.log_softmax(jax.lax.stop_gradient(seen.logits), axis=-1)
    return -jnp.sum(jnp.exp(logs) * logs * seen.real[..., None])


def _place(
    queues: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...], capacity: int
) -> tuple[list[jax.Array], jax.Array]:
    """The choices of each rank that find a slot, and the slots' numbers [G, S, E].

    The number of a slot is how many tokens took the expert before. Choices of earlier ranks beyond
    capacity are counted too; that changes nothing, since no later choice fits then either way.
    """
    placed, place, before = [], 0.0, 0.0
    for queue, rank in zip(queues, wanted, strict=True):
        ahead = jnp.cumsum(queue, axis=1) - queue + before
        placed.append(rank * (ahead < capacity).astype(rank.dtype))
        place = place + placed[-1] * ahead
        before = before + jnp.sum(queue, axis=1, keepdims=True)
    return placed, jnp.asarray(place)


def _normalize(choices: Choices, taken: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Weights [G, S, E], divided by their sum over a token's choices: over those it made
    (`normalise` is "before"), over those that are left after random routing and capacity ("after"),
    or not at all ("none", and routers that normalise by themselves)."""
    gates = choices.gates
    if not ROUTERS[cfg.router].normalised or cfg.normalise == "none":
        return gates
    if cfg.normalise == "before":
        return gates / jnp.sum(gates * union(choices.ranks), axis=-1, keepdims=True)
    kept = jnp.sum(gates * taken, axis=-1, keepdims=True)
    return gates / jnp.where(kept > 0, kept, 1.0)


def balance_biases(
    params: Any, old: Any, sides: Mapping[str, GatingMetrics], cfg: ModelConfig
) -> Any:
    """Parameters with the biases of `sigmoid` routers moved towards an even load; see
    `balanced_bias`. They are parameters that no optimiser changes.

    Arguments:
      params: of the model, after the optimiser's update.
      old: the same before it.
      sides: counts of the step, of "encoder" and "decoder".
      cfg: the model.
    """
    for side, counts in sides.items():
        moe = old[side].get("moe", {})
        if "bias" in moe:
            bias = balanced_bias(moe["bias"], counts.demand, cfg.router_bias_rate)
            params = {
                **params,
                side: {**params[side], "moe": {**params[side]["moe"], "bias": bias}},
            }
    return params


# ---- experts ------------------------------------------------------------------------------------
# The mixture-of-experts layer (GShard section 3.1, Algorithm 2).


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
    hidden = (
        jax.nn.silu(hidden) * into(x, weights["expert_linear"])
        if "expert_linear" in weights
        else jax.nn.relu(hidden)
    )
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
