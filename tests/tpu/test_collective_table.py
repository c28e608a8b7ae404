"""The rows of `sbp/machine/lowerings.csv` are what the installed compiler does; where they are not,
`python -m benchmarks.collective_table --write` measures it."""

import pytest
from jax.experimental import topologies

from benchmarks.collective_table import probe
from sbp.machine.lowerings import lowerings

pytestmark = pytest.mark.tpu


def test_the_smallest_slice():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    found = {
        (kind, dtype): (tuple(made.split("+")), how == "beside work")
        for kind, dtype, made, how in probe(devices, (4,), 0)
    }
    assert found == {
        (row.kind, row.dtype): (row.compiled, row.beside_work)
        for row in lowerings()
        if (row.hardware, row.slice, row.mesh) == ("tpu-v5e", "2x2", (4,))
    }
