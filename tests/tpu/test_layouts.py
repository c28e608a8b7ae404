"""Layouts that the TPU compiler gives to the results of collectives along the last dim."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as Spec

import sbp
from benchmarks.hlo.traffic import computations_of, instructions, shape_bytes
from sbp.infer.space import RELAYOUT_PASSES
from sbp.machine.table import HARDWARE

pytestmark = pytest.mark.tpu

HERTZ = 1.5e9
ARRAY = jax.ShapeDtypeStruct((32768, 1024), jnp.float32)
ARRAY_BYTES = 4 * 32768 * 1024


def mesh():
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    return Mesh(np.array(chips), ("d",), axis_types=(AxisType.Auto,))


def copies(lowered):
    """The cycles of each copy of a whole array."""
    computations, entry = computations_of(lowered.compile().as_text())
    return [
        int(cycles)
        for _, rhs in instructions(computations[entry])
        if " copy(" in rhs and shape_bytes(rhs.split(" copy(")[0]) == ARRAY_BYTES
        for cycles in re.findall(r'"estimated_cycles":"(\d+)"', rhs)
    ]


def test_a_gather_of_partly_filled_lanes_copies_what_meets_it():
    def gathered(x, other):
        return other + 2 * jax.lax.all_gather(x, "d", axis=1, tiled=True)

    specs = (Spec(None, "d"), Spec())
    f = jax.shard_map(gathered, mesh=mesh(), in_specs=specs, out_specs=Spec(), check_vma=False)
    found = copies(jax.jit(f).lower(ARRAY, ARRAY))
    assert len(found) == 2
    a_pass = ARRAY_BYTES / HARDWARE["tpu-v5e"].hbm_bytes_per_second
    assert sum(found) / HERTZ / a_pass == pytest.approx(RELAYOUT_PASSES, rel=0.05)


def test_a_plan_exchanges_lanes_before_it_gathers_and_copies_nothing():
    def summed(x, other):
        return other + sbp.annotate(sbp.annotate(x * 2, "d:S(1)") * 2, "B")

    plan = sbp.jit(summed, mesh(), in_types=("d:S(1)", "B"), out_types="B").plan(ARRAY, ARRAY)
    kinds = [s.kind for b in plan.program.boxes() for s in b.box.steps]
    assert kinds == ["all_to_all", "all_gather"]
    assert copies(plan.lower()) == []
