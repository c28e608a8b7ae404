"""Pieces of the draws of `rng_bit_generator`.

On CPU and GPU, XLA draws any shape in row-major order from one Philox stream, which can be computed
from any position. On other platforms (TPU) each device draws the whole and cuts its piece out;
docs/signatures.md says so, from the text in tests/signatures/page.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.families.mulhi import high_half
from sbp.signatures.rule import LocalContext, Op, Row, bind_with
from sbp.types import B, Split


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
        del args
        each = _words_each(dtype)
        found = words(state, start * jnp.uint32(each), size * each)
        if each == 1:
            return lax.convert_element_type(found, dtype)
        low, high = (found[k::2].astype(dtype) for k in range(2))
        return low | lax.shift_left(high, jnp.asarray(32, dtype))

    def from_whole(state: Any, start: Any, *args: Any) -> Any:
        del state
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
    x0, x1, x2, x3 = _added(state, index)
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


def _added(state: Any, number: Any) -> tuple[Any, Any, Any, Any]:
    """The four words of the counter plus a number, the lowest word first."""
    counter = [jnp.broadcast_to(state[k], number.shape) for k in (2, 3, 0, 1)]
    out, carried = [], number
    for word in counter:
        out.append(word + carried)
        carried = (out[-1] < word).astype(jnp.uint32)
    return out[0], out[1], out[2], out[3]


def _words_each(dtype: Any) -> int:
    """How many words of the stream an element takes; a shorter integer is a word cut off."""
    return 2 if dtype == jnp.dtype("uint64") else 1
