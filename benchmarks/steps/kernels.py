"""GPT with the attention kernel for TPU that comes with JAX, written in Pallas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.sharding import PartitionSpec as P

from benchmarks.steps.program import Mark, Step, aval, training
from benchmarks.steps.transformer import (
    BF16,
    Attend,
    Axes,
    Shape,
    block,
    next_token_loss,
    specs_of,
    weights_of,
)

BLOCK = 512
"""Positions that the kernel works on at a time."""


def flash(a: Axes, mark: Mark) -> Attend:
    """Attention by the kernel, which `jax.jit` does not split: the expert's program calls it on
    shards."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
        size = min(BLOCK, q.shape[1])
        sizes = BlockSizes(
            block_q=size,
            block_k_major=size,
            block_k=size,
            block_b=1,
            block_q_major_dkv=size,
            block_k_major_dkv=size,
            block_k_dkv=size,
            block_q_dkv=size,
            block_k_major_dq=size,
            block_k_dq=size,
            block_q_dq=size,
        )

        def kernel(*operands: jax.Array) -> jax.Array:
            scale = q.shape[-1] ** -0.5
            return flash_attention(*operands, causal=causal, sm_scale=scale, block_sizes=sizes)

        spec = P(a.batch, a.tensor, None, None)
        heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
        return mark.locally(kernel, (spec,) * 3, spec)(*heads_first).swapaxes(1, 2)

    return attend


def flash_loss(s: Shape, a: Axes) -> Callable[[Mark], Callable[..., jax.Array]]:
    """`loss(mark)(params, tokens)`: as `language_model_loss`, each layer recomputed backward."""

    def of(mark: Mark) -> Callable[..., jax.Array]:
        @jax.checkpoint
        def body(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return block(p, x, s, a, mark, flash(a, mark)), None

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            x = mark(params["embed"].astype(BF16)[tokens], a.batch, None, None)
            x, _ = jax.lax.scan(body, x, params["blocks"])
            return next_token_loss(params, x, tokens, a, mark)

        return loss

    return of


def gpt_flash(
    batch: int = 16, length: int = 2048, width: int = 2048, topology: str = "v5e:4x4"
) -> Step:
    """GPT with Pallas flash attention. Heads are split over one axis, examples over the other."""
    s = Shape(
        layers=4,
        width=width,
        heads=width // 128,
        hidden=4 * width,
        vocabulary=32768,
        batch=batch,
        length=length,
        scanned=True,
    )
    return flash_decoder(s, (("d", 4), ("t", 4)), topology)


def flash_decoder(s: Shape, mesh: tuple[tuple[str, int], ...], topology: str) -> Step:
    """A step of a decoder with the kernel. Heads are split over `t`, examples over `d`."""
    from benchmarks.steps.by_hand_kernels import flash_step  # it calls the kernel of this module

    a = Axes(batch="d", tensor="t")
    step = training(
        loss=flash_loss(s, a),
        params=weights_of(s),
        specs=specs_of(s, a),
        batch=(aval(s.batch, s.length, dtype="int32"),),
        batch_specs=(P("d", None),),
        mesh=mesh,
        topology=topology,
    )
    return replace(step, by_hand=flash_step(s), checked=False)
