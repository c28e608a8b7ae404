"""A report says whether its hardware was given or assumed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import sbp

ASSUMED = "hardware tpu-v3 (assumed, since the mesh is abstract; hardware= names another)"
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


@pytest.mark.parametrize(("hardware", "is_said"), [(None, True), ("tpu-v3", False)])
def test_hardware_that_was_assumed_is_said(hardware, is_said):
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    report = sbp.jit(lambda x: x + 1, mesh, hardware=hardware).plan(X).report()
    assert (ASSUMED in " ".join(report.text().split())) is is_said
    assert (ASSUMED in " ".join(str(report.short()).split())) is is_said


def test_hardware_of_devices_is_not_assumed():
    report = sbp.jit(lambda x: x + 1, sbp.make_mesh((2,), ("data",))).plan(X).report()
    assert "assumed" not in report.text()
