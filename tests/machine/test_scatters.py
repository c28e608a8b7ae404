"""The arrangements of a value for a reduce-scatter on a TPU. What the compiler makes of them is
tested in tests/tpu/test_compiled_plans.py."""

import pytest

from sbp.machine.mesh import HARDWARE, MeshSpec
from sbp.machine.scatters import arrangement


@pytest.mark.parametrize(
    ("shape", "dim", "itemsize", "expected"),
    [
        ((4096, 1024), 0, 2, "as it is"),
        ((4096, 1024), 1, 2, "as it is"),
        ((4096, 512), 1, 2, "blocks first"),
        ((4096, 512), 1, 4, "as it is"),
        ((4096, 32), 1, 4, "rows of lanes"),
        ((16, 8192), 0, 4, "rows of lanes"),
        ((4, 3, 5), 0, 4, "as it is"),
        ((3, 16, 128, 512), 1, 2, "dim first"),
        ((2048, 16, 128), 1, 2, "dim first"),
        ((4096,), 0, 4, "rows of lanes"),
        ((400,), 0, 4, "exchange"),
    ],
)
def test_arrangement(shape, dim, itemsize, expected):
    assert arrangement(shape, dim, 4, itemsize, is_tpu=True) == expected
    assert arrangement(shape, dim, 4, itemsize, is_tpu=False) == "as it is"


def test_each_stage_has_its_arrangement():
    mesh = MeshSpec(axes=(("d", 16),), hardware=HARDWARE["tpu-v5e"])
    assert mesh.arrangements((4096, 2048), 1, 16, 2) == ("as it is", "blocks first")
    assert mesh.arrangements((4096, 2048), 1, 4, 2) == ("as it is",)
