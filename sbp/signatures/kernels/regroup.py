"""Reshapes of a split dim: the dims of both sides that have the same elements, and the exchange
between devices whose shards differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def leading_dims(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """For each group of a reshape: the leading dims of the source and of the target, and the
    group's dims of the source. Dims of size 1 do not count as leading."""
    found = []
    for left, right in reshape_groups(source, target):
        lead = next((d for d in left if source[d] > 1), None)
        lead_out = next((d for d in right if target[d] > 1), None)
        if lead is not None and lead_out is not None:
            found.append((lead, lead_out, left))
    return found


def keeps_shards(
    source: Sequence[int],
    target: Sequence[int],
    lead: int,
    lead_out: int,
    group: Sequence[int],
    n: int,
) -> bool:
    """Whether the shards of the source, reshaped, are the shards of the target.

    Arguments:
      source: sizes of the operand's dims.
      target: sizes of the result's dims.
      lead: the group's leading dim of the operand, which is split.
      lead_out: the group's leading dim of the result, which is split.
      group: the group's dims of the operand.
      n: number of devices along the mesh axis.
    """
    a, b = source[lead], target[lead_out]
    return (a % n == 0 and b % n == 0) or (a == b and a == math.prod(source[d] for d in group))


def regrouped(
    source: Sequence[int],
    target: Sequence[int],
    lead: int,
    lead_out: int,
    group: Sequence[int],
    n: int,
) -> Need:
    """The exchange of a reshape along a group of dims, which count as one range of elements. A
    shard is a number of whole rows of the leading dim, before and after.

    Arguments:
      source: sizes of the operand's dims.
      target: sizes of the result's dims.
      lead: the group's leading dim of the operand, which is split.
      lead_out: the group's leading dim of the result, which is split.
      group: the group's dims of the operand.
      n: number of devices along the mesh axis.
    """
    size = math.prod(source[d] for d in group)
    wanted = -(-target[lead_out] // n) * (size // target[lead_out])
    return Need(
        size,
        -(-source[lead] // n) * (size // source[lead]),
        tuple(wanted * i for i in range(n)),
        wanted,
    )
