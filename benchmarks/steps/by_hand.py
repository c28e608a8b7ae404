"""The second expert: decoders in hand-written `jax.shard_map`, every collective in its place.

A weight that all devices hold becomes one that differs by device where it meets their tokens; the
transpose of that is the sum of its gradient, in bfloat16, since the cast comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.steps import transformer
from benchmarks.steps.program import ADAMW, Mark, training_step
from benchmarks.steps.transformer import (
    BF16,
    Axes,
    Shape,
    attention,
    pooled,
    rms_norm,
    rotated,
)

SENT = "sent"
KEEP_SENT = jax.checkpoint_policies.save_only_these_names(SENT)
"""Remat that keeps what a collective has made, where its name is `SENT`."""


def _sum(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else lax.psum(x, axis)


def _max(x: jax.Array, axis: str | None) -> jax.Array:
    x = lax.stop_gradient(x)
    return x if axis is None else lax.pmax(x, axis)


def gathered(weight: jax.Array, axis: Any, dim: int) -> jax.Array:
    """A weight in bfloat16, put together from all devices of an axis; its gradient is scattered.
    Over two axes it goes in two stages, the inner one first: TPU makes an all-reduce of a
    reduce-scatter over the whole mesh, with twice the bytes."""
    half = weight.astype(BF16)
    for name in reversed(axis if isinstance(axis, tuple) else (axis,)):
        if name is not None:
            half = lax.all_gather(half, name, axis=dim, tiled=True)
    return half


def attended(p: Any, x: jax.Array, s: Shape, a: Axes) -> jax.Array:
    """The first half of a layer: attention of this device's heads, added up over `a.tensor`."""
    at = jnp.arange(x.shape[1])
    h = rms_norm(x, p["norm1"])
    qkv = jnp.einsum("bsd,dthk->tbshk", h, gathered(p["qkv"], a.weights, 0))
    if a.length:
        at = at + lax.axis_index(a.length) * x.shape[1]
        q, k, v = qkv
        qkv = jnp.stack([rotated(q, at), rotated(k, at), v])
        qkv = lax.all_to_all(qkv, a.length, split_axis=3, concat_axis=2, tiled=True)
        q, k, v = checkpoint_name(qkv, SENT)
        o = attention(q, k, v, s.causal)
        o = lax.all_to_all(o, a.length, split_axis=1, concat_axis=2, tiled=True)
        o = checkpoint_name(o, SENT)
    else:
        q, k, v = qkv
        o = attention(rotated(q, at), rotated(k, at), v, s.causal)
    o = jnp.einsum("bshk,hkd->bsd", o, gathered(p["out"], a.weights, 2))
    return x + _sum(o, a.tensor)


def block(p: Any, x: jax.Array, s: Shape, a: Axes) -> jax.Array:
    """One layer: this device's heads and hidden units, added up over `a.tensor`."""
    x = attended(p, x, s, a)
    h = rms_norm(x, p["norm2"])
    up = h @ gathered(p["up"], a.weights, 0)
    if s.gated:
        up = up * jax.nn.silu(h @ gathered(p["gate"], a.weights, 0))
    else:
        up = jax.nn.gelu(up)
    return x + _sum(up @ gathered(p["down"], a.weights, 1), a.tensor)


def layers(params: Any, x: jax.Array, s: Shape, a: Axes) -> jax.Array:
    """All layers, one after the other or as a scan."""
    if not s.scanned:
        for p in params:
            x = block(p, x, s, a)
        return x
    body = jax.checkpoint(lambda x, p: (block(p, x, s, a), None), policy=KEEP_SENT)
    return lax.scan(body, x, params)[0]


