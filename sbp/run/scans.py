"""A scan whose stacked results start as memory that nothing has written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]]
"""The body of a scan: `(carry, slices) -> (carry, results)`."""


def scan_in_place(results: Sequence[Any]) -> Callable[..., Any]:
    """A function in the place of `lax.scan`, which writes zeros into the stacks before each turn
    writes its own part of them. The TPU compiler does not see that nothing reads the zeros
    (`python -m benchmarks.scan_loops`).

    Arguments:
      results: shape and dtype of what a turn adds to each stack.
    """

    def scan(
        step: Step,
        initial: tuple[Any, ...],
        slices: tuple[Any, ...],
        *,
        length: int,
        reverse: bool,
        unroll: int,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        assert unroll == 1

        def turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
            number, carry, stacks = state
            at = length - 1 - number if reverse else number
            carry, made = step(carry, tuple(_at(x, at) for x in slices))
            stacks = tuple(
                lax.dynamic_update_index_in_dim(stack, x, at, 0, allow_negative_indices=False)
                for stack, x in zip(stacks, made, strict=True)
            )
            return number + 1, carry, stacks

        stacks = _unwritten(
            [jax.ShapeDtypeStruct((length, *r.shape), r.dtype) for r in results], initial
        )
        state = (0, initial, stacks)
        _, carry, stacks = lax.while_loop(lambda state: state[0] < length, turn, state)
        return carry, stacks

    return scan


def _at(x: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def _unwritten(shapes: Sequence[Any], carry: Sequence[Any]) -> tuple[Any, ...]:
    """Memory that nothing has written, from when a carry is there.

    The compiler may take such memory at the start of the program, and hold it through all that runs
    before (`python -m benchmarks.gshard_bytes`: 4.59 GiB in place of 4.02). A conditional cannot
    run before its predicate, here whether a number of the carry is NaN. Both branches do the same.
    """

    def made() -> tuple[Any, ...]:
        return tuple(lax.empty(s.shape, s.dtype) for s in shapes)

    for x in carry:
        if jnp.issubdtype(x.dtype, jnp.floating) and x.size:
            number = lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), ())
            return lax.cond(number != number, lambda: made(), lambda: made())
    return made()
