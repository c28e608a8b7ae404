"""Decoding with a cache: greedy and beam search.

Dims besides the model's: k hypotheses of a sentence, U slots of a cache.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sbp.moe.config import BOS, EOS, PAD, ModelConfig
from sbp.moe.layers import (
    KeysValues,
    cast_weights,
    keys_values,
    places,
    signal_of,
    wide_dtype,
)
from sbp.moe.model import Cache, Memory, Stack, embed, encode, logits_of
from sbp.moe.sharding import PLAIN, Sharding

ALPHA = 0.8
"""Of `length_norm`, as in lingvo's GShard models."""


class Hypotheses(NamedTuple):
    """Translations of a batch, the best of each sentence first.

    Attributes:
      tokens: [G, n, k, T] ids, PAD behind EOS; PAD alone where there are fewer than k.
      scores: [G, n, k] log-probability / `length_norm`; -inf where there are fewer than k.
    """

    tokens: jax.Array
    scores: jax.Array


class _Beam(NamedTuple):
    """The state of the search between two steps.

    Attributes:
      open: hypotheses that go on: the log-probabilities are their scores, -inf where there is none.
      last: [G, n, k] their last tokens.
      visible: [G, n, k, U] the slots of the cache with their tokens.
      closed: the best that have ended.
      cache: keys and values.
    """

    open: Hypotheses
    last: jax.Array
    visible: jax.Array
    closed: Hypotheses
    cache: Cache


def length_norm(length: Any, alpha: float) -> Any:
    """What log-probabilities are divided by: ((5 + length) / 6) ** alpha (GNMT, Wu et al. 2016,
    equation 14), with EOS counted.

    >>> length_norm(7, 1.0)
    2.0
    """
    return ((5 + length) / 6) ** alpha


