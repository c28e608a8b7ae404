"""Which dims of a gather or scatter are batches, whole slices, looked up, or read by windows: from
JAX's dimension numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.signatures.factors import Dims, FactorMap


def gather_factors(
    params: dict[str, Any], operand_shape: Sequence[int], indices_rank: int, out_rank: int
) -> FactorMap:
    """Factors of a gather: whole slices (`w`), index batches (`i`) and operand batch dims (`b`)."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    operand: list[str | None] = [None] * len(operand_shape)
    indices: list[str | None] = [f"i{d}" for d in range(indices_rank - 1)] + [None]
    for n, (d, i) in enumerate(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    ):
        operand[d] = indices[i] = f"b{n}"
    window = [
        d
        for d in range(len(operand_shape))
        if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    out: list[str | None] = [None] * out_rank
    for d, o in zip(window, numbers.offset_dims, strict=True):
        # An index into a dim that is read whole is clipped to 0, or fills, on a shard as on the
        # whole.
        if sizes[d] == operand_shape[d]:
            operand[d] = out[o] = f"w{d}"
    batch = iter(indices[:-1])
    for o in range(out_rank):
        if o not in numbers.offset_dims:
            out[o] = next(batch)
    return FactorMap(ins=(tuple(operand), tuple(indices)), outs=(tuple(out),))


def looked_up(numbers: Any) -> list[int]:
    """Operand dims of a gather that an index picks one element of (the vocabulary of an
    embedding)."""
    return [int(d) for d in numbers.collapsed_slice_dims if d in numbers.start_index_map]


def in_windows(numbers: Any, sizes: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Operand dims that an index picks a window of."""
    kept = (d for d in numbers.start_index_map if d not in numbers.collapsed_slice_dims)
    return [int(d) for d in kept if 0 < sizes[d] < shape[d]]


def scatter_factors(
    params: dict[str, Any], operand: Sequence[int], indices_rank: int, updates: Sequence[int]
) -> tuple[Dims, Dims, Dims]:
    """Factors of a scatter's operand, indices and updates."""
    numbers = params["dimension_numbers"]
    on_operand: list[str | None] = [None] * len(operand)
    on_indices: list[str | None] = [f"i{d}" for d in range(indices_rank - 1)] + [None]
    on_updates: list[str | None] = [None] * len(updates)
    for n, (d, i) in enumerate(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    ):
        on_operand[d] = on_indices[i] = f"b{n}"
    for d, u in zip(scatter_window(numbers, len(operand)), numbers.update_window_dims, strict=True):
        # An index into a dim that is written whole is clipped to 0, or drops, on a shard as on the
        # whole.
        if updates[u] == operand[d]:
            on_operand[d] = on_updates[u] = f"w{d}"
    batch = iter(on_indices[:-1])
    for u in range(len(updates)):
        if u not in numbers.update_window_dims:
            on_updates[u] = next(batch)
    return tuple(on_operand), tuple(on_indices), tuple(on_updates)


def scatter_window(numbers: Any, rank: int) -> list[int]:
    return [
        d
        for d in range(rank)
        if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]


def hit_dims(numbers: Any) -> list[int]:
    """Operand dims of a scatter that an index picks one element of."""
    return [
        int(d) for d in numbers.inserted_window_dims if d in numbers.scatter_dims_to_operand_dims
    ]


def scatter_windows(numbers: Any, operand: Sequence[int], updates: Sequence[int]) -> dict[int, int]:
    """The size of the window of each operand dim that an index picks a window of."""
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
