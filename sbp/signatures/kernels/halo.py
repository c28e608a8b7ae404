"""Halo exchange: operators whose results read a range of neighbouring elements, with the dim split
on both sides.

`Windows` is what they have in common. A result element o reads the elements at `stride * o - low +
dilation * k`, k below `window`, of its operand with `base - 1` holes between elements: a slice has
windows of one element, a pad has a base, a convolution has it all. The kernel fetches what its own
results read and puts it down without padding and holes to pad, so that the primitive runs on it
with neither. Where a formula is printed wrong in the GSPMD paper (the limit of a shard's range,
appendix A.4), this is the right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import lax

from sbp import _jax
from sbp.signatures.kernels.exchange import Need, elements_sent, fetch, of_device
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, Sent, add_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Which elements of a dim each element of the result's dim reads.

    Arguments:
      size: elements of the operand's dim.
      out: elements of the result's dim.
      stride: between windows.
      low: padding before the first element; negative where elements are left out.
      window: elements in a window.
      dilation: distance between elements of a window.
      base: distance between elements of the operand in the padded array (base dilation).
    """

    size: int
    out: int
    stride: int = 1
    low: int = 0
    window: int = 1
    dilation: int = 1
    base: int = 1

    @property
    def is_identity(self) -> bool:
        """Whether each element reads the one at its own place."""
        return (
            self.size == self.out and self.stride == self.window == self.base == 1 and self.low == 0
        )

    def first(self, out: int) -> int:
        """The position in the padded array of the first element that a result element reads."""
        return self.stride * out - self.low

    def padded(self, chunk: int) -> int:
        """Positions of the padded array that `chunk` results in a row read."""
        return self.stride * (chunk - 1) + self.dilation * (self.window - 1) + 1

    def exchange(self, operand: int, dim: int, n: int) -> Exchange:
        """The exchange of an operand whose dim is read so."""
        need = self.need(n)
        return Exchange(
            operand, (dim,), need, need.width if self.base == 1 else self.padded(-(-self.out // n))
        )

    def phases(self, n: int) -> tuple[int, ...]:
        """For each device, how many positions lie before the first element in what it reads."""
        chunk = -(-self.out // n)
        return tuple(-self.first(chunk * i) % self.base for i in range(n))

    def need(self, n: int) -> Need:
        """What the devices of a mesh axis want, each for its own results."""
        chunk = -(-self.out // n)
        starts = tuple(-(-self.first(chunk * i) // self.base) for i in range(n))
        ends = ((self.first(chunk * i) + self.padded(chunk) - 1) // self.base for i in range(n))
        return Need(
            self.size,
            -(-self.size // n),
            starts,
            max(1, *(e - s + 1 for s, e in zip(starts, ends, strict=True))),
        )


def padded_shard(
    ctx: LocalContext, x: Any, dim: int, over: tuple[str, int], windows: Windows, fill: Any
) -> Any:
    """The part of the padded array that this device's results read.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard.
      dim: the dim that is split.
      over: name and size of the mesh axis that splits it.
      windows: the windows that slide along the dim.
      fill: a scalar for the elements between and around those of `x`; None when they do not matter.

    Returns:
      An array with the elements of `x` and of its neighbours at their positions in the padded dim.
    """
    axis, n = over
    found = fetch(ctx, x, dim, axis, windows.need(n), fill)
    if windows.base == 1:
        return found
    # Three cases in the paper, by how the phases of the devices differ; here each device cuts at
    # its own.
    phase = of_device(windows.phases(n), axis)
    length = windows.padded(-(-windows.out // n))
    config = [
        (windows.base - 1, max(length, windows.base), windows.base - 1) if d == dim else (0, 0, 0)
        for d in range(x.ndim)
    ]
    return lax.dynamic_slice_in_dim(
        lax.pad(found, fill, config), windows.base - 1 - phase, length, dim
    )


def bytes_beside(aval: Any, *dims: int) -> float:
    """Bytes of a tensor for each element along some of its dims."""
    return math.prod(s for d, s in enumerate(aval.shape) if d not in dims) * _jax.itemsize(
        aval.dtype
    )


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a row's kernel exchanges of one operand.

    Arguments:
      operand: its position.
      dims: the dim that is split, or the neighbouring dims that are one range of elements.
      need: who needs what along them.
      after: how many elements lie along the dim of a shard then.
    """

    operand: int
    dims: tuple[int, ...]
    need: Need
    after: int


Exchanges = list[Exchange]

_EXCHANGES: dict[str, Callable[[Op, Row], Exchanges]] = {}


def exchanges(
    *names: str,
) -> Callable[[Callable[[Op, Row], Exchanges]], Callable[[Op, Row], Exchanges]]:
    """Decorator: says what the halo kernel of some primitives exchanges under a row."""

    def enter(of: Callable[[Op, Row], Exchanges]) -> Callable[[Op, Row], Exchanges]:
        _EXCHANGES.update(dict.fromkeys(names, of))
        return of

    return enter


def _halo_sends(op: Op, row: Row) -> tuple[Sent, ...]:
    found = []
    for e in _EXCHANGES[op.name](op, row):
        elements, count = elements_sent(e.need)
        if elements:
            found.append(
                Sent("permute", elements * bytes_beside(op.ins[e.operand], *e.dims), count)
            )
    return tuple(found)


def _halo_widens(op: Op, row: Row) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (e.operand, e.dims[0], e.after) for e in _EXCHANGES[op.name](op, row) if len(e.dims) == 1
    )


add_kernel(
    Kernel(
        name="halo",
        summary="neighbours send the elements that windows reach",
        sends=_halo_sends,
        widens=_halo_widens,
        nests=False,
    )
)
