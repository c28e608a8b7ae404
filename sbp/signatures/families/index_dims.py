"""The roles of the dims of a gather or scatter, read from JAX's dimension numbers. A dim is a batch
dim, or it is read or written whole, or an index picks one element of it, or an index picks a window
of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.signatures.factors import Dims, FactorMap


def gather_factors(
    params: dict[str, Any], operand_shape: Sequence[int], indices_rank: int, out_rank: int
) -> FactorMap:
    """The factors of a gather: whole slices `w`, index batches `i` and operand batch dims `b`.

    Arguments:
      params: parameters of the gather.
      operand_shape: shape of the operand.
      indices_rank: number of dims of the indices.
      out_rank: number of dims of the result.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    operand: list[str | None] = [None] * len(operand_shape)
    indices: list[str | None] = [f"i{d}" for d in range(indices_rank - 1)] + [None]
    for n, (d, i) in enumerate(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    ):
        operand[d] = indices[i] = f"b{n}"
    out: list[str | None] = [None] * out_rank
    for d, o in zip(gather_window(numbers, len(operand_shape)), numbers.offset_dims, strict=True):
        # A dim that is read whole splits: on a shard, as on the whole operand, its index is
        # clipped to 0 or fills.
        if sizes[d] == operand_shape[d]:
            operand[d] = out[o] = f"w{d}"
    batch = iter(indices[:-1])
    for o in range(out_rank):
        if o not in numbers.offset_dims:
            out[o] = next(batch)
    return FactorMap(ins=(tuple(operand), tuple(indices)), outs=(tuple(out),))


def gather_window(numbers: Any, rank: int) -> list[int]:
    """Operand dims of a gather that the window dims of the result stand for, in order."""
    return [
        d
        for d in range(rank)
        if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]


def looked_up(numbers: Any) -> list[int]:
    """Operand dims of a gather where an index picks one element, such as the vocabulary of an
    embedding."""
    return [int(d) for d in numbers.collapsed_slice_dims if d in numbers.start_index_map]


def in_windows(numbers: Any, sizes: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Operand dims of a gather where an index picks a window.

    Arguments:
      numbers: the dimension numbers.
      sizes: the slice sizes.
      shape: shape of the operand.
    """
    kept = (d for d in numbers.start_index_map if d not in numbers.collapsed_slice_dims)
    return [int(d) for d in kept if 0 < sizes[d] < shape[d]]


def scatter_factors(
    params: dict[str, Any], operand: Sequence[int], indices_rank: int, updates: Sequence[int]
) -> tuple[Dims, Dims, Dims]:
    """The factors of a scatter's operand, indices and updates, named as those of a gather.

    Arguments:
      params: parameters of the scatter.
      operand: shape of the operand.
      indices_rank: number of dims of the indices.
      updates: shape of the updates.
    """
    numbers = params["dimension_numbers"]
    on_operand: list[str | None] = [None] * len(operand)
    on_indices: list[str | None] = [f"i{d}" for d in range(indices_rank - 1)] + [None]
    on_updates: list[str | None] = [None] * len(updates)
    for n, (d, i) in enumerate(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    ):
        on_operand[d] = on_indices[i] = f"b{n}"
    for d, u in zip(scatter_window(numbers, len(operand)), numbers.update_window_dims, strict=True):
        # A dim that is written whole splits: on a shard, as on the whole operand, its index is
        # clipped to 0 or dropped.
        if updates[u] == operand[d]:
            on_operand[d] = on_updates[u] = f"w{d}"
    batch = iter(on_indices[:-1])
    for u in range(len(updates)):
        if u not in numbers.update_window_dims:
            on_updates[u] = next(batch)
    return tuple(on_operand), tuple(on_indices), tuple(on_updates)


def scatter_window(numbers: Any, rank: int) -> list[int]:
    """Operand dims of a scatter that the window dims of the updates stand for, in order."""
    return [
        d
        for d in range(rank)
        if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]


def hit_dims(numbers: Any) -> list[int]:
    """Operand dims of a scatter where an index picks one element."""
    return [
        int(d) for d in numbers.inserted_window_dims if d in numbers.scatter_dims_to_operand_dims
    ]


def scatter_windows(numbers: Any, operand: Sequence[int], updates: Sequence[int]) -> dict[int, int]:
    """Operand dims of a scatter where an index picks a window, with the size of the window.

    Arguments:
      numbers: the dimension numbers.
      operand: shape of the operand.
      updates: shape of the updates.
    """
    sizes = zip(
        scatter_window(numbers, len(operand)),
        (updates[u] for u in numbers.update_window_dims),
        strict=True,
    )
    return {
        d: size
        for d, size in sizes
        if d in numbers.scatter_dims_to_operand_dims and 0 < size < operand[d]
    }
