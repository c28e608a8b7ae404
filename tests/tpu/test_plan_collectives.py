"""On the TPU compiler too: per group of mesh axes, compiled bytes are at most the planned ones, and
no group is new."""

import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, PartitionSpec

import sbp
from benchmarks.gshard_bytes import PAPER, PRESETS, param_specs
from benchmarks.gshard_ref import abstract_arguments, sgd_step
from tests.run.test_collectives import assert_within_plan

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8", "2x4"])
def test_gshard_step(shape):
    names = ("data", "d")[-len(shape) :]
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v3:2x2").devices
    mesh = Mesh(np.array(devices).reshape(shape), names)
    cfg = PRESETS["small"][1](mesh.size)
    params, batch = abstract_arguments(cfg)

    def mark(x, name):
        if name not in PAPER:
            return x
        return sbp.split(x, PAPER[name], *(("d",) if name == "dispatched" else names))

    f = sbp.jit(
        lambda params, batch: sgd_step(params, batch, cfg, mark),
        mesh,
        in_types=(param_specs(params), PartitionSpec(names)),
        donate_argnums=(0,),
    )
    assert_within_plan(f.plan(params, batch), shape)
