"""Decoding one token for each sequence of a batch, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.steps.program import Mark, Step, aval
from benchmarks.steps.transformer import (
    BF16,
    Axes,
    Shape,
    fed_forward,
    rms_norm,
    rotated,
    specs_of,
    weights_of,
)


def _attended(
    p: Any, cache: Any, x: jax.Array, position: jax.Array, a: Axes, mark: Mark
) -> tuple[jax.Array, Any]:
    """`x` (batch, 1, width) with its attention to the cache added, and the longer cache."""
    at = position[None]
    qkv = jnp.einsum("bsd,dthk->tbshk", rms_norm(x, p["norm1"]), p["qkv"])
    q, k, v = (mark(y, a.batch, None, a.tensor, None) for y in qkv)
    new = {"k": rotated(k, at), "v": v}
    cache = {
        name: mark(
            jax.lax.dynamic_update_slice_in_dim(cache[name], new[name], position, 1),
            a.batch,
            None,
            a.tensor,
            None,
        )
        for name in cache
    }
    scores = jnp.einsum(
        "bqhk,bshk->bhqs", rotated(q, at), cache["k"], preferred_element_type=jnp.float32
    )
    seen = jnp.arange(scores.shape[-1]) <= position
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -1e30)
    o = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(BF16), cache["v"])
    o = mark(o, a.batch, None, a.tensor, None)
    return mark(x + jnp.einsum("bshk,hkd->bsd", o, p["out"]), a.batch, None, None), cache


def decoding_step(s: Shape, a: Axes) -> Callable[[Mark], Callable[..., Any]]:
    """`step(params, caches, tokens, position) -> (tokens, caches)`, the likeliest next tokens."""

    def of(mark: Mark) -> Callable[..., Any]:
        def step(params: Any, caches: Any, tokens: jax.Array, position: jax.Array) -> Any:
            x = mark(params["embed"][tokens][:, None], a.batch, None, None)
            longer = []
            for p, cache in zip(params["blocks"], caches, strict=True):
                x, cache = _attended(p, cache, x, position, a, mark)
                x = fed_forward(p, x, s, a, mark)
                longer.append(cache)
            x = rms_norm(x, params["norm"])[:, 0]
            logits = mark(
                jnp.einsum("bd,vd->bv", x, params["embed"], preferred_element_type=jnp.float32),
                a.batch,
                a.tensor,
            )
            return jnp.argmax(logits, -1).astype(jnp.int32), longer

        return step

    return of


DECODER = Shape(
    layers=8,
    width=2048,
    heads=16,
    hidden=5632,
    vocabulary=32768,
    batch=64,
    length=2048,
    gated=True,
)


def decoding(s: Shape = DECODER) -> Step:
    """Decoding with a cache. Weights in bfloat16 and the cache split by heads, batch split."""
    a = Axes(batch="d", tensor="t")
    params = jax.tree.map(lambda x: aval(*x.shape, dtype=BF16), weights_of(s))
    shape, spec = (s.batch, s.length, s.heads, s.width // s.heads), P("d", None, "t", None)
    caches = [{name: aval(*shape, dtype=BF16) for name in "kv"} for _ in range(s.layers)]
    specs = [{name: spec for name in "kv"} for _ in range(s.layers)]
    return Step(
        make=decoding_step(s, a),
        avals=(params, caches, aval(s.batch, dtype="int32"), aval(dtype="int32")),
        in_specs=(specs_of(s, a), specs, P("d"), P()),
        out_specs=(P("d"), specs),
        mesh=(("d", 4), ("t", 4)),
        donate=(1,),
    )
