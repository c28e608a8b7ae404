"""Mixture-of-experts decoders: tokens go to experts by a fixed capacity, or without a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import sbp
from benchmarks.steps.program import Mark, Step, aval, training, training_step
from benchmarks.steps.transformer import (
    BF16,
    Axes,
    Shape,
    attended,
    next_token_loss,
    rms_norm,
    specs_of,
    weights_of,
)

Routed = Callable[[Any, jax.Array, Mark], tuple[jax.Array, jax.Array]]
"""`routed(weights, x, mark)`: what the experts make of `x` (group, token, width), and the loss of
an uneven load."""

CHOICES = 2
"""Experts of each token."""


def with_experts(weights: Any, specs: Any, experts: int, axes: tuple[Any, Any]) -> tuple[Any, Any]:
    """Weights and specs of scanned layers, with an expert's feed-forward layer for each expert.

    Arguments:
        weights, specs: of a dense decoder.
        experts: how many.
        axes: mesh axes of the experts, and of their hidden units.
    """
    blocks, shards = dict(weights["blocks"]), dict(specs["blocks"])
    layers, width, hidden = blocks["up"].shape
    blocks["router"], shards["router"] = aval(layers, width, experts), P()
    blocks["up"], shards["up"] = (
        aval(layers, experts, width, hidden),
        P(None, axes[0], None, axes[1]),
    )
    blocks["down"], shards["down"] = aval(layers, experts, hidden, width), P(None, *axes, None)
    return {**weights, "blocks": blocks}, {**specs, "blocks": shards}


def load_loss(gates: jax.Array, first: jax.Array) -> jax.Array:
    """Experts x (share of tokens x mean gate), added up: 1 where the load is even."""
    experts = gates.shape[-1]
    share = jnp.mean(jax.nn.one_hot(first, experts), -2)
    return jnp.mean(jnp.sum(share * jnp.mean(gates, -2), -1)) * experts


def capacity_slots(
    router: jax.Array, x: jax.Array, mark: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gates of all experts, the experts that were chosen, and weights by which tokens (group,
    token) are combined from slots (expert, slot)."""
    experts = router.shape[1]
    capacity = CHOICES * x.shape[1] // experts
    logits = jnp.einsum("gsm,me->gse", x.astype(jnp.float32), router)
    gates = jax.nn.softmax(mark(logits, "d", None, None))
    weights, chosen = jax.lax.top_k(gates, CHOICES)
    taken = jnp.zeros((x.shape[0], 1, experts))
    combine = jnp.zeros((*x.shape[:2], experts, capacity), BF16)
    for choice in range(CHOICES):
        mask = jax.nn.one_hot(chosen[..., choice], experts)
        rank = jnp.sum((jnp.cumsum(mask, 1) - mask + taken) * mask, -1)
        taken = taken + jnp.sum(mask, 1, keepdims=True)
        slot = jax.nn.one_hot(rank.astype(jnp.int32), capacity)  # zero beyond the capacity
        weighted = weights[..., choice, None] * mask
        combine = combine + (weighted[..., None] * slot[:, :, None]).astype(BF16)
    return gates, chosen, mark(combine, "d", None, None, None)


def by_capacity(p: Any, x: jax.Array, mark: Mark) -> tuple[jax.Array, jax.Array]:
    """Each expert takes a fixed number of tokens of each group, by one-hot products; the experts
    are split over `d`, as the groups are."""
    gates, chosen, combine = capacity_slots(p["router"], x, mark)
    dispatch = (combine > 0).astype(BF16)
    sent = mark(jnp.einsum("gsec,gsm->egcm", dispatch, x), None, "d", None, None)
    sent = mark(sent, "d", None, None, None)
    hidden = jax.nn.gelu(jnp.einsum("egcm,emh->egch", sent, p["up"].astype(BF16)))
    out = jnp.einsum("egch,ehm->egcm", mark(hidden, "d", None, None, None), p["down"].astype(BF16))
    out = mark(mark(out, "d", None, None, None), None, "d", None, None)
    return jnp.einsum("gsec,egcm->gsm", combine, out), load_loss(gates, chosen[..., 0])


