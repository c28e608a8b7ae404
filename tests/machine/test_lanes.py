"""Which gathers of a TPU make copies for the layout of their parts."""

import pytest

from sbp.machine.lanes import copies_for_lanes, joins_lanes


@pytest.mark.parametrize(
    ("part", "whole", "joins", "copies"),
    [
        ((32768, 64), (32768, 1024), True, True),
        ((32768, 128), (32768, 1024), False, False),  # whole lanes
        ((8192, 1024), (32768, 1024), False, False),  # rows
        ((32768, 16), (32768, 64), False, False),  # shorter than the lanes
        ((64000, 8), (64000, 1024), True, False),  # 500 rows a device are no whole tiles, either
        ((64,), (1024,), False, False),
    ],
)
def test_parts(part, whole, joins, copies):
    assert joins_lanes(part, whole) == joins and copies_for_lanes(part, whole) == copies
