"""The data of what the compiler makes of collectives, and the slice that stands for one that was
not measured."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.machine.lanes import copies_for_lanes, joins_lanes
from sbp.machine.lowerings import compiler, lowerings, scatters_whole_mesh
from sbp.machine.mesh import HARDWARE, MeshSpec
from sbp.machine.scatters import arrangement


def test_every_kind_layout_and_dtype_was_measured():
    assert re.fullmatch(r"libtpu [\d.]+", compiler())
    rows = lowerings()
    assert {r.hardware for r in rows} == {"tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"}
    layouts = {(r.hardware, r.slice, r.mesh, r.axis) for r in rows}
    assert len(rows) == 10 * len(layouts) and all(r.compiled != ("",) for r in rows)


def test_two_mesh_axes_keep_every_kind():
    """Only over all devices does the compiler change a kind."""
    names = {"permute": "collective-permute"}
    for row in lowerings():
        if len(row.mesh) == 2:
            assert names.get(row.kind, row.kind.replace("_", "-")) in row.compiled


@pytest.mark.parametrize(
    ("name", "devices", "keeps", "exact"),
    [
        ("tpu-v5e", 8, True, True),
        ("tpu-v5e", 16, False, True),
        ("tpu-v5e", 12, False, False),
        ("tpu-v5e", 1024, False, False),
        ("tpu-v2", 8, False, False),
        ("tpu-v7x", 8, False, False),
    ],
)
def test_the_nearest_slice_is_taken(name, devices, keeps, exact):
    found = scatters_whole_mesh(HARDWARE[name], devices)
    assert found is not None and (found.holds, found.is_exact) == (keeps, exact)
    stages = MeshSpec(axes=(("d", devices),), hardware=HARDWARE[name]).stages(devices)
    assert bool(stages) != keeps


def test_what_the_user_says_counts():
    described = dataclasses.replace(HARDWARE["tpu-v5e"], scatters_whole_mesh=True)
    assert scatters_whole_mesh(described, 16) is None
    assert MeshSpec(axes=(("d", 16),), hardware=described).stages(16) == ()
    assert scatters_whole_mesh(HARDWARE["h100"], 16) is None


def test_the_report_names_the_slice():
    def text(devices: int, hardware: str | sbp.Hardware = "tpu-v5e") -> str:
        aval = jax.ShapeDtypeStruct((4096 * devices, 1024), jnp.bfloat16)
        f = sbp.jit(
            lambda x, y: x.T @ y,
            jax.sharding.AbstractMesh((devices,), ("d",)),
            in_types=("d:S(0)", "d:S(0)"),
            out_types="d:S(0)",
            hardware=hardware,
        )
        return f.plan(aval, aval).report().text(400)

    assert "were not measured" not in text(16)
    assert "compile as on tpu-v5e 8x8 (libtpu" in text(32)
    said = dataclasses.replace(HARDWARE["tpu-v5e"], scatters_whole_mesh=True)
    assert "were not measured" not in text(32, said)


# ---- lanes ---------------------------------------------------------------------------------------


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


# ---- scatters ------------------------------------------------------------------------------------


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