def _mine(table: jax.Array, tokens: jax.Array, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """The rows of tokens in this device's part of the table, and whether they are there."""
    if axis is None:
        return tokens, jnp.ones_like(tokens, bool)
    rows = tokens - lax.axis_index(axis) * table.shape[0]
    inside = (rows >= 0) & (rows < table.shape[0])
    return jnp.where(inside, rows, 0), inside


def embedded(params: Any, tokens: jax.Array, a: Axes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Vectors of tokens, with what `_mine` says of them. The table is cast once for them and once
    for the logits, as in the other program: the two gradients are summed in float32."""
    table = gathered(params["embed"], a.weights, 1)
    rows, inside = _mine(table, tokens, a.tensor)
    return _sum(jnp.where(inside[..., None], table[rows], 0), a.tensor), rows, inside


def next_token_loss(
    params: Any, x: jax.Array, rows: jax.Array, inside: jax.Array, a: Axes
) -> jax.Array:
    """As `transformer.next_token_loss`, the mean over this device's sequences."""
    x = rms_norm(x, params["norm"])
    table = gathered(params["embed"], a.weights, 1)
    logits = jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)[:, :-1]
    most = _max(logits.max(-1), a.tensor)
    total = _sum(jnp.exp(logits - most[..., None]).sum(-1), a.tensor)
    rows, inside = rows[:, 1:, None], inside[:, 1:]
    picked = jnp.take_along_axis(logits, rows, -1)[..., 0]
    picked = _sum(jnp.where(inside, picked, 0), a.tensor)
    return jnp.mean(jnp.log(total) + most - picked)


def language_model_loss(s: Shape, a: Axes) -> Callable[[Any, jax.Array], jax.Array]:
    """`loss(params, tokens)` of this device's shards: as `transformer.language_model_loss`."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, rows, inside = embedded(params, tokens, a)
        x = layers(params["blocks"], x, s, a)
        return lax.pmean(next_token_loss(params, x, rows, inside, a), a.batch)

    return loss


def _vectors(table: jax.Array, tokens: jax.Array, axes: Any) -> jax.Array:
    return table.astype(BF16)[tokens]


def _looked_up_backward(axes: Any, kept: Any, g: jax.Array) -> Any:
    table, tokens = kept
    tokens, g = (x.reshape(-1, *x.shape[2:]) for x in (tokens, g))
    tokens, g = (lax.all_gather(x, axes, tiled=True, to="invarying") for x in (tokens, g))
    return jnp.zeros_like(table, BF16).at[tokens].add(g).astype(table.dtype), None


_looked_up: Any = jax.custom_vjp(_vectors, nondiff_argnums=(2,))
"""Vectors of tokens, from a table that all devices of `axes` hold. The gradients of vectors are
sent, which are fewer than the rows of the table."""
_looked_up.defvjp(
    lambda table, tokens, axes: (_vectors(table, tokens, axes), (table, tokens)),
    _looked_up_backward,
)


def split_positions_loss(s: Shape, a: Axes) -> Callable[[Any, jax.Array], jax.Array]:
    """As `transformer.language_model_loss`, with positions split over `a.length`: the heads are
    split in their place inside of attention (DeepSpeed-Ulysses)."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        count, place = lax.axis_size(a.length), lax.axis_index(a.length)
        x = _looked_up(params["embed"], tokens, (a.batch, a.length))
        x = rms_norm(layers(params["blocks"], x, s, a), params["norm"])
        # The next token of the last position here is the first one of the next device.
        before = [(i, (i - 1) % count) for i in range(count)]
        after = lax.ppermute(tokens[:, :1], a.length, before)
        wanted = jnp.concatenate([tokens[:, 1:], after], 1)
        at = place * tokens.shape[1] + jnp.arange(tokens.shape[1])
        logits = jnp.einsum(
            "bsd,vd->bsv", x, params["embed"].astype(BF16), preferred_element_type=jnp.float32
        )
        picked = jnp.take_along_axis(logits, wanted[..., None], -1)[..., 0]
        each = jax.nn.logsumexp(logits, -1) - picked
        last = count * tokens.shape[1] - 1
        here = jnp.sum(jnp.where(at < last, each, 0)) / (last * tokens.shape[0])
        return lax.pmean(lax.psum(here, a.length), a.batch)

    return loss


def language_model_step(s: Shape, a: Axes) -> Callable[..., Any]:
    """The step of AdamW on this device's shards."""
    return training_step(language_model_loss(s, a))


def averaged(loss: Callable[..., jax.Array], axis: Any) -> Callable[..., jax.Array]:
    """The mean over devices of the loss of each one's examples."""
    return lambda *args: lax.pmean(loss(*args), axis)


def accumulating_step(s: Shape, a: Axes) -> Callable[..., Any]:
    """As `program.accumulating_step`: layers are gathered in every microbatch, as they are needed,
    and each microbatch's gradients are scattered."""
    loss = language_model_loss(s, a)

    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        def add(total: Any, tokens: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, tokens)), None

        zeros = jax.tree.map(lambda p: p * 0, params)  # differ by device where the weights do
        total, _ = lax.scan(add, (jnp.zeros(()), zeros), batch)
        value, gradients = jax.tree.map(lambda x: x / batch.shape[0], total)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def contrastive_loss(image: Shape, text: Shape, a: Axes) -> Callable[..., jax.Array]:
    """As `transformer.contrastive_loss`: the pooled vectors of all devices are gathered."""

    def loss(params: Any, patches: jax.Array, tokens: jax.Array) -> jax.Array:
        p, q = params["image"], params["text"]
        x = patches.astype(BF16) @ p["patch"].astype(BF16)
        u = pooled(p, x, image, Axes(), Mark())
        v = pooled(q, q["embed"].astype(BF16)[tokens], text, Axes(), Mark())
        u, v = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (u, v))
        here = 20 * u @ lax.all_gather(v, a.batch, tiled=True).T
        there = 20 * v @ lax.all_gather(u, a.batch, tiled=True).T
        sums = jax.nn.logsumexp(here, -1) + jax.nn.logsumexp(there, -1)
        return lax.pmean(jnp.mean(sums / 2 - 20 * jnp.sum(u * v, -1)), a.batch)

    return loss


def pipelined_loss(s: Shape, stages: int) -> Callable[..., jax.Array]:
    """As `stages.pipelined_loss`: each device of `p` has one stage, and hands its result on. The
    last stage's results are dealt out to all for the loss."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        stage = lax.axis_index("p")
        # Gradients of weights are added up over the turns, then over the devices of `d`.
        weights = jax.tree.map(lambda w: lax.pcast(w[0], "d", to="varying"), params["blocks"])
        x = lax.pcast(params["embed"], ("d", "p"), to="varying").astype(BF16)[tokens]
        late = jnp.zeros_like(x[: stages - 1])
        body = jax.checkpoint(lambda x, p: (block(p, x, s, Axes()), None))

        def turn(buffer: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            before = lax.ppermute(buffer, "p", [(i, i + 1) for i in range(stages - 1)])
            buffer = lax.scan(body, jnp.where(stage == 0, x, before), weights)[0]
            return buffer, buffer

        _, seen = lax.scan(turn, jnp.zeros_like(x[0]), jnp.concatenate([x, late]))
        out = jnp.where(stage == stages - 1, seen[stages - 1 :], 0)
        out = lax.psum_scatter(out, "p", tiled=True)
        mine = lax.dynamic_slice_in_dim(tokens, stage * out.shape[0], out.shape[0])
        flat = (-1, tokens.shape[-1])
        out = out.reshape(*flat, s.width)
        here = transformer.next_token_loss(params, out, mine.reshape(flat), Axes(), Mark())
        return lax.pmean(here, ("d", "p"))

    return loss
