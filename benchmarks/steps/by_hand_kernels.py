"""GPT with a Pallas kernel, tensor and data parallel, in hand-written `jax.shard_map`.

The kernel does not say how its results differ by device, so `jax.shard_map` checks nothing here and
sums no gradient of itself. The two functions of Megatron-LM (Shoeybi et al. 2019, section 3) do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.steps.by_hand import KEEP_SENT, SENT
from benchmarks.steps.kernels import flash
from benchmarks.steps.program import ADAMW, Mark
from benchmarks.steps.transformer import BF16, Axes, Shape, rms_norm, rotated


def _sum_over(x: jax.Array, axis: str) -> jax.Array:
    return lax.psum(x, axis)


def _as_it_is(x: jax.Array, axis: str) -> jax.Array:
    return x


_added: Any = jax.custom_vjp(_sum_over, nondiff_argnums=(1,))
"""A sum over devices, whose gradient is the same on all of them."""
_added.defvjp(lambda x, axis: (_sum_over(x, axis), None), lambda axis, _, g: (g,))

_entered: Any = jax.custom_vjp(_as_it_is, nondiff_argnums=(1,))
"""A value that is the same on all devices, whose gradients are summed over them."""
_entered.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (_sum_over(g, axis),))


def _block(p: Any, x: jax.Array) -> jax.Array:
    """One layer: this device's heads and hidden units, added up over `t`. Gradients of matrices are
    summed over `d` in bfloat16, since the cast comes first."""

    def half(name: str) -> jax.Array:
        return _entered(p[name].astype(BF16), "d")

    at = jnp.arange(x.shape[1])
    h = _entered(rms_norm(x, _entered(p["norm1"], "d")), "t")
    q, k, v = jnp.einsum("bsd,dthk->tbshk", h, half("qkv"))
    o = flash(Axes(), Mark())(rotated(q, at), rotated(k, at), v, True)
    o = _added(jnp.einsum("bshk,hkd->bsd", o, half("out")), "t")
    x = x + checkpoint_name(o, SENT)
    h = _entered(rms_norm(x, _entered(p["norm2"], "d")), "t")
    return x + _added(jax.nn.gelu(h @ half("up")) @ half("down"), "t")


def _next_token_loss(params: Any, x: jax.Array, rows: jax.Array, inside: jax.Array) -> jax.Array:
    """The sum of cross entropies over this device's sequences, by its part of the vocabulary."""
    x = _entered(rms_norm(x, _entered(params["norm"], "d")), "t")
    table = _entered(params["embed"].astype(BF16), "d")
    logits = jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)[:, :-1]
    most = lax.pmax(lax.stop_gradient(logits.max(-1)), "t")
    total = _added(jnp.exp(logits - most[..., None]).sum(-1), "t")
    picked = jnp.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0]
    picked = _added(jnp.where(inside[:, 1:], picked, 0), "t")
    return jnp.mean(jnp.log(total) + most - picked)


def flash_step(s: Shape) -> Callable[..., Any]:
    """The step of `kernels.gpt_flash` on this device's shards; examples are split over `d`."""
    assert s.scanned and s.causal and not s.gated
    body = jax.checkpoint(lambda x, p: (_block(p, x), None), policy=KEEP_SENT)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        rows = tokens - lax.axis_index("t") * params["embed"].shape[0]
        inside = (rows >= 0) & (rows < params["embed"].shape[0])
        rows = jnp.where(inside, rows, 0)
        table = _entered(params["embed"].astype(BF16), "d")
        x = _added(jnp.where(inside[..., None], table[rows], 0), "t")
        x, _ = lax.scan(body, x, params["blocks"])
        return _next_token_loss(params, x, rows, inside) / lax.axis_size("d")

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = ADAMW.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, lax.psum(value, "d")

    return step
