"""Sample calls of kernels that are written for one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from calls import f, more
from jax.experimental import pallas as pl


def _kernel(
    grid: tuple[int, ...], blocks: list[pl.BlockSpec], shape: tuple[int, ...]
) -> Callable[..., Any]:
    """A kernel of two operands that does not split within a block; the last of `blocks` is that of
    the result."""

    def line(x: Any, w: Any, o: Any) -> None:
        o[...] = jnp.sin(x[...]) + jnp.cumsum(x[...] * w[...], -1)

    out = jax.ShapeDtypeStruct(shape, np.float32)
    return pl.pallas_call(
        line, out, grid=grid, in_specs=blocks[:-1], out_specs=blocks[-1], interpret=True
    )


_rows_of = pl.BlockSpec((1, 3), lambda i: (i, 0))
_pairs_of = pl.BlockSpec((2, None, 3), lambda i, j: (j, i, 0))
more(
    {
        "pallas_call": [
            (
                _kernel((5,), [_rows_of, pl.BlockSpec((3,), lambda i: (0,)), _rows_of], (5, 3)),
                (f(5, 3), f(3)),
            ),
            (
                _kernel(
                    (3, 4),
                    [_pairs_of, pl.BlockSpec((2, 3), lambda i, j: (j, 0)), _pairs_of],
                    (8, 3, 3),
                ),
                (f(8, 3, 3), f(8, 3)),
            ),
        ]
    }
)
