"""Transformers in bfloat16 with float32 weights, as they are written every day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.steps.program import Mark, aval

BF16 = jnp.bfloat16

Attend = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]
"""`attend(q, k, v, causal)` over (batch, length, heads, features)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder.

    Arguments:
        layers, width, heads, hidden, vocabulary: of the model; `hidden` of the feed-forward layer.
        batch, length: of the tokens.
        gated: SwiGLU in place of GELU.
        scanned: the layers are one `lax.scan` over stacked weights, each recomputed backward.
        causal: whether a position sees only those before it.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    gated: bool = False
    scanned: bool = False
    causal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Which mesh axes the expert splits what over; None where it is whole.

    Arguments:
        batch: the examples.
        length: the positions between the layers.
        queries: the positions inside of the layers, keys and values excepted.
        tensor: heads, hidden units and the vocabulary, of weights and activations.
        weights: the other dim of each matrix, gathered before use (FSDP).
    """

    batch: Any = None
    length: Any = None
    queries: Any = None
    tensor: Any = None
    weights: Any = None


def weights_of(s: Shape) -> Any:
    """Shapes of the weights."""
    d, k = s.width, s.width // s.heads
    block = {
        "norm1": (d,),
        "qkv": (d, 3, s.heads, k),
        "out": (s.heads, k, d),
        "norm2": (d,),
        "up": (d, s.hidden),
        **({"gate": (d, s.hidden)} if s.gated else {}),
        "down": (s.hidden, d),
    }
    if s.scanned:
        blocks: Any = {name: aval(s.layers, *shape) for name, shape in block.items()}
    else:
        blocks = [{name: aval(*shape) for name, shape in block.items()} for _ in range(s.layers)]
    return {"embed": aval(s.vocabulary, d), "blocks": blocks, "norm": aval(d)}


def specs_of(s: Shape, a: Axes) -> Any:
    """How the expert shards the weights."""
    block = {
        "norm1": (None,),
        "qkv": (a.weights, None, a.tensor, None),
        "out": (a.tensor, None, a.weights),
        "norm2": (None,),
        "up": (a.weights, a.tensor),
        **({"gate": (a.weights, a.tensor)} if s.gated else {}),
        "down": (a.tensor, a.weights),
    }
    if s.scanned:
        blocks: Any = {name: P(None, *dims) for name, dims in block.items()}
    else:
        blocks = [{name: P(*dims) for name, dims in block.items()} for _ in range(s.layers)]
    return {"embed": P(a.tensor, a.weights), "blocks": blocks, "norm": P(None)}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of `x` (batch, length, heads, features)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Softmax attention over (batch, length, heads, features), scores in float32."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        n = q.shape[1]
        scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e30)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(BF16), v)


def attended(
    p: Any, x: jax.Array, s: Shape, a: Axes, mark: Mark, attend: Attend = attention
) -> jax.Array:
    """The first half of a layer: `x` (batch, length, width) with its attention added."""
    at = jnp.arange(x.shape[1])
    h = rms_norm(x, p["norm1"])
    qkv = jnp.einsum("bsd,dthk->tbshk", h, p["qkv"].astype(BF16))
    q = mark(qkv[0], a.batch, a.queries, a.tensor, None)
    k, v = (mark(y, a.batch, None, a.tensor, None) for y in qkv[1:])
    o = attend(rotated(q, at), rotated(k, at), v, s.causal)
    o = mark(o, a.batch, a.queries, a.tensor, None)
    return mark(x + jnp.einsum("bshk,hkd->bsd", o, p["out"].astype(BF16)), a.batch, a.length, None)


def fed_forward(p: Any, x: jax.Array, s: Shape, a: Axes, mark: Mark) -> jax.Array:
    """The second half of a layer: `x` with its feed-forward layer added."""
    h = rms_norm(x, p["norm2"])
    up = mark(h @ p["up"].astype(BF16), a.batch, a.queries, a.tensor)
    if s.gated:
        up = up * jax.nn.silu(mark(h @ p["gate"].astype(BF16), a.batch, a.queries, a.tensor))
    else:
        up = jax.nn.gelu(up)
    return mark(x + up @ p["down"].astype(BF16), a.batch, a.length, None)


def block(
    p: Any, x: jax.Array, s: Shape, a: Axes, mark: Mark, attend: Attend = attention
) -> jax.Array:
    """One layer of `x` (batch, length, width) in bfloat16."""
    return fed_forward(p, attended(p, x, s, a, mark, attend), s, a, mark)


def layers(params: Any, x: jax.Array, s: Shape, a: Axes, mark: Mark) -> jax.Array:
    """All layers, one after the other or as a scan."""
    if not s.scanned:
        for p in params:
            x = block(p, x, s, a, mark)
        return x

    @jax.checkpoint
    def body(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return block(p, x, s, a, mark), None

    return jax.lax.scan(body, x, params)[0]


def next_token_loss(params: Any, x: jax.Array, tokens: jax.Array, a: Axes, mark: Mark) -> jax.Array:
    """Mean cross entropy of the next token, from the last layer's result."""
    x = rms_norm(x, params["norm"])
    logits = jnp.einsum(
        "bsd,vd->bsv", x, params["embed"].astype(BF16), preferred_element_type=jnp.float32
    )
    logits = mark(logits, a.batch, a.queries, a.tensor)
    picked = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - picked)