def dropless(cfg: ModelConfig) -> ModelConfig:
    """The model with a slot of each expert for each token of a group: what becomes of a sentence
    does not depend on those beside it."""
    return dataclasses.replace(cfg, eval_capacity_factor_per_choice=float(max(cfg.experts, 1)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class BeamSearch:
    """Beam search (GNMT, Wu et al. 2016, section 7, without the coverage penalty).

    In a step, the k best extensions of all open hypotheses are kept; those that end with EOS, or
    are as long as the model's targets, are closed. The search of a sentence ends when no open
    hypothesis can come among the k best closed ones. A beam of 1 is greedy decoding. No
    hypothesis is extended by PAD or BOS.

    Experts have no capacity in a step: each token reaches all experts that it chooses. The same
    holds in the encoder, unless its experts choose (router "expert_choice").

    Attributes:
      cfg: the model.
      sharding: the mesh axes of groups and experts.
      beam: k.
      alpha: of `length_norm`, at least 0.
      reorder: keep a cache for each hypothesis and permute it with the hypotheses. Without, the
        hypotheses of a sentence share one cache, with k slots for each step, and what is permuted
        is a mask of the slots that each one sees (GShard, appendix A.1).
    """

    cfg: ModelConfig
    sharding: Sharding = PLAIN
    beam: int = 1
    alpha: float = ALPHA
    reorder: bool = False

    def __call__(self, params: Any, source: jax.Array) -> Hypotheses:
        """Translate sources [G, n, T_source]; one of padding alone has no hypothesis."""
        cfg, memory, before = self.cfg, None, 0
        if cfg.encoder_layers:
            wide = cfg if cfg.router == "expert_choice" else dropless(cfg)
            memory = Memory(encode(params, source, wide, sharding=self.sharding)[0], source)
        else:
            before = jnp.sum(source != PAD, axis=-1, keepdims=True, dtype=jnp.int32)
        length = cfg.target_length
        signal = signal_of(cfg, cfg.prefix_length + length, None)

        def goes_on(beam: _Beam) -> jax.Array:
            # Log-probabilities only fall, and no norm is larger than the last one.
            hope = jnp.max(beam.open.scores, axis=-1) / length_norm(length, self.alpha)
            left = hope > jnp.min(beam.closed.scores, axis=-1)
            return (beam.cache.place < length) & jnp.any(left)

        def step(beam: _Beam) -> _Beam:
            place = before + beam.cache.place
            here = None if signal is None else signal[place]
            x = embed(params["target_embedding"], beam.last, cfg, None, self.sharding, here)
            logits, visible, cache = self._decode(params, x, beam, memory, place)
            return self._extend(beam, logits, visible, cache)

        return jax.lax.while_loop(goes_on, step, self._start(params, source, memory)).closed

    def _start(self, params: Any, source: jax.Array, memory: Memory | None) -> _Beam:
        """Before the first step: BOS is the one open hypothesis of a sentence."""
        cfg, k, length = self.cfg, self.beam, self.cfg.target_length
        (groups, sequences, _), dtype = source.shape, jnp.dtype(cfg.dtype)
        first = jnp.any(source != PAD, axis=-1)[..., None] & (jnp.arange(k) == 0)
        visible = jnp.zeros((groups, sequences, k, length * k), bool)
        if memory is None:
            prefix = jnp.broadcast_to((source != PAD)[:, :, None], (*first.shape, source.shape[-1]))
            visible = jnp.concatenate([prefix, visible], axis=-1)
        none = jnp.full((groups, sequences, k), -jnp.inf, wide_dtype(dtype))
        tokens = jnp.full((groups, sequences, k, length), PAD, jnp.int32)
        return _Beam(
            open=Hypotheses(tokens, jnp.where(first, 0.0, none)),
            last=jnp.where(first, BOS, PAD).astype(jnp.int32),
            visible=visible,
            closed=Hypotheses(tokens, none),
            cache=self._cache(params["decoder"], source, memory, params["target_embedding"]),
        )

    def _cache(
        self, layers: Any, source: jax.Array, memory: Memory | None, table: jax.Array
    ) -> Cache:
        """The cache before the first step: keys and values of the encoder's output, or of the
        source as a prefix."""
        cfg, k, dtype = self.cfg, self.beam, jnp.dtype(self.cfg.dtype)
        groups, sequences, length = source.shape
        slots = cfg.prefix_length + cfg.target_length * (1 if self.reorder else k)
        rows = sequences * k if self.reorder and memory else sequences
        names = [name for name in layers if name.startswith("attention")]
        count = layers[names[0]]["key"].shape[0]
        empty = jnp.zeros((count, groups, rows, cfg.key_heads, slots, cfg.head_dim), dtype)
        none = jnp.zeros((), jnp.int32)
        cache = Cache({name: KeysValues(empty, empty) for name in names}, {}, none, none)
        if memory is not None:
            cross = {name: w for name, w in layers.items() if name.startswith("cross")}
            seen = jax.lax.map(
                lambda layer: {
                    name: keys_values(w, memory.values, sequences)
                    for name, w in cast_weights(layer, dtype).items()
                },
                cross,
            )
            return cache._replace(memory=seen)
        pairs = (source != PAD).astype(jnp.int32)
        before = jnp.arange(slots) <= jnp.arange(length)[:, None]
        real = jnp.pad(source != PAD, ((0, 0), (0, 0), (0, slots - length)))
        _, cache = Stack(
            cfg=dropless(cfg),
            tokens=source,
            key=None,
            sharding=self.sharding,
            visible=real[:, :, None] & before,
            places=places(pairs),
        ).step(
            layers,
            embed(table, source, cfg, None, self.sharding, signal_of(cfg, length, pairs)),
            cache,
        )
        if self.reorder:
            cache = cache._replace(own=jax.tree.map(lambda x: jnp.repeat(x, k, axis=2), cache.own))
        return cache._replace(place=none, first=none + length)

    def _decode(
        self,
        params: Any,
        x: jax.Array,
        beam: _Beam,
        memory: Memory | None,
        here: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Logits [G, n, k, V] of what follows the last tokens, embedded as `x` [G, n * k, M], at
        the places `here`; the slots that the hypotheses see, their last tokens included; the cache
        with these."""
        (groups, sequences, k, slots), place = beam.visible.shape, beam.cache.place
        slot = jnp.arange(slots) - beam.cache.first - place * k
        visible = beam.visible | (slot == jnp.arange(k)[:, None])
        shown = visible
        if self.reorder:
            past = jnp.arange(self.cfg.target_length) <= place
            past = jnp.broadcast_to(past, (groups, sequences, k, past.size))
            prefix = beam.visible[..., : self.cfg.prefix_length]
            shown = jnp.concatenate([prefix, past], axis=-1)
            shown = shown.reshape(groups, sequences * k, 1, -1)
            here = jnp.repeat(here, k, axis=1) if here.ndim else here
        x, cache = Stack(
            cfg=dropless(self.cfg.decoder()),
            tokens=beam.last,
            key=None,
            sharding=self.sharding,
            memory=memory,
            visible=shown,
            places=here,
        ).step(params["decoder"], x, beam.cache)
        logits = logits_of(params, x, self.cfg)
        return logits.reshape(groups, sequences, k, -1), visible, cache

    def _extend(self, beam: _Beam, logits: jax.Array, visible: jax.Array, cache: Cache) -> _Beam:
        """The k best of all extensions by a token."""
        k, vocabulary = self.beam, logits.shape[-1]
        logits = jnp.where(jnp.arange(vocabulary) == PAD, -jnp.inf, logits)
        logits = jnp.where(jnp.arange(vocabulary) == BOS, -jnp.inf, logits)
        logs = beam.open.scores[..., None] + jax.nn.log_softmax(logits, axis=-1)
        logs, index = jax.lax.top_k(logs.reshape(*logs.shape[:2], -1), k)
        parent, token = index // vocabulary, index % vocabulary
        steps, place = jnp.arange(self.cfg.target_length), beam.cache.place
        tokens = _rows(beam.open.tokens, parent)
        tokens = jnp.where(steps == place, token[..., None], tokens)
        ends = (token == EOS) | (place == self.cfg.target_length - 1)
        said = (place + 1).astype(logs.dtype)  # an int32 would make the norm float32
        scores = jnp.where(ends, logs / length_norm(said, self.alpha), -jnp.inf)
        scores = jnp.concatenate([beam.closed.scores, scores], axis=-1)
        scores, kept = jax.lax.top_k(scores, k)
        closed = _rows(jnp.concatenate([beam.closed.tokens, tokens], axis=2), kept)
        closed = jnp.where((scores > -jnp.inf)[..., None], closed, PAD)
        logs = jnp.where(ends, -jnp.inf, logs)
        if self.reorder:
            cache = cache._replace(own=jax.tree.map(lambda x: _permute(x, parent), cache.own))
        return _Beam(
            open=Hypotheses(tokens, logs),
            last=jnp.where(logs > -jnp.inf, token, PAD),
            visible=_rows(visible, parent),
            closed=Hypotheses(closed, scores),
            cache=cache,
        )


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of each sentence: [G, n, K, ..] by [G, n, k] to [G, n, k, ..]."""
    return jnp.take_along_axis(x, index[..., None], axis=2)


def _permute(x: jax.Array, parent: jax.Array) -> jax.Array:
    """A cache [L, G, n * k, A, T, D] of hypotheses with the caches of their parents [G, n, k]."""
    rows = x.reshape(*x.shape[:1], *parent.shape, *x.shape[3:])
    return jnp.take_along_axis(rows, parent[None, ..., None, None, None], axis=3).reshape(x.shape)
