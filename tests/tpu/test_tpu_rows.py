"""Single rows on the TPU compiler send no more than XLA's own partitioner."""

import pytest

from benchmarks.row_bytes import CASES, figures, mesh_of, plan_of, under_jit

pytestmark = pytest.mark.tpu

SMALL = 2**18
"""Bytes of temporaries that XLA puts into one kind of memory or another."""

LARGER = {"stencil": 288 * 2**10, "stencil, gradient": 384 * 2**10}
"""Cases with more, of 2 MiB that a device has: rows that come from the neighbours stand beside the
shard, where `jax.jit` has no temporaries and sends twelve times the bytes."""


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_memory(name):
    case = CASES[name]
    plan = plan_of(case, mesh_of(case, "v5e:2x4"))
    jit, ours = under_jit(case, plan), figures(plan.lower().compile(), case)
    assert 0 < ours.total <= jit.total
    assert ours.temporaries <= max(jit.temporaries, LARGER.get(name, SMALL))
