"""The layer pairs of one side of the model under one scan, in training and in decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sbp.moe.config import PAD, ModelConfig
from sbp.moe.experts import moe_feed_forward
from sbp.moe.gating import GatingMetrics, RouterLosses
from sbp.moe.layers import (
    KeysValues,
    Rotary,
    attention,
    cast_weights,
    dropout,
    feed_forward,
    keys_values,
    places,
    rms_norm,
    same_segment,
    subkey,
)
from sbp.moe.pipeline import Pipeline
from sbp.moe.sharding import Sharding

Tree = Any
Array = Any  # a jax.Array inside a step, a numpy array outside


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

    def run(self, params: Tree, x: jax.Array) -> tuple[jax.Array, RouterLosses, GatingMetrics]:
        """All layers.

        Arguments:
          params: layer pairs, leaves stacked on dim 0.
          x: [G, S, M].

        Returns:
          x [G, S, M]; auxiliary losses, leaves [L]; counts stacked on dim 0.
        """
        layers = params, jnp.arange(jax.tree.leaves(params)[0].shape[0])
        if self.sharding.pipeline is not None:
            return self._in_stages(self.sharding.pipeline, layers, x)
        return self._layers(layers, x)

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
            part = dataclasses.replace(
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
            wide = p["wide"]
            none = jnp.zeros((), jnp.float32)
            tokens = jnp.sum(mask.astype(jnp.float32))
            load = jnp.zeros((1,), jnp.float32)
            metrics = GatingMetrics(tokens, load, none, none, none, load, none)
            y = feed_forward(wide, rms_norm(x, wide["norm"]))
            return y, RouterLosses(none, none), metrics
        normed, key, sharding = rms_norm(x, p["moe"]["norm"]), subkey(place, 3), self.sharding
        return moe_feed_forward(p["moe"], normed, mask, self.cfg, key=key, sharding=sharding)

    def _attend(
        self, x: jax.Array, p: Tree, name: str, place: jax.Array | None, cache: Cache | None
    ) -> tuple[jax.Array, KeysValues]:
        """Attention to the side's own tokens, causal in a decoder, and then to its memory; and the
        keys and values of the own tokens, those of the steps before included."""
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
        if cache is not None:
            seen = cache.memory[f"cross{name}"]
        else:
            seen = keys_values(weights, self.memory.values, allowed.shape[1])
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
