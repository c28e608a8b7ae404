"""Images split in space, on the TPU compiler: halos within the plan's bytes, and no more than XLA's
own partitioner sends."""

import pytest

from benchmarks.halo_bytes import sbp_plan, tpu_mesh, under_jit, under_sbp
from tests.run.test_collectives import assert_within_plan

pytestmark = pytest.mark.tpu


def test_convolutions_in_space():
    mesh = tpu_mesh("v5e:2x4")
    plan = sbp_plan(mesh)
    assert {"halo"} == {k for o, _ in plan.program.kernels() for k in o.row.kernels if k != "local"}
    assert_within_plan(plan, (2, 4))
    jit, ours = under_jit(mesh), under_sbp(mesh)
    assert 0 < ours.total <= jit.total
    assert ours.temporaries <= jit.temporaries
