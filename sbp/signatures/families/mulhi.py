"""`mulhi`, the high half of a product of integers, computed from half words: under `shard_map`, JAX
0.10 and 0.12 cannot compile the primitive on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.families.elementwise import elementwise_rows
from sbp.signatures.rule import LocalContext, rule
from sbp.signatures.traits import Traits


def high_half(x: Any, y: Any) -> Any:
    """The high word of the product of two integers of the same dtype.

    >>> int(high_half(jnp.int32(2**30), jnp.int32(-12)))
    -3
    """
    dtype = x.dtype
    width = jnp.iinfo(dtype).bits
    word = jnp.dtype(f"uint{width}")
    half, mask = jnp.asarray(width // 2, word), jnp.asarray(2 ** (width // 2) - 1, word)
    a, b = lax.bitcast_convert_type(x, word), lax.bitcast_convert_type(y, word)
    (a1, a0), (b1, b0) = ((lax.shift_right_logical(v, half), v & mask) for v in (a, b))
    carried = lax.shift_right_logical(a0 * b0, half) + (a1 * b0 & mask) + (a0 * b1 & mask)
    high = (
        a1 * b1
        + lax.shift_right_logical(a1 * b0, half)
        + lax.shift_right_logical(a0 * b1, half)
        + lax.shift_right_logical(carried, half)
    )
    if jnp.issubdtype(dtype, jnp.signedinteger):
        # Read as an unsigned word, a negative number is larger by 2**width.
        zero = jnp.zeros((), word)
        high = high - jnp.where(x < 0, b, zero) - jnp.where(y < 0, a, zero)
    return lax.bitcast_convert_type(high, dtype)


def _local(ctx: LocalContext, args: Sequence[Any]) -> list[Any]:
    return [high_half(*jnp.broadcast_arrays(*args))]


rule("mulhi", traits=Traits(monotone="++"), local=_local)(elementwise_rows)
