"""The GShard Transformer, encoder-decoder or decoder-only: parameters, forward pass and loss."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sbp.moe.config import PAD, ModelConfig
from sbp.moe.layers import (
    Array,
    GatingMetrics,
    KeysValues,
    Rotary,
    RouterLosses,
    attention,
    cast_weights,
    dropout,
    feed_forward,
    keys_values,
    moe_feed_forward,
    places,
    rms_norm,
    same_segment,
    signal_of,
    subkey,
    wide_dtype,
)
from sbp.moe.routers import ROUTERS
from sbp.moe.sharding import PLAIN, Pipeline, Sharding, Tree

# ---- stacks of layers ---------------------------------------------------------------------------
# The layer pairs of one side of the model under one scan, in training and in decoding.


class Memory(NamedTuple):
    """What a decoder attends to.

    Attributes:
      values: [G, S', M], the encoder's output.
      tokens: [G, n, T'], the ids it was computed from, for the padding mask.
      segments: `Segments` of both sides; None without packing.
    """

    values: Array
    tokens: Array
    segments: Any = None


class Cache(NamedTuple):
    """Keys and values that a decoder keeps from step to step: by name of the attention, of one
    layer pair, or of all stacked on dim 0.

    Attributes:
      own: of the target tokens so far, [G, n, A, slots, D].
      memory: of the source, which stay as they are.
      place: the step, which says the slots that are written next.
      first: the slot that the first step writes; those before it are of a prefix.
    """

    own: Mapping[str, KeysValues]
    memory: Mapping[str, KeysValues]
    place: jax.Array
    first: jax.Array

    def write(self, name: str, new: KeysValues) -> KeysValues:
        """The cache of one attention with the keys and values of this step."""
        slot = self.first + self.place * new.keys.shape[3]
        return jax.tree.map(
            lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, slot, 3),
            self.own[name],
            new,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Layer pairs (attention, dense feed-forward; attention, MoE) of one side, under one scan.

    Attributes:
      cfg: the model.
      tokens: [G, n, T] ids of the side's tokens, for the padding masks.
      key: randomness of dropout and routing; None evaluates.
      sharding: the mesh axes of groups and experts.
      causal: whether tokens see only those before them, as in a decoder.
      memory: the encoder's output, which a decoder attends to; None without one.
      visible: in a step of decoding, the slots of the cache that each token attends to.
      places: in a step of decoding, the places of the tokens, [G, n, T] or less.
      segments: [G, n, T], the pair that each token is of; None without packing.
    """

    cfg: ModelConfig
    tokens: Array
    key: jax.Array | None
    sharding: Sharding
    causal: bool = False
    memory: Memory | None = None
    visible: Array | None = None
    places: Array | None = None
    segments: Array | None = None

    def run(
        self, table: jax.Array, params: Tree, place: int
    ) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
        """All layers on the embedded tokens of the side.

        Arguments:
          table: a row for each id.
          params: layer pairs, leaves stacked on dim 0.
          place: the number of the subkey for the embeddings' dropout. The layers' is the next.

        Returns:
          x [G, S, M]; auxiliary losses, leaves [L]; counts stacked on dim 0.
        """
        signal = signal_of(self.cfg, self.tokens.shape[-1], self.segments)
        x = embed(table, self.tokens, self.cfg, subkey(self.key, place), self.sharding, signal)
        inner = replace(self, key=subkey(self.key, place + 1))
        layers = params, jnp.arange(jax.tree.leaves(params)[0].shape[0])
        return (
            inner._in_stages(self.sharding.pipeline, layers, x)
            if self.sharding.pipeline is not None
            else inner._layers(layers, x)
        )

    def _layers(
        self, layers: tuple[Tree, jax.Array], x: jax.Array
    ) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
        remat = self.cfg.remat and self.key is not None
        body = jax.checkpoint(self._pair) if remat else self._pair
        x, (aux, metrics, _) = jax.lax.scan(body, x, layers)
        return x, aux, metrics

    def _in_stages(
        self, pipeline: Pipeline, layers: tuple[Tree, jax.Array], x: jax.Array
    ) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
        """All layers in stages, on one microbatch after the other."""

        def stage(layers: Any, x: jax.Array, beside: Any, index: jax.Array) -> Any:
            tokens, memory, segments = beside
            part = replace(
                self, tokens=tokens, memory=memory, segments=segments, key=subkey(self.key, index)
            )
            x, aux, metrics = part._layers(layers, x)
            return x, (aux, metrics)

        beside = pipeline.split((self.tokens, self.memory, self.segments))
        x, (aux, metrics) = pipeline.run(stage, layers, pipeline.split(x), beside)
        aux = jax.tree.map(lambda a: a / pipeline.microbatches, aux)  # means over groups
        return self.sharding.split_groups(pipeline.join(x)), aux, metrics

    def step(self, params: Tree, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """All layers on the tokens of one step of decoding [G, S, M], and the cache after it."""

        def pair(x: jax.Array, layer: tuple[Tree, Any, Any]) -> tuple[jax.Array, Any]:
            x, (_, _, own) = self._pair(x, (layer[0], 0), Cache(*layer[1:], *cache[2:]))
            return x, own

        x, own = jax.lax.scan(pair, x, (params, cache.own, cache.memory))
        return x, cache._replace(own=own, place=cache.place + 1)

    def _pair(
        self, x: jax.Array, layer: tuple[Tree, jax.Array | int], cache: Cache | None = None
    ) -> tuple[jax.Array, tuple[RouterLosses, GatingMetrics, Mapping[str, KeysValues]]]:
        p, index = cast_weights(layer[0], x.dtype), layer[1]
        place, own = subkey(self.key, index), {}
        if "dense" in p:
            x, own["attention1"] = self._attend(x, p, "1", subkey(place, 0), cache)
            dense = feed_forward(p["dense"], rms_norm(x, p["dense"]["norm"]))
            x = self._residual(x, dense, subkey(place, 1))
        x, own["attention2"] = self._attend(x, p, "2", subkey(place, 2), cache)
        y, aux, metrics = self._experts(x, p, place)
        x = self.sharding.split_groups(self._residual(x, y, subkey(place, 4)))
        return x, (aux, metrics, own if cache is not None else {})

    def _experts(
        self, x: jax.Array, p: Tree, place: jax.Array | None
    ) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
        """The MoE layer, or what a dense model has in its place."""
        mask = (self.tokens != PAD).reshape(x.shape[:2])
        if not self.cfg.experts:
            none = jnp.zeros((), jnp.float32)
            tokens = jnp.sum(mask.astype(jnp.float32))
            load = jnp.zeros((1,), jnp.float32)
            metrics = GatingMetrics(tokens, load, none, none, none, load, none)
            y = feed_forward(p["wide"], rms_norm(x, p["wide"]["norm"]))
            return y, RouterLosses(none, none), metrics
        normed, key, sharding = rms_norm(x, p["moe"]["norm"]), subkey(place, 3), self.sharding
        return moe_feed_forward(p["moe"], normed, mask, self.cfg, key=key, sharding=sharding)

    def _attend(
        self, x: jax.Array, p: Tree, name: str, place: jax.Array | None, cache: Cache | None
    ) -> tuple[jax.Array, KeysValues]:
        """Attention to the side's own tokens, causal in a decoder, and then to its memory. Also
        returns the keys and values of the own tokens of this step and of all earlier steps."""
        weights, rate = p[f"attention{name}"], self.cfg.dropout
        normed, allowed = rms_norm(x, weights["norm"]), self._visible()
        rotary = self._rotary()
        own = keys_values(weights, normed, allowed.shape[1], rotary)
        if cache is not None:
            own = cache.write(f"attention{name}", own)
        drop = partial(dropout, rate=rate, key=subkey(place, 0))
        branch = attention(weights, normed, own, allowed, rotary=rotary, drop=drop)
        x = self._residual(x, branch, subkey(place, 1))
        if self.memory is None:
            return x, own
        weights, allowed = p[f"cross{name}"], (self.memory.tokens != PAD)[:, :, None, :]
        if (both := self.memory.segments) is not None:
            allowed &= same_segment(both.target, both.source)
        normed = rms_norm(x, weights["norm"])
        seen = (
            keys_values(weights, self.memory.values, allowed.shape[1])
            if cache is None
            else cache.memory[f"cross{name}"]
        )
        drop = partial(dropout, rate=rate, key=subkey(place, 2))
        branch = attention(weights, normed, seen, allowed, drop=drop)
        return self._residual(x, branch, subkey(place, 3)), own

    def _visible(self) -> jax.Array:
        """[G, n, T or 1, T'] which own tokens each token may look at."""
        if self.visible is not None:
            return self.visible
        allowed = (self.tokens != PAD)[:, :, None, :]
        if self.segments is not None:
            allowed &= same_segment(self.segments, self.segments)
        if not self.causal:
            return allowed
        steps = jnp.arange(self.tokens.shape[-1])
        return allowed & (steps[:, None] >= steps[None, :])

    def _rotary(self) -> Rotary | None:
        """The places of the own tokens; None where their embeddings have them."""
        if self.cfg.position != "rotary":
            return None
        if self.places is not None:
            here = jnp.atleast_1d(self.places)
        elif self.segments is not None:
            here = places(self.segments)
        else:
            here = jnp.arange(self.tokens.shape[-1])
        return Rotary(here, self.cfg.rotary_base)

    def _residual(self, x: jax.Array, branch: jax.Array, place: jax.Array | None) -> jax.Array:
        return x + dropout(branch, self.cfg.dropout, place)


# ---- the model ----------------------------------------------------------------------------------


class Batch(NamedTuple):
    """One batch of token ids, int32, 0 where padded.

    Attributes:
      source: [G, n, T_source].
      target_in: [G, n, T_target], the target shifted right behind BOS.
      target_out: [G, n, T_target], what `target_in` should predict, EOS last.
      segments: `Segments`, where a row has several pairs; else None.
    """

    source: Array
    target_in: Array
    target_out: Array
    segments: Any = None


class Metrics(NamedTuple):
    """What a forward pass reports; `loss` leaves the auxiliary loss out, as the paper reports it.

    Attributes:
      loss: label-smoothed cross-entropy per target token, nats.
      nll: plain cross-entropy per target token, nats.
      aux: auxiliary loss, mean over MoE layers.
      correct: fraction of target tokens predicted right.
      encoder, decoder: counts, stacked over that side's MoE layers [L] or [L, E]; `encoder` is None
        in a decoder-only model.
      grad_norm: of all gradients together, before clipping; of a training step only.
      skipped_step: 1 where a training step changed nothing, since a value was not finite.
      skipped_steps: how many of all steps so far did.
      learning_rate: of the step.
      layer_aux: auxiliary loss of each MoE layer, the encoder's first.
    """

    loss: Array
    nll: Array
    aux: Array
    correct: Array
    encoder: Any
    decoder: GatingMetrics
    grad_norm: Array = 0.0
    skipped_step: Array = 0.0
    skipped_steps: Array = 0.0
    learning_rate: Array = 0.0
    layer_aux: Array = ()

    @property
    def sides(self) -> Mapping[str, GatingMetrics]:
        """The counts of each side that the model has, by its name."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: side for name, side in both.items() if side is not None}


def init_params(key: jax.Array, cfg: ModelConfig) -> Tree:
    """Draw the parameters.

    Returns:
      A dict: `source_embedding` [Vs, M], `target_embedding` [Vt, M], `logits` [M, Vt], `encoder`
      and `decoder` (layer pairs, each leaf stacked on a leading dim), `encoder_norm` and
      `decoder_norm` [M]; a decoder-only model has neither the encoder's nor a `source_embedding`.
      Scales follow lingvo: tables 1, query (M * D)^-0.5, key and value M^-0.5,
      output (A * D)^-0.5, feed-forward, gate and experts uniform of variance 1 / fan_in.
    """
    draw, m = Draw(cfg=cfg, keys=iter(jax.random.split(key, 64))), cfg.model_dim
    encodes = bool(cfg.encoder_layers)
    # The order of the entries is the order of the keys.
    return {
        **({"source_embedding": draw.normal(1.0, cfg.source_vocab, m)} if encodes else {}),
        "target_embedding": draw.normal(1.0, cfg.target_vocab, m),
        **({"encoder": draw.stack(cfg.encoder_layers, cfg.router, cross=False)} if encodes else {}),
        **({"encoder_norm": draw.ones(m)} if encodes else {}),
        "decoder": draw.stack(cfg.decoder_layers, cfg.decoder().router, cross=encodes),
        "decoder_norm": draw.ones(m),
        "logits": draw.normal(1.0, m, cfg.target_vocab),
    }


def embed(
    table: jax.Array,
    tokens: Array,
    cfg: ModelConfig,
    key: jax.Array | None,
    sharding: Sharding,
    signal: jax.Array | None,
) -> jax.Array:
    """Rows of the table plus the signal [..., M] of their positions, if any: tokens [G, n, T] to
    [G, S, M]."""
    groups, sequences, length = tokens.shape
    x = jnp.take(table, tokens, axis=0).astype(cfg.dtype)
    if signal is not None:
        x = x + signal.astype(x.dtype)
    x = sharding.split_groups(x.reshape(groups, sequences * length, cfg.model_dim))
    return dropout(x, cfg.dropout, key)


def encode(
    params: Tree,
    source: Array,
    cfg: ModelConfig,
    *,
    key: jax.Array | None = None,
    sharding: Sharding = PLAIN,
    segments: Array | None = None,
) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
    """Source tokens [G, n, T] to memory [G, S, M], auxiliary losses of each layer and counts; `key`
    given means training, and `segments` [G, n, T] that rows hold several sentences."""
    x, aux, metrics = Stack(
        cfg=cfg, tokens=source, key=key, sharding=sharding, segments=segments
    ).run(params["source_embedding"], params["encoder"], 0)
    return rms_norm(x, params["encoder_norm"]), aux, metrics


def decode(
    params: Tree,
    memory: Memory,
    target_in: Array,
    cfg: ModelConfig,
    *,
    key: jax.Array | None = None,
    sharding: Sharding = PLAIN,
) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
    """Target tokens [G, n, T] and memory to logits [G, S, V], auxiliary losses and counts."""
    x, aux, metrics = Stack(
        cfg=cfg.decoder(),
        tokens=target_in,
        key=key,
        sharding=sharding,
        causal=True,
        memory=memory,
        segments=memory.segments.target if memory.segments else None,
    ).run(params["target_embedding"], params["decoder"], 2)
    return logits_of(params, x, cfg, key), aux, metrics


def continue_prefix(
    params: Tree,
    batch: Batch,
    cfg: ModelConfig,
    *,
    key: jax.Array | None = None,
    sharding: Sharding = PLAIN,
) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
    """The decoder-only model: sources, which may be padding alone, and targets of a batch, in one
    row, to logits [G, n * T_target, V] of the targets, auxiliary losses and counts. Each token sees
    those of its pair that come before it; padding has no place."""
    source, target_in, segments = batch.source, batch.target_in, batch.segments
    tokens = jnp.concatenate([source, target_in], axis=-1)
    pairs = (tokens != PAD).astype(jnp.int32)
    if segments is not None:
        pairs = jnp.concatenate([segments.source, segments.target], axis=-1)
    x, aux, metrics = Stack(
        cfg=cfg, tokens=tokens, key=key, sharding=sharding, causal=True, segments=pairs
    ).run(params["target_embedding"], params["decoder"], 2)
    x = x.reshape(*tokens.shape, cfg.model_dim)[:, :, source.shape[-1] :]
    x = sharding.split_groups(x.reshape(x.shape[0], -1, cfg.model_dim))
    return logits_of(params, x, cfg, key), aux, metrics


def predict(
    params: Tree,
    batch: Batch,
    cfg: ModelConfig,
    *,
    key: jax.Array | None = None,
    sharding: Sharding = PLAIN,
) -> tuple[jax.Array, RouterLosses, tuple[GatingMetrics | None, GatingMetrics]]:
    """Logits [G, S, V] of a batch's targets, auxiliary losses of all layers, counts of both
    sides."""
    if not cfg.encoder_layers:
        logits, aux, decoder = continue_prefix(params, batch, cfg, key=key, sharding=sharding)
        return logits, aux, (None, decoder)
    own = batch.segments and batch.segments.source
    memory, encoder_aux, encoder = encode(
        params, batch.source, cfg, key=key, sharding=sharding, segments=own
    )
    seen = Memory(memory, batch.source, batch.segments)
    logits, decoder_aux, decoder = decode(
        params, seen, batch.target_in, cfg, key=key, sharding=sharding
    )
    aux = jax.tree.map(lambda *sides: jnp.concatenate(sides), encoder_aux, decoder_aux)
    return logits, aux, (encoder, decoder)


def logits_of(
    params: Tree, x: jax.Array, cfg: ModelConfig, key: jax.Array | None = None
) -> jax.Array:
    """Logits [G, S, V] of what the decoder's layers give, [G, S, M]; `key` given means training."""
    x = dropout(rms_norm(x, params["decoder_norm"]), cfg.dropout, subkey(key, 4))
    logits = jnp.matmul(
        x, params["logits"].astype(x.dtype), preferred_element_type=wide_dtype(x.dtype)
    )
    return logits * cfg.model_dim**-0.5


def loss_fn(
    params: Tree,
    batch: Batch,
    cfg: ModelConfig,
    *,
    key: jax.Array | None = None,
    sharding: Sharding = PLAIN,
    share: tuple[Array, int] | None = None,
) -> tuple[jax.Array, Metrics]:
    """The training loss: label-smoothed cross-entropy plus the weighted auxiliary losses.

    Arguments:
      params: from `init_params`.
      batch: token ids.
      cfg: the model.
      key: randomness of dropout and routing; None evaluates.
      sharding: the mesh axes of groups and experts.
      share: for one of several microbatches, the real target tokens and the number of all of them:
        losses and metrics of the microbatches then add up to those of the batch.

    Returns:
      The total loss, a scalar, and `Metrics`.
    """
    logits, aux, (encoder, decoder) = predict(params, batch, cfg, key=key, sharding=sharding)
    labels = batch.target_out.reshape(logits.shape[:2])
    real = (labels != PAD).astype(logits.dtype)
    tokens, microbatches = share or (jnp.sum(real), 1)
    tokens = jnp.maximum(tokens, 1.0).astype(logits.dtype)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    gold = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = log_z - gold
    # Smoothing mixes in the uniform distribution over the whole vocabulary.
    smoothed = nll + cfg.label_smoothing * (gold - jnp.mean(logits, axis=-1))
    loss = jnp.sum(smoothed * real) / tokens
    aux = jax.tree.map(lambda a: a / microbatches, aux)
    total = (
        loss
        + cfg.aux_coefficient * jnp.sum(aux.balance).astype(loss.dtype)
        + cfg.router_z_loss * jnp.sum(aux.z).astype(loss.dtype)
    )
    hits = (jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype) * real
    return total, Metrics(
        loss=loss,
        nll=jnp.sum(nll * real) / tokens,
        aux=jnp.mean(aux.balance),
        correct=jnp.sum(hits) / tokens,
        encoder=encoder,
        decoder=decoder,
        layer_aux=aux.balance,
    )


# ---- first parameters ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Draws parameters of a model, each with the next key; leaves of layer pairs are stacked on a
    leading dim."""

    cfg: ModelConfig
    keys: Iterator[jax.Array]

    def ones(self, *shape: int) -> jax.Array:
        return jnp.ones(shape, wide_dtype(self.cfg.weight_dtype))

    def normal(self, stddev: float, *shape: int) -> jax.Array:
        return stddev * jax.random.normal(next(self.keys), shape, jnp.dtype(self.cfg.weight_dtype))

    def uniform(self, fan_in: int, *shape: int) -> jax.Array:
        limit = math.sqrt(3.0 / fan_in)
        return jax.random.uniform(
            next(self.keys), shape, jnp.dtype(self.cfg.weight_dtype), -limit, limit
        )

    def attention(self, pairs: int) -> Tree:
        m, a, d, k = self.cfg.model_dim, self.cfg.heads, self.cfg.head_dim, self.cfg.key_heads
        return {
            "norm": self.ones(pairs, m),
            "query": self.normal((m * d) ** -0.5, pairs, m, a, d),
            "key": self.normal(m**-0.5, pairs, m, k, d),
            "value": self.normal(m**-0.5, pairs, m, k, d),
            "output": self.normal((a * d) ** -0.5, pairs, a, d, m),
        }

    def feed_forward(self, pairs: int, hidden: int) -> Tree:
        m = self.cfg.model_dim
        return {
            "norm": self.ones(pairs, m),
            "w_in": self.uniform(m, pairs, m, hidden),
            "w_out": self.uniform(hidden, pairs, hidden, m),
        }

    def experts(self, pairs: int, router: str) -> Tree:
        """The paper's experts and their router; then what other routers have, and other experts."""
        cfg, m, e, h = self.cfg, self.cfg.model_dim, self.cfg.experts, self.cfg.expert_dim
        wide, shared = wide_dtype(cfg.weight_dtype), h * cfg.shared_experts
        inner = ("in", "linear") if cfg.expert_activation == "swiglu" else ("in",)
        others = {name: (e,) if name == "bias" else (m, e) for name in ROUTERS[router].weights}
        return {
            "norm": self.ones(pairs, m),
            "gate": self.uniform(m, pairs, m, e).astype(wide),
            "expert_in": self.uniform(m, pairs, e, m, h),
            "expert_out": self.uniform(h, pairs, e, h, m),
            **{name: jnp.zeros((pairs, *shape), wide) for name, shape in others.items()},
            **({"expert_linear": self.uniform(m, pairs, e, m, h)} if "linear" in inner else {}),
            **{f"shared_{n}": self.uniform(m, pairs, m, shared) for n in inner if shared},
            **({"shared_out": self.uniform(shared, pairs, shared, m)} if shared else {}),
        }

    def stack(self, layers: int, router: str, *, cross: bool) -> Tree:
        """Layer pairs of one side, or layers where all have experts."""
        cfg, pairs = self.cfg, layers // self.cfg.moe_every
        dense, crossed = cfg.moe_every == 2, ("cross1", "cross2")[2 - cfg.moe_every :]
        return {
            **({"attention1": self.attention(pairs)} if dense else {}),
            **({"dense": self.feed_forward(pairs, cfg.ffn_dim)} if dense else {}),
            "attention2": self.attention(pairs),
            **(
                {"moe": self.experts(pairs, router)}
                if cfg.experts
                else {"wide": self.feed_forward(pairs, 2 * cfg.expert_dim)}
            ),
            **{name: self.attention(pairs) for name in crossed if cross},
        }
