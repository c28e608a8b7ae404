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

# ---- Philox -------------------------------------------------------------------------------------
# Pieces of the draws of `rng_bit_generator`.
#
# On CPU and GPU, XLA draws any shape in row-major order from one Philox stream, which can be
# computed from any position. On other platforms (TPU) each device draws the whole and cuts its
# piece out; docs/signatures.md says so, from the text in tests/signatures/test_page.py.


def stream_rows(op: Op) -> list[Row]:
    """Rows of a draw, the last result of an op whose operand is B.

    The first dim with more than one element splits, since its shards are pieces of the stream. It
    does not where 32 bits cannot count the words of the draw.
    """
    drawn = op.outs[-1]
    keys = op.ins[0].shape if op.name == "random_bits" else ()
    if math.prod((*keys, *op.params["shape"])) * _words_each(drawn.dtype) >= 2**32:
        return []
    first = [Split(d) for d, size in enumerate(drawn.shape) if size > 1][:1]
    return [Row((B,), (*(B for _ in op.outs[1:]), atom)) for atom in first]


def draw_piece(ctx: LocalContext, args: Sequence[Any], state: Any) -> Any:
    """This device's shard of a draw.

    Arguments:
      ctx: the kernel's place; its last result is the draw.
      args: the operands.
      state: the state from which the whole is drawn, four words.
    """
    whole, shape = tuple(ctx.global_outs[-1].shape), ctx.local_outs[-1]
    dtype, size, start = ctx.global_outs[-1].dtype, math.prod(shape), jnp.uint32(0)
    for dim in range(len(whole)):
        offset = jnp.asarray(ctx.out_offset(len(ctx.global_outs) - 1, dim), jnp.uint32)
        start = start + offset * jnp.uint32(math.prod(whole[dim + 1 :]))

    def from_stream(state: Any, start: Any, *args: Any) -> Any:
        each = _words_each(dtype)
        found = words(state, start * jnp.uint32(each), size * each)
        if each == 1:
            return lax.convert_element_type(found, dtype)
        low, high = (found[k::2].astype(dtype) for k in range(2))
        return low | lax.shift_left(high, jnp.asarray(32, dtype))

    def from_whole(state: Any, start: Any, *args: Any) -> Any:
        drawn = jnp.pad(bind_with(ctx, args)[-1].reshape(-1), (0, size))
        return lax.dynamic_slice(drawn, (start,), (size,))

    found = lax.platform_dependent(
        state, start, *args, cpu=from_stream, cuda=from_stream, rocm=from_stream, default=from_whole
    )
    return found.reshape(shape)


def words(state: Any, start: Any, count: int) -> Any:
    """Words of the stream.

    Arguments:
      state: four words: those of the key, then those of the low half of the counter. The key is
          the high half of the counter as well.
      start: position of the first word, a uint32.
      count: number of words.
    """
    blocks = -(-(count + 3) // 4)
    index = lax.shift_right_logical(start, jnp.uint32(2)) + lax.iota(jnp.uint32, blocks)
    x0, x1, x2, x3 = _add_number(state, index)
    keys = state[0], state[1]
    for _ in range(10):  # Philox4x32-10, of Salmon et al. 2011
        (high0, low0), (high1, low1) = (
            (high_half(x, jnp.full_like(x, m)), x * jnp.uint32(m))
            for x, m in ((x0, 0xD2511F53), (x2, 0xCD9E8D57))
        )
        x0, x1, x2, x3 = high1 ^ x1 ^ keys[0], low1, high0 ^ x3 ^ keys[1], low0
        keys = keys[0] + jnp.uint32(0x9E3779B9), keys[1] + jnp.uint32(0xBB67AE85)
    found = jnp.stack([x0, x1, x2, x3], axis=1).reshape(-1)
    return lax.dynamic_slice(found, (start & jnp.uint32(3),), (count,))


def _add_number(state: Any, number: Any) -> tuple[Any, Any, Any, Any]:
    """The four words of the counter plus a number, the lowest word first."""
    out, carried = [], number
    for word in [jnp.broadcast_to(state[k], number.shape) for k in (2, 3, 0, 1)]:
        out.append(word + carried)
        carried = (out[-1] < word).astype(jnp.uint32)
    return out[0], out[1], out[2], out[3]


def _words_each(dtype: Any) -> int:
    """How many words of the stream an element takes; a shorter integer is a word cut off."""
    return 2 if dtype == jnp.dtype("uint64") else 1


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
    them. Keys of hardware generators are B, and the shard is a piece of the stream of the first."""
    (key,) = args
    batch, shape, width = key.ndim, ctx.local_outs[0], ctx.params["bit_width"]
    drawn = tuple(ctx.global_outs[0].shape[batch:])
    hardware = str(ctx.global_ins[0].dtype) in _HARDWARE
    if shape == tuple(ctx.global_outs[0].shape) or (shape[batch:] == drawn and not hardware):
        return bind_with(ctx, args)
    if hardware:
        state = jax.random.key_data(key).reshape(-1, 4)[0]
        return [draw_piece(ctx, args, state)]
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
    keys split for most kinds of keys. With `rng_bit_generator`, the draw of all keys is one stream,
    and the first dim splits."""
    key = op.ins[0]
    if str(key.dtype) in _HARDWARE:
        return stream_rows(op)
    rows = batch_rows(op) if _each_key_alone(op) else []
    if str(key.dtype) == "key<fry>" and _counts(op):
        rows += [Row((B,), (Split(d),)) for d in range(len(key.shape), len(op.outs[0].shape))]
    return rows


def _bit_generator_local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    """The state after the whole draw, and the shard. XLA removes the whole draw, of which only the
    state is read."""
    (state,) = args
    shape = tuple(ctx.global_outs[1].shape)
    if ctx.local_outs[1] == shape:
        return bind_with(ctx, args)
    four = lax.bitcast_convert_type(state, jnp.uint32).reshape(4)
    return [bind_with(ctx, args)[0], draw_piece(ctx, args, four)]


# The first dim of the draw splits. Under `vmap`, the draw of all keys is one, from the first key.
rule("rng_bit_generator", traits=Traits(generates="draws"), local=_bit_generator_local)(
    lambda op: (
        [] if op.params["algorithm"] == lax.RandomAlgorithm.RNG_THREE_FRY else stream_rows(op)
    )
)


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
