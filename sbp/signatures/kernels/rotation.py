"""Products of two operands that are split along different loops: the shards of one operand visit
every device, one neighbour at a time.

If both operands are split on free dims, or only one on a contracted dim, no product of shards is a
part of the result. One could gather one operand. Here its shards go round a ring of devices
instead, and each device multiplies the shard that it has (Cannon's algorithm on one mesh axis). On
two mesh axes both operands may go round (the panels below). The devices send as many bytes as for
gathering, but no device stores the whole operand, and a device multiplies while it sends.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from sbp.signatures.factors import FactorMap, admissible
from sbp.signatures.kernels.halo import bytes_beside
from sbp.signatures.kernels.shards import sum_dtype, without_padding
from sbp.signatures.rule import Kernel, LocalContext, Op, Row, Sent, add_kernel
from sbp.types import Split

# ---- panels -------------------------------------------------------------------------------------
# Products whose operands both go round, each on a mesh axis of its own: panel by panel (SUMMA: van
# de Geijn and Watts, 1997).
#
# A panel is a part of a contracted dim. In each step the devices send one panel of both operands
# round their rings, and multiply; no device stores an operand as a whole. A device sends each
# shard once, as in a product where one operand goes round.


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


def gather_shards(ctx: LocalContext, x: Any, moving: RotatedOperand) -> Any:
    """The shards of all devices of a mesh axis, which have gone round the ring.

    Arguments:
      ctx: the kernel's place.
      x: this device's shard, or a part of it.
      moving: the operand.
    """
    n, dim, me = moving.n, moving.dim, lax.axis_index(moving.axis)
    chunk = x.shape[dim]
    whole = jnp.zeros([chunk * n if d == dim else size for d, size in enumerate(x.shape)], x.dtype)
    arriving = itertools.accumulate(
        [ring_of(n)] * (n - 1), lambda shard, ring: ctx.permute(shard, moving.axis, ring), initial=x
    )
    for step, shard in enumerate(arriving):
        whole = lax.dynamic_update_slice_in_dim(whole, shard, ((me + step) % n) * chunk, dim)
    return whole


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
    def of(
        params: Mapping[str, Any],
        rings: Mapping[tuple[int, int], int],
        shard: Callable[[int, int], tuple[int, bool]],
    ) -> "Panels | None":
        """The panels of a product; None where no contracted dim has blocks of one size.

        Arguments:
          params: parameters of the `dot_general`.
          rings: the number of devices on the ring of each operand that goes round, by its position
              and the dim that its mesh axis splits.
          shard: for an operand and a dim, the length of a shard and whether no shard has padding.
        """
        contracted, _ = params["dimension_numbers"]
        for dims in sorted(zip(*contracted, strict=True)):
            parts = rings.get((0, dims[0]), 1), rings.get((1, dims[1]), 1)
            (left, even_left), (right, even_right) = map(shard, (0, 1), dims)
            blocks, total = math.lcm(*parts), parts[0] * left
            is_even = even_left and even_right and total % blocks == 0
            if is_even and total == parts[1] * right:
                most = range(1, max(rings.values()) + 1)
                count = max(k for k in most if total // blocks % k == 0)
                return Panels(dims=dims, parts=parts, blocks=blocks, count=count)
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
            found[k] = gather_shards(ctx, found[k], r)
            if r.dim != panels.dims[k]:  # its last shards may have padding
                found[k] = lax.slice_in_dim(found[k], 0, ctx.global_ins[k].shape[r.dim], axis=r.dim)
        return found[0], found[1]

    def body(number: Any, state: Any) -> Any:
        pair, total = state
        return fetched(number + 1), total + product(*pair, dtype)

    start = fetched(0), jnp.zeros(ctx.local_outs[0], dtype)
    pair, total = lax.fori_loop(0, panels.count - 1, body, start)
    return (total + product(*pair, dtype)).astype(out)


# ---- rotation -----------------------------------------------------------------------------------


ROTATIONS = ("rotate_lhs", "rotate_rhs")
"""The kernels, by the position of the operand whose shards go round."""

RING_WORK = 1.5
"""How much longer a product takes in one part for each shard that goes round."""

SUM_PASSES = 3
"""Passes over the result with each shard along a contracted dim: the product is written, and added
to a sum that is read and written."""

FILL_PASSES = 3
"""Passes over the result where shards along a free dim go round: it is filled with zeros, and once
copied."""


def _turning(row: Row) -> tuple[int, int]:
    """The operand that goes round under a row, and the dim that the row splits in it."""
    operand = ROTATIONS.index(row.kernel)
    atom = row.ins[operand]
    assert isinstance(atom, Split)
    return operand, atom.dim


def _sends(op: Op, row: Row) -> tuple[Sent, ...]:
    """What a device sends: n - 1 times, a shard of the operand that goes round to its neighbour."""
    operand, dim = _turning(row)
    n, aval = op.axis_size, op.ins[operand]
    shard = -(-aval.shape[dim] // n) * bytes_beside(aval, dim)
    return (Sent("permute", (n - 1) * shard, n - 1),)


def _traffic(op: Op, row: Row) -> float:
    """The memory traffic beyond one pass over operands and result."""
    (operand, dim), n, out = _turning(row), op.axis_size, op.outs[0]
    shard = math.prod(out.shape) / n
    contracted, _ = op.params["dimension_numbers"]
    if dim in contracted[operand]:
        return SUM_PASSES * n * shard * jnp.dtype(sum_dtype(out.dtype)).itemsize
    other = op.ins[1 - operand]
    again = (n - 1) * math.prod(other.shape) / n * other.dtype.itemsize
    return again + FILL_PASSES * shard * out.dtype.itemsize


def _panel_count(op: Op, rows: Sequence[tuple[Row, int]]) -> int:
    """How many panels a product has whose operands both go round: each one goes round by itself.

    Arguments:
      op: the product on whole operands.
      rows: for each mesh axis its row and its size.
    """
    rings = {_turning(row): n for row, n in rows if row.kernel in ROTATIONS}
    if len(rings) != 2:
        return 1

    def shard(operand: int, dim: int) -> tuple[int, bool]:
        size = op.ins[operand].shape[dim]
        parts = math.prod(n for row, n in rows if row.ins[operand] == Split(dim))
        return -(-size // parts), size % parts == 0

    panels = Panels.of(op.params, rings, shard)
    return 1 if panels is None else panels.count


for _operand, _side in enumerate(("left", "right")):
    add_kernel(
        Kernel(
            name=ROTATIONS[_operand],
            summary=(
                f"shards of the {_side} operand go round the ring, each multiplied where it is"
            ),
            sends=_sends,
            nests=False,
            gathers=_operand,
            overlaps=True,
            traffic=_traffic,
            work=RING_WORK,
            times=_panel_count,
        )
    )


def rotation_rows(op: Op, m: FactorMap) -> Iterator[Row]:
    """Rows of a product in which one operand goes round. The other operand is split on a free dim
    that the result keeps; the operand that goes round is split on any of its dims that is not a
    batch dim.

    Arguments:
      op: the equation.
      m: the factors of its operands and result.
    """
    for moved, kernel in enumerate(ROTATIONS if "sum" in admissible(op.outs[0].dtype) else ()):
        own, other, out = m.ins[moved], m.ins[1 - moved], m.outs[0]
        turning = [f for f in own if f and not (f in other and f in out)]  # no batch loop
        free = [g for g in other if g and g not in own and g in out]
        for f, g in itertools.product(turning, free):
            atoms = Split(own.index(f)), Split(other.index(g))
            ins = atoms if moved == 0 else atoms[::-1]
            yield Row(ins, (Split(out.index(g)),), kernel=kernel)


def _rotated_operands(ctx: LocalContext, m: FactorMap) -> list[RotatedOperand]:
    """The operands whose shards must visit every device, each with a mesh axis. The axis splits a
    dim of the operand, and it does not split the same factor in the other operand or in the
    result."""
    split = [
        [(d, f, axis) for d, f in enumerate(m.ins[k]) if f for axis in ctx.in_axes(k, d)]
        for k in (0, 1)
    ]
    result = {(f, axis) for d, f in enumerate(m.outs[0]) for axis in ctx.out_axes(0, d)}
    beside = [result | {(f, axis) for _, f, axis in split[1 - k]} for k in (0, 1)]
    return [
        RotatedOperand(k, d, *axis, f)
        for k in (0, 1)
        for d, f, axis in split[k]
        if (f, axis) not in beside[k]
    ]


def rotate_product(
    ctx: LocalContext, m: FactorMap, args: Sequence[Any], product: Callable[..., Any]
) -> Any:
    """The shard of a product whose operands are split along different loops.

    The padding of contracted dims that do not go round must be zero already.

    Arguments:
      ctx: the kernel's place.
      m: the factors of the product.
      args: shards of the two operands.
      product: multiplies two arrays; its third argument is the dtype of the result.
    """
    rotating = sorted(_rotated_operands(ctx, m), key=lambda x: args[x.operand].size)
    operands = list(args)
    if len(rotating) == 2:
        panels = Panels.of(
            ctx.params,
            {(r.operand, r.dim): r.n for r in rotating},
            lambda k, dim: (args[k].shape[dim], isinstance(ctx.in_extent(k, dim), int)),
        )
        if panels is not None:
            return summed_panels(ctx, panels, args, rotating, product)
    for first in rotating[:-1]:
        # No contracted dim has panels of one size: the smaller operand is held whole.
        k, dim = first.operand, first.dim
        whole = gather_shards(ctx, operands[k], first)
        operands[k] = lax.slice_in_dim(whole, 0, ctx.global_ins[k].shape[dim], axis=dim)
    return (
        product(*operands, ctx.global_outs[0].dtype)
        if not rotating
        else _around(ctx, m, operands, rotating[-1], product)
    )


def _around(
    ctx: LocalContext,
    m: FactorMap,
    operands: list[Any],
    moving: RotatedOperand,
    product: Callable[..., Any],
) -> Any:
    """The shard of a product; the shards of one operand go round the ring.

    Arguments:
      ctx: the kernel's place.
      m: the factors of the product.
      operands: the operands, local or gathered.
      moving: the operand that goes round.
      product: multiplies two arrays; its third argument is the dtype of the result.
    """
    axis, n = moving.axis, moving.n
    shard, other = operands[moving.operand], operands[1 - moving.operand]
    chunk, out, shape = shard.shape[moving.dim], ctx.global_outs[0].dtype, list(ctx.local_outs[0])
    contracted = moving.factor not in m.outs[0]
    dtype = sum_dtype(out) if contracted else out
    if contracted:
        shard = without_padding(ctx, moving.operand, shard, (moving.dim,), "sum")
        along = m.ins[1 - moving.operand].index(moving.factor)
        other = jnp.pad(
            other,
            [(0, chunk * n - size if d == along else 0) for d, size in enumerate(other.shape)],
        )
    else:
        along = m.outs[0].index(moving.factor)
        shape[along] = chunk * n
    me = lax.axis_index(axis)
    ring = ring_of(n)

    def multiply(step: Any, x: Any, total: Any) -> Any:
        """Adds the product with the shard that has come `step` places, or writes it at its
        place."""
        start = ((me + step) % n) * chunk
        with_it = lax.dynamic_slice_in_dim(other, start, chunk, along) if contracted else other
        pair = (x, with_it) if moving.operand == 0 else (with_it, x)
        found = product(*pair, dtype)
        return (
            total + found
            if contracted
            else lax.dynamic_update_slice_in_dim(total, found, start, along)
        )

    def body(step: Any, state: Any) -> Any:
        x, total = state
        return ctx.permute(x, axis, ring), multiply(step, x, total)

    last, total = lax.fori_loop(0, n - 1, body, (shard, jnp.zeros(shape, dtype)))
    total = multiply(n - 1, last, total)
    if not contracted:
        total = lax.slice_in_dim(total, 0, ctx.local_outs[0][along], axis=along)
    return total.astype(out)
