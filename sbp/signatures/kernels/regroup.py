"""Reshapes of a split dim: groups of dims that have the same elements on both sides, and the
exchange between devices where shards differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.signatures.kernels.exchange import Need


def reshape_groups(
    source: Sequence[int], target: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """The finest grouping of the dims of a reshape, as pairs of dim lists with the same number of
    elements.

    >>> reshape_groups((6, 4), (2, 3, 4))
    [([0], [0, 1]), ([1], [2])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [], []
        a = b = 1
        if i < len(source):
            left, a, i = [i], source[i], i + 1
        if j < len(target):
            right, b, j = [j], target[j], j + 1
        while a != b:
            if a < b and i < len(source):
                left.append(i)
                a, i = a * source[i], i + 1
            elif b < a and j < len(target):
                right.append(j)
                b, j = b * target[j], j + 1
            else:
                return groups
        groups.append((left, right))
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeGroup:
    """Dims of a reshape whose elements are the same before and after; their leading dims split.

    Arguments:
      source: sizes of the operand's dims.
      target: sizes of the result's dims.
      dims: the group's dims of the operand.
      lead: the first of them with more than one element.
      lead_out: the first of the group's dims of the result with more than one element.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    dims: tuple[int, ...]
    lead: int
    lead_out: int

    @property
    def size(self) -> int:
        """The number of elements of the group."""
        return math.prod(self.source[d] for d in self.dims)

    def keeps_shards(self, n: int) -> bool:
        """Whether the shards of the operand on n devices, reshaped, are those of the result."""
        rows, rows_out = self.source[self.lead], self.target[self.lead_out]
        return (rows % n == 0 and rows_out % n == 0) or rows == rows_out == self.size

    def need(self, n: int) -> Need:
        """The range of the group's elements that each of n devices needs. A shard has a number of
        whole rows of the leading dim, before and after."""
        rows, rows_out = self.source[self.lead], self.target[self.lead_out]
        wanted = -(-rows_out // n) * (self.size // rows_out)
        return Need(
            self.size,
            -(-rows // n) * (self.size // rows),
            tuple(wanted * i for i in range(n)),
            wanted,
        )


def split_groups(source: Sequence[int], target: Sequence[int]) -> list[ReshapeGroup]:
    """The groups of a reshape with more than one element; other groups have no dim to split."""
    found = []
    for left, right in reshape_groups(source, target):
        lead = next((d for d in left if source[d] > 1), None)
        lead_out = next((d for d in right if target[d] > 1), None)
        if lead is not None and lead_out is not None:
            found.append(
                ReshapeGroup(
                    source=tuple(source),
                    target=tuple(target),
                    dims=tuple(left),
                    lead=lead,
                    lead_out=lead_out,
                )
            )
    return found
