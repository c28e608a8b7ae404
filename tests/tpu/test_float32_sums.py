"""Sums of bfloat16 parts on the TPU compiler: native by default, in float32 along a dim on request
(values on a CPU do not tell the two apart)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.plan_collectives import compared
from benchmarks.repro import CASES, judge

pytestmark = pytest.mark.tpu

CASE = CASES["sum to B"]


def compiled(options):
    plan = CASE.plan(CASE.devices(), options)
    return plan, plan.lower().compile()


def test_sums_of_16_bit_parts():
    mesh = CASE.devices()
    plan, program = compiled(CASE.choices["sbp native"])
    native, jax = judge(program, mesh.size), judge(CASE.jax(mesh), mesh.size)
    assert native == jax and list(native.bytes_by_kind) == ["all-reduce"]
    assert native.bytes_by_kind["all-reduce"] == plan.cost.bytes_per_device

    plan, program = compiled(CASE.choices["sbp float32"])
    wide, text = judge(program, mesh.size), program.as_text()
    assert set(wide.bytes_by_kind) == {"all-to-all", "all-gather"}
    assert sum(wide.bytes_by_kind.values()) == plan.cost.bytes_per_device
    assert sum(wide.bytes_by_kind.values()) == sum(native.bytes_by_kind.values())
    assert not native.step.unknown and not wide.step.unknown
    # 1.5 against 1.1 million cycles; to flatten the tensor took 7.4.
    assert native.step.cycles < wide.step.cycles < 2 * native.step.cycles
    flat = f"[{2048 * 8192}]"
    assert f"bf16{flat}" not in text and f"f32{flat}" not in text


def test_sums_over_two_mesh_axes_are_along_a_dim_too():
    case = replace(
        CASE,
        avals=tuple(jax.ShapeDtypeStruct((4096, n), jnp.bfloat16) for n in (512, 2048)),
        mesh=(("d", 4), ("e", 4)),
        in_types=("d:S(0) e:S(0)",) * 2,
        out_types="B",
    )
    mesh = case.devices()
    plan = case.plan(mesh, case.choices["sbp float32"])
    text = plan.lower().compile().as_text()
    assert not any(c.is_more for c in compared(plan, text))
    assert f"[{512 * 2048}]" not in text
