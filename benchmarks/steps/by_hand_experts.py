"""Mixture-of-experts decoders in hand-written `jax.shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.steps import by_hand
from benchmarks.steps.experts import CHOICES, by_expert, capacity_slots, load_loss
from benchmarks.steps.transformer import BF16, Axes, Shape, rms_norm

Routed = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]


def _varying(x: jax.Array, *axes: str) -> jax.Array:
    return lax.pcast(x, axes, to="varying")


def by_capacity(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `experts.by_capacity`: slots of all experts go to the devices that hold them, and their
    results come back."""
    gates, chosen, combine = capacity_slots(p["router"], x, lambda y, *_: y)
    dispatch = (combine > 0).astype(BF16)
    sent = jnp.einsum("gsec,gsm->egcm", dispatch, x)
    sent = lax.all_to_all(sent, "d", split_axis=0, concat_axis=1, tiled=True)
    sent = checkpoint_name(sent, by_hand.SENT)
    hidden = jax.nn.gelu(jnp.einsum("egcm,emh->egch", sent, p["up"].astype(BF16)))
    out = jnp.einsum("egch,ehm->egcm", hidden, p["down"].astype(BF16))
    out = lax.all_to_all(out, "d", split_axis=1, concat_axis=0, tiled=True)
    out = checkpoint_name(out, by_hand.SENT)
    return jnp.einsum("gsec,egcm->gsm", combine, out), load_loss(gates, chosen[..., 0])


def dropless(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `experts.dropless`: each device sorts its own tokens, and has a part of the hidden units
    of every expert."""
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x.astype(jnp.float32), p["router"]))
    weights, chosen = lax.top_k(gates, CHOICES)
    up, down = (_varying(p[name].astype(BF16), "d") for name in ("up", "down"))
    out = by_expert(_varying(x, "t"), up, down, chosen, _varying(weights, "t"))
    return lax.psum(out, "t"), load_loss(gates, chosen[..., 0])


def routed_loss(s: Shape, a: Axes, routed: Routed) -> Callable[[Any, jax.Array], jax.Array]:
    """As `experts.experts_loss`, of this device's shards."""

    @functools.partial(jax.checkpoint, policy=by_hand.KEEP_SENT)
    def body(carry: Any, p: Any) -> Any:
        x, uneven = carry
        x = by_hand.attended(p, x, s, a)
        y, load = routed(p, rms_norm(x, p["norm2"]))
        return (x + y, uneven + load), None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, rows, inside = by_hand.embedded(params, tokens, a)
        start = x, _varying(jnp.zeros(()), a.batch)
        (x, uneven), _ = lax.scan(body, start, params["blocks"])
        here = by_hand.next_token_loss(params, x, rows, inside, a) + 0.01 * uneven
        return lax.pmean(here, a.batch)

    return loss
