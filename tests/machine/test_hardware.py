"""The table of hardware: its kinds, published figures of pods, products, and figures that are
refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh

import sbp
from sbp.cli import main
from sbp.machine.hardware import Network
from sbp.machine.mesh import mesh_spec
from sbp.machine.table import HARDWARE, hardware_of_kind
from tests.machine.specs import KINDS, spec

# ---- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_kind", "platform", "name"),
    [
        # What the TPU compiler (libtpu 0.0.51) says of its topologies, and what CUDA says of the
        # cards.
        *(
            ("TPU v2", "tpu", "tpu-v2"),
            ("TPU v3", "tpu", "tpu-v3"),
            ("TPU v4", "tpu", "tpu-v4"),
            ("TPU v5 lite", "tpu", "tpu-v5e"),
        ),
        *(
            ("TPU v5", "tpu", "tpu-v5p"),
            ("TPU v5p", "tpu", "tpu-v5p"),
            ("TPU v6 lite", "tpu", "tpu-v6e"),
            ("TPU7x", "tpu", "tpu-v7x"),
        ),
        *(
            ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
            ("NVIDIA H200", "gpu", "h200"),
            ("cpu", "cpu", "cpu"),
        ),
        *(("NVIDIA A100-SXM4-40GB", "gpu", "h100"), ("TPU v9", "tpu", "tpu-v6e")),
    ],
)
def test_device_kinds(device_kind, platform, name):
    assert hardware_of_kind(device_kind, platform).name == name


@pytest.mark.parametrize(
    ("name", "devices", "all_reduce", "bisection", "within"),
    [
        ("tpu-v5e", 256, 51.2e12, 1.6e12, 1e-9),  # cloud.google.com/tpu/docs/v5e
        (
            "tpu-v4",
            4096,
            1.1e15,
            24e12,
            0.12,
        ),  # cloud.google.com/tpu/docs/v4, whose figures are for 45 GB/s a link
    ],
)
def test_pods_have_their_published_bandwidth(name, devices, all_reduce, bisection, within):
    """What all devices send in an all-reduce; and in an all-to-all half of them have a quarter of
    their bytes go each way across."""
    mesh = spec(name, d=devices)
    assert devices / mesh.collective("all_reduce", (0,)).seconds_per_byte == pytest.approx(
        all_reduce, rel=within
    )
    buffer_seconds = mesh.collective("all_to_all", (0,)).seconds_per_byte * (devices - 1) / devices
    assert devices / 4 / buffer_seconds == pytest.approx(bisection, rel=within)


def test_v3_moves_the_gradients_of_the_paper_as_its_links_allow():
    """3.56 GB of replicated gradients in the step of its largest model, over the four links of each
    chip."""
    mesh = spec("tpu-v3", d=2048)
    sent = 2 * 2047 / 2048 * 3.56e9
    assert mesh.collective("all_reduce", (0,)).of(sent) == pytest.approx(
        2 * 3.56e9 / (4 * 41e9), rel=0.01
    )


def test_an_unknown_slow_axis_is_refused():
    with pytest.raises(sbp.SbpError, match=r"no axis 'dcm'.*did you mean") as raised:
        mesh_spec(
            AbstractMesh((2,), ("dcn",)), HARDWARE["tpu-v5e"].with_axis("dcm", bytes_per_second=1e9)
        )
    assert raised.value.code == "unknown-axis"
    with pytest.raises(sbp.SbpError, match="above 0"):
        HARDWARE["tpu-v5e"].with_axis("dcn", bytes_per_second=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(
            (f, v, "is a number above 0")
            for f in ("link_bytes_per_second", "hbm_bytes")
            for v in (0, -1.0, math.nan, -math.inf, "1e9")
        ),
        *(
            (f, v, "is a number above 0")
            for f in ("flops_per_second", "hbm_bytes_per_second")
            for v in (0, None, True)
        ),
        *(
            (f, 0, "is a number above 0")
            for f in ("f32_flops_per_second", "vector_flops_per_second")
        ),
        *(
            (f, v, "is a finite number from 0 on")
            for f in ("latency_seconds", "hop_seconds", "fast_memory_bytes")
            for v in (-1e-6, math.nan, math.inf, None)
        ),
        *(
            (f, v, "is a whole number from 1 on")
            for f in ("torus_dims", "ring_chips", "joined_devices", "product_rows")
            for v in (0, -1, 1.5, True)
        ),
        ("topology", "tours", "no topology 'tours'; did you mean \"torus\"?"),
        ("platform", "gpu", "no platform 'gpu'"),
        ("overlaps", 1, "is True or False"),
        ("beyond", 25e9, "is a Network or None"),
        ("slow_axes", {"dcn": 1e9}, "is a tuple of (mesh axis, Network)"),
        ("name", None, "is a string"),
    ],
)
def test_hardware_that_cannot_be_is_refused(field, value, message):
    with pytest.raises(sbp.SbpError) as raised:
        dataclasses.replace(HARDWARE["tpu-v5e"], **{field: value})
    assert raised.value.code == (
        "unknown-option" if field in ("topology", "platform") else "bad-argument"
    )
    assert field in str(raised.value) and message in str(raised.value)


@pytest.mark.parametrize(
    "figures",
    [{"bytes_per_second": 0}, {"bytes_per_second": math.nan}, {"latency_seconds": -1.0}],
    ids=str,
)
def test_networks_that_cannot_be_are_refused(figures):
    field = next(iter(figures))
    with pytest.raises(sbp.SbpError, match=f"network: {field} is a (finite )?number") as raised:
        Network(**({"bytes_per_second": 1e9, "latency_seconds": 1e-6} | figures))
    assert raised.value.code == "bad-argument"
    with pytest.raises(sbp.SbpError, match=field):
        HARDWARE["tpu-v5e"].with_axis("dcn", **({"bytes_per_second": 1e9} | figures))


def test_the_table_is_shown(capsys):
    assert main(["hardware"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "tpu-v5p 459 459 95.0 GiB 2765 3-D torus 100 6144 6.25" in lines
    assert "h100 989 495 74.5 GiB 3350 switch 450 8 50" in lines
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in HARDWARE)


# ---- products -----------------------------------------------------------------------------------


def product_seconds(dtype, hardware, **options):
    x = jax.ShapeDtypeStruct((8192, 8192), dtype)
    f = sbp.jit(
        lambda x, y: jnp.dot(x, y, **options),
        AbstractMesh((2,), ("d",)),
        in_types=("d:S(0)", "B"),
        hardware=hardware,
    )
    return f.plan(x, x).cost.seconds


@pytest.mark.parametrize(
    ("name", "dtype", "options", "rate"),
    [
        ("h100", jnp.bfloat16, {}, 989e12),
        ("h100", jnp.float32, {}, 495e12),
        ("h100", jnp.float32, {"precision": lax.Precision.HIGHEST}, 67e12),
        ("tpu-v5p", jnp.bfloat16, {}, 459e12),
        ("tpu-v5p", jnp.float32, {}, 459e12),
        ("tpu-v5p", jnp.float32, {"precision": lax.Precision.HIGH}, 459e12 / 3),
        ("tpu-v5p", jnp.float32, {"precision": lax.Precision.HIGHEST}, 459e12 / 6),
    ],
)
def test_products_cost_what_their_dtype_and_precision_cost(name, dtype, options, rate):
    assert product_seconds(dtype, name, **options) == pytest.approx(8192**3 / rate, rel=1e-6)


def test_convolutions_cost_their_products():
    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        )

    x, w = (
        jax.ShapeDtypeStruct((64, 64, 64, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, 3, 256, 1024), jnp.bfloat16),
    )
    plan = sbp.jit(
        conv, AbstractMesh((4,), ("d",)), in_types=("d:S(0)", "B"), hardware="tpu-v5e"
    ).plan(x, w)
    assert plan.cost.seconds == pytest.approx(2 * 16 * 64 * 64 * 1024 * 9 * 256 / 197e12, rel=1e-6)


def test_hardware_of_ones_own():
    """Figures that a user measured, with nothing of a topology: a collective costs its latency and
    its bytes."""
    own = dataclasses.replace(
        HARDWARE["cpu"], name="mine", link_bytes_per_second=1e9, latency_seconds=1e-3
    )
    for kind in KINDS:
        assert spec(own, a=3, b=5).collective(kind, (0, 1)).of(1e9) == pytest.approx(1.001)
