"""Products whose operands both go round, each on a mesh axis of its own: panel by panel (SUMMA: van
de Geijn and Watts, 1997).

A panel is a part of a contracted dim. In each step the devices send one panel of both operands
round their rings, and multiply; no device stores an operand as a whole. A device sends each shard
once, as in a product where one operand goes round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.kernels.shards import sum_dtype
from sbp.signatures.rule import LocalContext


@dataclass(frozen=True, slots=True)
class RotatedOperand:
    """An operand whose shards visit every device.

    Arguments:
      operand: its position.
      dim: the dim that the mesh axis splits.
      axis: the name of the mesh axis.
      n: number of devices along it.
      factor: the factor of the dim.
    """

    operand: int
    dim: int
    axis: str
    n: int
    factor: str


def ring_of(n: int) -> list[tuple[int, int]]:
    """The (source, destination) devices of a step in which each device sends to the one before
    it."""
    return [(i, (i - 1) % n) for i in range(n)]


def gathered(ctx: LocalContext, x: Any, moving: RotatedOperand) -> Any:
    """The shards of all devices of a mesh axis, which have gone round the ring.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard, or a part of it.
      moving: the operand.
    """
    n, dim, me = moving.n, moving.dim, lax.axis_index(moving.axis)
    chunk, shape = x.shape[dim], list(x.shape)
    shape[dim] = chunk * n
    whole = jnp.zeros(shape, x.dtype)
    for step in range(n):
        whole = lax.dynamic_update_slice_in_dim(whole, x, ((me + step) % n) * chunk, dim)
        if step < n - 1:
            x = ctx.permute(x, moving.axis, ring_of(n))
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractedDim:
    """A contracted dim of a product whose operands go round.

    Arguments:
      dims: the dim in both operands.
      sizes: its length in a shard of each operand.
      parts: for each operand, how many shards it has along this dim on its ring.
      is_even: whether no shard has padding along it.
    """

    dims: tuple[int, int]
    sizes: tuple[int, int]
    parts: tuple[int, int]
    is_even: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """The panels of a contracted dim. The dim is `blocks` blocks, of which a shard has one or
    several; a panel has a slice of each block.

    Arguments:
      dims: the contracted dim in both operands.
      parts: for each operand, how many shards it has along this dim on its ring.
      blocks: number of blocks.
      count: number of panels.
    """

    dims: tuple[int, int]
    parts: tuple[int, int]
    blocks: int
    count: int

    @staticmethod
    def of(contracted: Sequence[ContractedDim], most: int) -> Panels | None:
        """The panels of a product; None where no contracted dim has blocks of one size.

        Arguments:
          contracted: its contracted dims.
          most: most panels.
        """
        for c in contracted:
            blocks, total = math.lcm(*c.parts), c.parts[0] * c.sizes[0]
            if c.is_even and total == c.parts[1] * c.sizes[1] and total % blocks == 0:
                count = max(k for k in range(1, most + 1) if total // blocks % k == 0)
                return Panels(dims=c.dims, parts=c.parts, blocks=blocks, count=count)
        return None

    def panel(self, x: Any, operand: int, number: Any) -> Any:
        """A panel of this device's shard of an operand.

        Arguments:
          x: the shard.
          operand: the operand's position.
          number: the number of the panel.
        """
        d = self.dims[operand]
        before, after = x.shape[:d], x.shape[d + 1 :]
        blocks = x.reshape(*before, self.blocks // self.parts[operand], self.count, -1, *after)
        taken = lax.dynamic_index_in_dim(blocks, number, d + 1, keepdims=False)
        return taken.reshape(*before, -1, *after)


def summed_panels(
    ctx: LocalContext,
    panels: Panels,
    args: Sequence[Any],
    rotating: Sequence[RotatedOperand],
    product: Callable[..., Any],
) -> Any:
    """The shard of a product, panel by panel. A device multiplies one panel while the next one is
    on its way.

    Arguments:
      ctx: the kernel's place.
      panels: the panels.
      args: shards of the operands.
      rotating: the operands that go round.
      product: multiplies two arrays; its third argument is the dtype of the result.
    """
    out = ctx.global_outs[0].dtype
    dtype = sum_dtype(out)

    def fetched(number: Any) -> tuple[Any, Any]:
        """A panel of both operands."""
        found = [panels.panel(x, k, number) for k, x in enumerate(args)]
        for r in rotating:
            k = r.operand
            found[k] = gathered(ctx, found[k], r)
            if r.dim != panels.dims[k]:  # its last shards may have padding
                found[k] = lax.slice_in_dim(found[k], 0, ctx.global_ins[k].shape[r.dim], axis=r.dim)
        return found[0], found[1]

    def body(number: Any, state: Any) -> Any:
        pair, total = state
        return fetched(number + 1), total + product(*pair, dtype)

    start = fetched(0), jnp.zeros(ctx.local_outs[0], dtype)
    pair, total = lax.fori_loop(0, panels.count - 1, body, start)
    return (total + product(*pair, dtype)).astype(out)
