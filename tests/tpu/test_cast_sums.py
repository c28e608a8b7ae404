"""`reduce_dtype=jnp.bfloat16` on the TPU compiler: a gradient that is made in float32 and cast is
summed in bfloat16, for half of the bytes of its sum in float32."""

import pytest

from benchmarks.repro import CASES, judge

pytestmark = pytest.mark.tpu

CASE = CASES["cast sum"]


def test_a_sum_behind_a_cast_sends_half_of_the_bytes():
    mesh, found = CASE.devices(), []
    for options in CASE.choices.values():
        plan = CASE.plan(mesh, options)
        compiled = judge(plan.lower().compile(), mesh.size)
        assert sum(compiled.bytes_by_kind.values()) == plan.cost.bytes_per_device
        found.append(compiled.bytes_by_kind)
    before, after = found
    assert before.keys() == after.keys() == {"all-gather", "reduce-scatter"}
    assert 2 * after["reduce-scatter"] == before["reduce-scatter"]
    assert after["all-gather"] == before["all-gather"]
