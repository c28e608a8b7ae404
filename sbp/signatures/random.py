"""Random bits: the shard of a split result is the slice of the global draw, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.signatures.factors import FactorMap, split_rows
from sbp.signatures.rule import LocalContext, Op, Row, bind_with, replicated, rule

replicated(
    "random_seed",
    "random_wrap",
    "random_unwrap",
    "random_split",
    "random_fold_in",
    "random_clone",
    "random_gamma",
    reason="keys are a few words; every device derives the same ones",
)
replicated("rng_bit_generator", reason="the algorithm's state is one stream: a slice of the draw needs the whole draw")


def _counters(ctx: LocalContext, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """High and low words of the global linear index of each element of this shard (jax_threefry_partitionable's counters)."""
    global_shape = ctx.global_outs[0].shape
    low = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(shape))):
        index = lax.broadcasted_iota(jnp.uint32, shape, dim) + jnp.asarray(ctx.out_offset(0, dim), jnp.uint32)
        low = low + index * jnp.uint32(stride)
        stride *= global_shape[dim]
    return jnp.zeros(shape, jnp.uint32), low


def _random_bits_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    (key,) = args
    shape, width = ctx.local_outs[0], ctx.params["bit_width"]
    if ctx.local_outs[0] == tuple(ctx.global_outs[0].shape):
        return bind_with(ctx, args)
    words = jax.random.key_data(key)
    high, low = _jax.uint_bits(jnp.broadcast_to(words[0], shape), jnp.broadcast_to(words[1], shape), *_counters(ctx, shape))
    dtype = ctx.global_outs[0].dtype
    if width == 64:
        return [lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype)]
    if width == 32:
        return [high ^ low]
    return [lax.convert_element_type(high ^ low, dtype)]


@rule("random_bits", local=_random_bits_local)
def _random_bits(op: Op) -> Sequence[Row]:
    """Splits of any dim, for one threefry key with partitionable counters below 2**32; else all B."""
    key = op.ins[0]
    counted = getattr(jax.config, "jax_threefry_partitionable", True) and math.prod(op.params["shape"]) < 2**32
    if key.shape != () or "fry" not in str(key.dtype) or not counted:
        return []
    return split_rows(op, FactorMap(ins=((),), outs=(tuple(f"d{i}" for i in range(len(op.outs[0].shape))),)))
