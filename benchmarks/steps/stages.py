"""A pipeline as one program: a buffer with a place for each stage, which moves on every turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.steps import by_hand
from benchmarks.steps.program import Mark, Step, aval, training, training_step
from benchmarks.steps.transformer import (
    BF16,
    Axes,
    Shape,
    block,
    next_token_loss,
    specs_of,
    weights_of,
)

STAGES = 4


def pipelined_loss(s: Shape, a: Axes) -> Callable[[Mark], Callable[..., jax.Array]]:
    """`loss(mark)(params, tokens)` of tokens (microbatch, batch, length): stage `i` works on
    microbatch `t - i` at turn `t`."""

    def of(mark: Mark) -> Callable[..., jax.Array]:
        unmarked = Mark()  # inside of a stage the dims have lost the stages'

        @jax.checkpoint
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return block(p, x, s, a, unmarked), None

        @jax.vmap
        def stages(weights: Any, x: jax.Array) -> jax.Array:
            return jax.lax.scan(layer, x, weights)[0]

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            count = tokens.shape[0]
            x = mark(params["embed"].astype(BF16)[tokens], None, a.batch, None, None)
            late = jnp.zeros((STAGES - 1, *x.shape[1:]), x.dtype)
            buffer = mark(jnp.zeros((STAGES, *x.shape[1:]), x.dtype), "p", a.batch, None, None)

            def turn(buffer: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                buffer = mark(jnp.roll(buffer, 1, 0).at[0].set(x), "p", a.batch, None, None)
                buffer = mark(stages(params["blocks"], buffer), "p", a.batch, None, None)
                return buffer, buffer

            _, seen = jax.lax.scan(turn, buffer, jnp.concatenate([x, late]))
            # Where the loss is computed, each device has sequences of its own.
            everywhere = Axes(batch=("d", "p"))
            flat = (tokens.shape[1] * count, tokens.shape[2])
            out = mark(seen[STAGES - 1 :, -1], None, a.batch, None, None).swapaxes(0, 1)
            out = mark(out.reshape(*flat, s.width), everywhere.batch, None, None)
            tokens = mark(tokens.swapaxes(0, 1).reshape(flat), everywhere.batch, None)
            return next_token_loss(params, out, tokens, everywhere, mark)

        return loss

    return of


GPT = Shape(
    layers=8,
    width=1024,
    heads=16,
    hidden=4096,
    vocabulary=32768,
    batch=8,
    length=1024,
    scanned=True,
)


def pipeline(s: Shape = GPT, microbatches: int = 8, data: int = 4) -> Step:
    """Pipeline as a rolling buffer. GPT in four stages, each on one part of the devices, and data
    parallel."""
    a = Axes(batch="d")
    params, specs = weights_of(s), specs_of(s, a)
    params["blocks"] = jax.tree.map(
        lambda x: aval(STAGES, s.layers // STAGES, *x.shape[1:]), params["blocks"]
    )
    specs["blocks"] = jax.tree.map(lambda _: P("p"), params["blocks"])
    step = training(
        loss=pipelined_loss(s, a),
        params=params,
        specs=specs,
        batch=(aval(microbatches, s.batch, s.length, dtype="int32"),),
        batch_specs=(P(None, "d", None),),
        mesh=(("p", STAGES), ("d", data)),
    )
    return replace(step, by_hand=training_step(by_hand.pipelined_loss(s, STAGES)))
