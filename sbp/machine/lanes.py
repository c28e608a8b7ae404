"""Parts of arrays that fill no whole tile of a TPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sbp.machine.scatters import TILE


def joins_lanes(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a collective joins parts along the last dim that do not fill the lanes of a TPU's
    tiles. An array whose whole last dim is shorter than the lanes has another layout.

    Arguments:
      part: the shape of a part.
      whole: the shape of the array.

    >>> joins_lanes((32768, 64), (32768, 1024)), joins_lanes((32768, 128), (32768, 1024))
    (True, False)
    """
    lanes = TILE[1]
    return len(whole) > 1 and whole[-1] >= lanes and part[-1] < whole[-1] and part[-1] % lanes != 0


def copies_for_lanes(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a gather that joins lanes makes copies that a gather of rows would not make.

    Rows that are no whole tiles are copied as well: the gather holds its result twice.

    Arguments:
      part: the shape of a part.
      whole: the shape of the array.

    >>> copies_for_lanes((32768, 64), (32768, 1024)), copies_for_lanes((64000, 8), (64000, 1024))
    (True, False)
    """
    if not joins_lanes(part, whole):
        return False
    parts = -(-whole[-1] // part[-1])
    return whole[-2] % (TILE[0] * parts) == 0


def fills_tiles(shape: Sequence[int]) -> bool:
    """Whether the last two dims of an array are whole tiles, so that the compiler has no reason to
    lay it out in another order.

    Arguments:
      shape: of one device's part.

    >>> fills_tiles((4, 2048, 1024)), fills_tiles((768, 3, 12, 64))
    (True, False)
    """
    return len(shape) > 1 and shape[-1] % TILE[1] == 0 and shape[-2] % TILE[0] == 0


def elements_in_tiles(shape: Sequence[int]) -> int:
    """Elements that an array takes with its last two dims in whole tiles.

    Arguments:
      shape: of one device's part.

    >>> elements_in_tiles((16384, 26, 64)), elements_in_tiles((4096, 256))
    (67108864, 1048576)
    """
    last = [-(-n // tile) * tile for n, tile in zip(shape[-2:], TILE[-len(shape) :], strict=True)]
    return math.prod((*shape[:-2], *last))