def by_expert(
    x: jax.Array, up: jax.Array, down: jax.Array, chosen: jax.Array, weights: jax.Array
) -> jax.Array:
    """Tokens (group, token, width) sorted by expert, multiplied by `ragged_dot` and put back."""
    flat = x.reshape(-1, x.shape[-1])
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=up.shape[0])
    hidden = jax.nn.gelu(jax.lax.ragged_dot(flat[order // CHOICES], up, sizes))
    out = jax.lax.ragged_dot(hidden, down, sizes)
    out = out * weights.ravel()[order, None].astype(BF16)
    return jnp.zeros_like(flat).at[order // CHOICES].add(out).reshape(x.shape)


def dropless(p: Any, x: jax.Array, mark: Mark) -> tuple[jax.Array, jax.Array]:
    """All tokens go to their experts. The expert's program sorts those of each device by
    themselves, and splits the hidden units of each expert over `t`."""
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x.astype(jnp.float32), p["router"]))
    weights, chosen = jax.lax.top_k(mark(gates, "d", None, None), CHOICES)

    def shard(*operands: jax.Array) -> jax.Array:
        return jax.lax.psum(by_expert(*operands), "t") if mark.mesh else by_expert(*operands)

    tokens, up, down = P("d", None, None), P(None, None, "t"), P(None, "t", None)
    route = mark.locally(shard, (tokens, up, down, tokens, tokens), tokens)
    out = route(x, p["up"].astype(BF16), p["down"].astype(BF16), chosen, weights)
    return out, load_loss(gates, chosen[..., 0])


def dropless_in_region(p: Any, x: jax.Array, mark: Mark) -> tuple[jax.Array, jax.Array]:
    """As `dropless`, for `sbp`: a region by hand sorts the tokens of each device by themselves. Its
    result is partial over `t`, and sbp decides how it is reduced."""
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x.astype(jnp.float32), p["router"]))
    weights, chosen = jax.lax.top_k(gates, CHOICES)
    route = sbp.manual(
        by_expert,
        in_types=("d:S(0)", "t:S(2)", "t:S(1)", "d:S(0)", "d:S(0)"),
        out_types="d:S(0) t:P(sum)",
    )
    out = route(x, p["up"].astype(BF16), p["down"].astype(BF16), chosen, weights)
    return out, load_loss(gates, chosen[..., 0])


def experts_loss(s: Shape, a: Axes, routed: Routed) -> Any:
    """`loss(mark)(params, tokens)`: as `language_model_loss`, with routed feed-forward layers, each
    layer recomputed backward."""

    def of(mark: Mark) -> Any:
        @jax.checkpoint
        def body(carry: Any, p: Any) -> Any:
            x, uneven = carry
            x = attended(p, x, s, a, mark)
            y, load = routed(p, rms_norm(x, p["norm2"]), mark)
            return (mark(x + y, a.batch, None, None), uneven + load), None

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            x = mark(params["embed"].astype(BF16)[tokens], a.batch, None, None)
            (x, uneven), _ = jax.lax.scan(body, (x, jnp.zeros(())), params["blocks"])
            return next_token_loss(params, x, tokens, a, mark) + 0.01 * uneven

        return loss

    return of


def expert_step(
    s: Shape, a: Axes, routed: Routed, experts: int, axes: tuple[Any, Any], mesh: Any
) -> Step:
    """A step of a decoder with routed layers.

    Arguments:
        s, a: the decoder without its experts.
        routed: takes tokens to experts.
        experts, axes: as in `with_experts`.
        mesh: size of each mesh axis.
    """
    from benchmarks.steps import by_hand_experts  # it reads this module

    params, specs = with_experts(weights_of(s), specs_of(s, a), experts, axes)
    written: dict[Any, Any] = {
        by_capacity: by_hand_experts.by_capacity,
        dropless: by_hand_experts.dropless,
    }
    loss = by_hand_experts.routed_loss(s, a, written[routed])
    step = training(
        loss=experts_loss(s, a, routed),
        params=params,
        specs=specs,
        batch=(aval(s.batch, s.length, dtype="int32"),),
        batch_specs=(P("d", None),),
        mesh=mesh,
    )
    return replace(step, by_hand=training_step(loss))


def moe_capacity() -> Step:
    """MoE by capacity, experts split. A decoder with 16 experts, split as the batch is."""
    s = Shape(
        layers=4,
        width=1024,
        heads=16,
        hidden=4096,
        vocabulary=32768,
        batch=64,
        length=1024,
        scanned=True,
    )
    return expert_step(s, Axes(batch="d"), by_capacity, 16, ("d", None), (("d", 16),))


DROPLESS = Shape(
    layers=4,
    width=1024,
    heads=16,
    hidden=4096,
    vocabulary=32768,
    batch=32,
    length=1024,
    scanned=True,
)


def dropless_step(s: Shape, experts: int, mesh: Any, *, region: bool) -> Step:
    """A step of a decoder whose experts have no capacity; their hidden units are split over `t`.

    Arguments:
        s: the decoder without its experts.
        experts: how many.
        mesh: size of each mesh axis.
        region: whether `sbp` gets the tokens' way to their experts as a region by hand.
    """
    a = Axes(batch="d", tensor="t")
    step = expert_step(s, a, dropless, experts, (None, "t"), mesh)
    if not region:
        return step
    return replace(step, region=training_step(experts_loss(s, a, dropless_in_region)(Mark())))


def moe_dropless() -> Step:
    """MoE without a capacity. A decoder with 8 experts, their hidden units split over one axis."""
    return dropless_step(DROPLESS, 8, (("d", 4), ("t", 4)), region=False)


def moe_dropless_region() -> Step:
    """MoE without a capacity, a region by hand. It has the tokens' way to their experts and back,
    as in the expert's program."""
    return dropless_step(DROPLESS, 8, (("d", 4), ("t", 4)), region=True)
