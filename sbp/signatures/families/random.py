"""Random numbers. A shard of a split result is the slice of the global result, bit for bit."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp import _jax
from sbp.signatures.factors import rows_beside
from sbp.signatures.families.elementwise import high_half
from sbp.signatures.rule import LocalContext, Op, Row, Traits, bind_with, rule
from sbp.types import B, Split

# ---- rules --------------------------------------------------------------------------------------


_HARDWARE = {
    "key<rbg>": frozenset({"random_bits", "random_gamma"}),
    "key<urbg>": frozenset({"random_bits", "random_fold_in", "random_gamma", "random_split"}),
}
"""For each kind of key, the primitives that use `rng_bit_generator`. For a batch of keys, JAX makes
one draw there, from the first key."""

_OF_EACH_KEY = {"key<fry>", "key<fry4>", "key<phx2>", "key<phx4>", *_HARDWARE}
"""JAX's own kinds of keys."""


def _each_key_alone(op: Op) -> bool:
    """Whether the primitive uses or makes each key of a batch without the other keys; False for
    kinds of keys that are not JAX's own."""
    dtype = next((str(a.dtype) for a in (*op.ins, *op.outs) if _jax.is_extended(a.dtype)), "")
    return dtype in _OF_EACH_KEY and op.name not in _HARDWARE.get(dtype, ())


def batch_rows(op: Op) -> list[Row]:
    """Rows that split a batch dim. Batch dims come first in every operand and result."""
    rank = min(len(a.shape) for a in (*op.ins, *op.outs))
    return [Row((Split(d),) * len(op.ins), (Split(d),) * len(op.outs)) for d in range(rank)]


# From keys to their words, and back.
rule("random_wrap", "random_unwrap", "random_clone", traits=Traits(), local=bind_with)(batch_rows)


# Only dims of the batch of keys split. Every device computes all new keys of its shard; a draw
# depends on its position in the whole result, inside of JAX.
rule(
    *("random_gamma", "random_seed", "random_split"),
    traits=lambda name: Traits(generates="draws" if name == "random_gamma" else ""),
    local=bind_with,
)(lambda op: batch_rows(op) if _each_key_alone(op) else [])


rule("random_fold_in", traits=Traits(), local=bind_with)(
    lambda op: rows_beside(op) if _each_key_alone(op) else []
)


def counters(
    shape: tuple[int, ...], global_shape: tuple[int, ...], offsets: Sequence[Any]
) -> tuple[Any, Any]:
    """The 64-bit linear index in the whole array of each element of a shard: its high and low
    words. These are the counters of `jax_threefry_partitionable`.

    Arguments:
      shape: shape of the shard.
      global_shape: shape of the whole array, which `_counts` allows.
      offsets: for each dim, the global index of the shard's element 0.
    """
    high = low = jnp.zeros((1,) * len(shape), jnp.uint32)
    for dim, size in enumerate(global_shape):
        here = lax.iota(jnp.uint32, shape[dim]) + jnp.asarray(offsets[dim], jnp.uint32)
        place = jnp.expand_dims(here, [d for d in range(len(shape)) if d != dim])
        start = low * jnp.uint32(size)
        if math.prod(global_shape[: dim + 1]) >= 2**32:  # before that, the high word is 0
            carry = (start + place < start).astype(jnp.uint32)
            high = high * jnp.uint32(size) + high_half(low, jnp.uint32(size)) + carry
        low = start + place
    return jnp.broadcast_to(high, shape), jnp.broadcast_to(low, shape)


def _counts(op: Op) -> bool:
    """Whether a shard of a draw can count its own elements: JAX's counters are partitionable, 64
    bits count the elements, and 32 bits those of each dim."""
    shape = op.params["shape"]
    is_countable = math.prod(shape) < 2**64 and all(size < 2**32 for size in shape)
    return is_countable and _jax.settings_of(op.params).threefry_partitionable


def _random_bits_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """Draws the elements of each key by their counters; where the shard has whole draws, JAX draws
    them."""
    (key,) = args
    batch, shape, width = key.ndim, ctx.local_outs[0], ctx.params["bit_width"]
    drawn = tuple(ctx.global_outs[0].shape[batch:])
    if shape[batch:] == drawn:
        return bind_with(ctx, args)
    words = jax.random.key_data(key)
    count = counters(shape[batch:], drawn, [ctx.out_offset(0, d) for d in range(batch, len(shape))])
    spread = [lax.broadcast_in_dim(words[..., w], shape, tuple(range(batch))) for w in range(2)]
    high, low = _jax.threefry2x32_p.bind(*spread, *(jnp.broadcast_to(c, shape) for c in count))
    dtype = ctx.global_outs[0].dtype
    return (
        [lax.shift_left(high.astype(dtype), jnp.asarray(32, dtype)) | low.astype(dtype)]
        if width == 64
        else [lax.convert_element_type(high ^ low, dtype)]
    )


@rule("random_bits", traits=Traits(generates="counter"), local=_random_bits_local)
def _random_bits(op: Op) -> Sequence[Row]:
    """Dims of the draw split for threefry keys with partitionable counters. Dims of the batch of
    keys split for all keys but `rbg` and `unsafe_rbg`."""
    key = op.ins[0]
    rows = batch_rows(op) if _each_key_alone(op) else []
    if str(key.dtype) == "key<fry>" and _counts(op):
        rows += [Row((B,), (Split(d),)) for d in range(len(key.shape), len(op.outs[0].shape))]
    return rows


rule(
    "rng_bit_generator", traits=Traits(generates="draws"), reason="all elements are of one stream"
)(lambda op: ())


def _iota_2x32_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The counters of the shard."""
    shape, whole = ctx.local_outs[0], tuple(ctx.global_outs[0].shape)
    return (
        bind_with(ctx, ())
        if shape == whole
        else list(counters(shape, whole, [ctx.out_offset(0, d) for d in range(len(shape))]))
    )


# The counters themselves.
rule("iota_2x32_shape", traits=Traits(generates="counter"), local=_iota_2x32_local)(
    lambda op: rows_beside(op) if _counts(op) else []
)