def language_model_loss(s: Shape, a: Axes) -> Any:
    """`loss(mark)(params, tokens)`: mean cross entropy of the next token, by the embedding."""

    def of(mark: Mark) -> Any:
        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            x = mark(params["embed"].astype(BF16)[tokens], a.batch, a.length, None)
            return next_token_loss(params, layers(params["blocks"], x, s, a, mark), tokens, a, mark)

        return loss

    return of


def pooled(params: Any, x: jax.Array, s: Shape, a: Axes, mark: Mark) -> jax.Array:
    """The mean over positions of an encoder's output, in float32: (batch, width)."""
    x = rms_norm(layers(params["blocks"], x, s, a, mark), params["norm"])
    return jnp.mean(x.astype(jnp.float32), 1)


def classifier_loss(s: Shape, a: Axes) -> Any:
    """`loss(mark)(params, patches, labels)`: a vision transformer; `vocabulary` is the number of
    classes."""

    def of(mark: Mark) -> Any:
        def loss(params: Any, patches: jax.Array, labels: jax.Array) -> jax.Array:
            x = mark(patches.astype(BF16) @ params["patch"].astype(BF16), a.batch, None, None)
            logits = mark(pooled(params, x, s, a, mark) @ params["embed"].T, a.batch, None)
            picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

        return loss

    return of


def contrastive_loss(image: Shape, text: Shape, a: Axes) -> Any:
    """`loss(mark)(params, patches, tokens)`: each image against the texts of the whole batch, and
    each text against the images."""

    def of(mark: Mark) -> Any:
        def loss(params: Any, patches: jax.Array, tokens: jax.Array) -> jax.Array:
            p, q = params["image"], params["text"]
            x = mark(patches.astype(BF16) @ p["patch"].astype(BF16), a.batch, None, None)
            y = mark(q["embed"].astype(BF16)[tokens], a.batch, None, None)
            u, v = pooled(p, x, image, a, mark), pooled(q, y, text, a, mark)
            u, v = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (u, v))
            u, v = mark(u, a.batch, None), mark(v, a.batch, None)
            here = mark(20 * u @ mark(v, None, None).T, a.batch, None)
            there = mark(20 * v @ mark(u, None, None).T, a.batch, None)
            pairs = 20 * jnp.sum(u * v, -1)
            sums = jax.nn.logsumexp(here, -1) + jax.nn.logsumexp(there, -1)
            return jnp.mean(sums / 2 - pairs)

        return loss

    return of
