"""The time of collectives on a torus, between nodes and on slow axes: routed messages, and sums by
hand. The table of hardware: its kinds, published figures of pods, products, and figures that are
refused."""

import dataclasses
import itertools
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from benchmarks.collective_table import recorded
from sbp._jax import ENDS_ON_AXIS_NAMES
from sbp.machine.hardware import (
    HARDWARE,
    arrangement,
    copies_for_lanes,
    hardware_of_kind,
    joins_lanes,
)
from sbp.machine.mesh import MeshSpec, lay_out, mesh_spec
from tests.same import refused

GATHERS = ("all_gather", "reduce_scatter")
KINDS = (*GATHERS, "all_reduce", "all_to_all", "permute")


def spec(hardware, **sizes):
    return MeshSpec(
        axes=tuple(sizes.items()),
        hardware=HARDWARE[hardware] if isinstance(hardware, str) else hardware,
    )


# ---- the torus ----------------------------------------------------------------------------------


def chips_of(mesh):
    """Chip coordinates of every mesh index, by the layout, and the extents of the torus; one device
    a chip."""
    place = lay_out(mesh.hardware, mesh.axes)
    extents = tuple(math.prod(f for _, f in dim) for dim in place.torus)
    found = {}
    for index in itertools.product(*(range(n) for n in mesh.sizes)):
        left = list(index)
        chip = []
        for dim in place.torus:
            at, stride = 0, 1
            for axis, factor in dim:
                at += stride * (left[axis] % factor)
                left[axis] //= factor
                stride *= factor
            chip.append(at)
        assert not any(left)
        found[index] = tuple(chip)
    assert len(set(found.values())) == math.prod(extents) == mesh.num_devices
    return found, extents


def busiest_link(mesh, positions):
    """Shares of a device's buffer that cross the fullest link when all groups exchange at once,
    each message the shortest way."""
    chips, extents = chips_of(mesh)
    n = math.prod(mesh.sizes[p] for p in positions)
    loads = defaultdict(float)
    for source, target in itertools.product(chips, repeat=2):
        if any(
            a != b
            for p, (a, b) in enumerate(zip(source, target, strict=True))
            if p not in positions
        ):
            continue
        here = list(chips[source])
        for dim, extent in enumerate(extents):
            there = chips[target][dim]
            forward = (there - here[dim]) % extent
            if forward and (extent == 2 or extent % mesh.hardware.ring_chips):
                ways = [(1 if there > here[dim] else -1, 1.0)]  # a line
            else:
                ways = [
                    (way, 0.5 if 2 * forward == extent else 1.0)
                    for way in (1, -1)
                    if (way * forward) % extent <= extent / 2
                ]
            for way, share in ways if forward else []:
                at = here[dim]
                while at != there:
                    step = (*here[:dim], at, *here[dim + 1 :]), dim, way
                    loads[step] += share / n
                    at = (at + way) % extent
            here[dim] = there
    return max(loads.values())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tpu-v5e", {"d": 4}),
        ("tpu-v5e", {"d": 64}),
        ("tpu-v5e", {"d": 32}),
        ("tpu-v5e", {"d": 256}),
        ("tpu-v5e", {"x": 8, "y": 8}),
        ("tpu-v5e", {"x": 2, "y": 16}),
        ("tpu-v5e", {"x": 4, "y": 4, "z": 4}),
        ("tpu-v5p", {"d": 64}),
        ("tpu-v5p", {"x": 4, "y": 16}),
        ("tpu-v5p", {"x": 8, "y": 8}),
    ],
    ids=str,
)
def test_the_fullest_link_holds_up_an_all_to_all(name, sizes):
    mesh = spec(name, **sizes)
    for count in range(1, len(sizes) + 1):
        for positions in itertools.combinations(range(len(sizes)), count):
            n = math.prod(mesh.sizes[p] for p in positions)
            seconds = mesh.collective("all_to_all", positions).seconds_per_byte * (n - 1) / n
            expected = busiest_link(mesh, positions) / mesh.hardware.link_bytes_per_second
            if positions == tuple(range(len(sizes))) or len(positions) == 1:
                assert seconds == pytest.approx(expected), positions
            else:  # axes that share a dim with a third one between them
                assert seconds >= expected - 1e-18, positions


@pytest.mark.parametrize(("name", "dims"), [("tpu-v3", 2), ("tpu-v5p", 3)])
def test_growth_on_a_torus(name, dims):
    """An all-to-all takes the dims-th root of the devices; gathers, reductions and shifts do not
    grow."""
    chips = {side: side**dims * HARDWARE[name].devices_per_chip for side in (4, 8, 16)}
    each = {
        kind: [
            spec(name, d=n).collective(kind, (0,)).seconds_per_byte * (n - 1) / n
            for n in chips.values()
        ]
        for kind in KINDS
    }
    assert [b / a for a, b in itertools.pairwise(each["all_to_all"])] == pytest.approx([2, 2])
    for kind in (*GATHERS, "all_reduce", "permute"):
        assert max(each[kind]) / min(each[kind]) < 1.1, kind


def test_a_torus_agrees_with_the_formula_of_the_paper():
    """bytes of a chip * (x/4 + y/4) / (links * bandwidth) on a square torus, two cores a chip."""
    for side in (8, 16, 32):
        n = 2 * side**2
        seconds = spec("tpu-v3", d=n).collective("all_to_all", (0,)).seconds_per_byte * (n - 1) / n
        assert seconds == pytest.approx(2 * (side / 4 + side / 4) / (4 * 41e9), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HARDWARE)
def test_one_device_sends_nothing_and_more_axes_cost_no_less(name, kind):
    mesh = spec(name, a=1, b=4, c=8)
    assert mesh.collective(kind, (0,)).of(0) == 0
    assert mesh.collective(kind, (2,)).seconds <= mesh.collective(kind, (1, 2)).seconds
    assert 0 < mesh.collective(kind, (1, 2)).seconds_per_byte < math.inf


# ---- nodes and slow axes ------------------------------------------------------------------------


def test_between_nodes_a_gpu_sends_its_share():
    """16 GPUs in two nodes: reduce-scatter in the node, all-reduce of an eighth between the nodes,
    all-gather in the node."""
    mesh = spec("h100", d=16)
    size = 1e9
    taken = mesh.collective("all_reduce", (0,)).of(2 * 15 / 16 * size)
    in_node, between = 2 * 7 / 8 * size / 450e9, 2 * 1 / 2 * size / 8 / 50e9
    assert taken == pytest.approx(in_node + between, rel=0.01)
    assert (
        mesh.collective("all_reduce", (0,)).seconds
        > spec("h100", d=8).collective("all_reduce", (0,)).seconds
    )


def test_inner_axes_fill_a_node():
    mesh = spec("h100", data=16, model=8)
    assert [mesh.collective("all_gather", (k,)).seconds_per_byte for k in (1, 0)] == pytest.approx(
        [1 / 450e9, 1 / 50e9]
    )


def test_a_slow_axis_has_its_own_rate_and_leaves_the_others_alone():
    slow = HARDWARE["tpu-v5e"].with_axis("dcn", bytes_per_second=2e9, latency_seconds=50e-6)
    mesh, alone = spec(slow, dcn=4, d=64), spec("tpu-v5e", d=64)
    for kind in KINDS:
        assert mesh.collective(kind, (1,)) == alone.collective(kind, (0,))
        assert mesh.collective(kind, (0,)).seconds_per_byte == pytest.approx(1 / 2e9)
        assert mesh.collective(kind, (0,)).seconds >= 50e-6


def test_a_plan_keeps_off_a_slow_axis():
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)

    def axes_used(hardware):
        f = sbp.jit(
            lambda x, y: x @ y,
            jax.sharding.AbstractMesh((2, 8), ("dcn", "d")),
            in_types="B",
            out_types="B",
            hardware=hardware,
        )
        return {
            axis
            for b in f.plan(x, x).program.boxes()
            for s in b.box.steps
            if s.bytes_sent
            for axis in s.mesh_axes
        }

    assert axes_used("tpu-v5e") == {0, 1}, "half of the work is worth a fast link"
    assert axes_used(HARDWARE["tpu-v5e"].with_axis("dcn", bytes_per_second=1e8)) == {1}


# ---- lines --------------------------------------------------------------------------------------


def test_a_side_that_does_not_close_is_a_line():
    """On a part of a v5e pod, a gather over both sides takes the time of one side; on a whole pod
    it has the links of both rings."""
    link = HARDWARE["tpu-v5e"].link_bytes_per_second
    rates = {
        sizes: 1 / spec("tpu-v5e", **dict(sizes)).collective("all_gather", (0,)).seconds_per_byte
        for sizes in ((("d", 16),), (("x", 4), ("y", 4)), (("d", 256),), (("x", 16), ("y", 16)))
    }
    assert list(rates.values()) == pytest.approx([2 * link, 2 * link, 4 * link, 2 * link])


@pytest.mark.parametrize(("name", "devices", "factor"), [("tpu-v5e", 16, 1), ("tpu-v3", 128, 2)])
def test_stages_take_the_sides_one_after_the_other(name, devices, factor):
    mesh = spec(name, d=devices)
    staged, once = (
        mesh.collective(kind, (0,)) for kind in ("staged_reduce_scatter", "reduce_scatter")
    )
    assert (staged.seconds_per_byte, staged.seconds) == pytest.approx(
        (factor * once.seconds_per_byte, 2 * once.seconds)
    )


# ---- the table -----------------------------------------------------------------------------------


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
            ("NVIDIA B200", "gpu", "b200"),
            ("NVIDIA GB200", "gpu", "gb200"),
            ("AMD Instinct MI300X", "gpu", "mi300x"),
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
    assert spec("tpu-v3", d=2048).collective("all_reduce", (0,)).of(
        2 * 2047 / 2048 * 3.56e9
    ) == pytest.approx(2 * 3.56e9 / (4 * 41e9), rel=0.01)


def test_an_unknown_slow_axis_is_refused():
    refused(
        r"^unknown-axis: .*no axis 'dcm'.*did you mean",
        mesh_spec,
        jax.sharding.AbstractMesh((2,), ("dcn",)),
        HARDWARE["tpu-v5e"].with_axis("dcm", bytes_per_second=1e9),
    )
    refused("1e30", HARDWARE["tpu-v5e"].with_axis, "dcn", bytes_per_second=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(
            (f, v, "must be a number from 1e-30 to 1e30")
            for f in ("link_bytes_per_second", "hbm_bytes")
            for v in (0, -1.0, math.nan, -math.inf, "1e9")
        ),
        *(
            (f, v, "must be a number from 1e-30 to 1e30")
            for f in ("flops_per_second", "hbm_bytes_per_second")
            for v in (0, None, True)
        ),
        *(
            (f, 0, "must be a number from 1e-30 to 1e30")
            for f in ("f32_flops_per_second", "vector_flops_per_second")
        ),
        *(
            (f, v, "must be a number from 0 to 1e30")
            for f in ("latency_seconds", "hop_seconds", "fast_memory_bytes")
            for v in (-1e-6, math.nan, math.inf, None)
        ),
        *(
            (f, v, "must be a whole number ")
            for f in ("torus_dims", "ring_chips", "joined_devices", "product_rows")
            for v in (0, -1, 1.5, True)
        ),
        ("topology", "tours", 'must be one of "torus", "switch"'),
        ("platform", "gpu", 'must be one of "cpu", '),
        ("overlaps", 1, "must be True or False"),
        ("beyond", 25e9, "must be a Network or None"),
        ("slow_axes", {"dcn": 1e9}, "must be a tuple of (mesh axis, Network)"),
        ("name", None, "must be a string"),
    ],
)
def test_hardware_that_cannot_be_is_refused(field, value, message):
    raised = refused(None, dataclasses.replace, HARDWARE["tpu-v5e"], **{field: value})
    assert raised.code == (
        "unknown-option" if field in ("topology", "platform") else "bad-argument"
    )
    assert field in str(raised) and message in str(raised)


# ---- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "options", "rate"),
    [
        ("h100", jnp.bfloat16, {}, 989e12),
        ("h100", jnp.float32, {}, 495e12),
        ("h100", jnp.float32, {"precision": jax.lax.Precision.HIGHEST}, 67e12),
        ("tpu-v5p", jnp.bfloat16, {}, 459e12),
        ("tpu-v5p", jnp.float32, {}, 459e12),
        ("tpu-v5p", jnp.float32, {"precision": jax.lax.Precision.HIGH}, 459e12 / 3),
        ("tpu-v5p", jnp.float32, {"precision": jax.lax.Precision.HIGHEST}, 459e12 / 6),
    ],
)
def test_products_cost_what_their_dtype_and_precision_cost(name, dtype, options, rate):
    plan = sbp.jit(
        lambda x, y: jnp.dot(x, y, **options),
        jax.sharding.AbstractMesh((2,), ("d",)),
        ("d:S(0)", "B"),
        hardware=name,
    ).plan(*[jax.ShapeDtypeStruct((8192, 8192), dtype)] * 2)
    assert plan.cost.seconds == pytest.approx(8192**3 / rate, rel=1e-6)


def test_convolutions_cost_their_products():
    conv = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )
    plan = sbp.jit(
        conv, jax.sharding.AbstractMesh((4,), ("d",)), in_types=("d:S(0)", "B"), hardware="tpu-v5e"
    ).plan(
        jax.ShapeDtypeStruct((64, 64, 64, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, 3, 256, 1024), jnp.bfloat16),
    )
    assert plan.cost.seconds == pytest.approx(2 * 16 * 64 * 64 * 1024 * 9 * 256 / 197e12, rel=1e-6)


def test_hardware_of_ones_own():
    """Figures that a user measured, with nothing of a topology: a collective costs its latency and
    its bytes."""
    own = dataclasses.replace(
        HARDWARE["cpu"], name="mine", link_bytes_per_second=1e9, latency_seconds=1e-3
    )
    for kind in KINDS:
        assert spec(own, a=3, b=5).collective(kind, (0, 1)).of(1e9) == pytest.approx(1.001)


# ---- lowerings -----------------------------------------------------------------------------------
# Reduce-scatters over all devices, as measured.


def test_every_kind_layout_and_dtype_was_measured():
    rows = list(recorded())
    assert {r["hardware"] for r in rows} == {"tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"}
    layouts = {(r["hardware"], r["slice"], r["mesh"], r["axis"]) for r in rows}
    assert len(rows) == 10 * len(layouts) and all(r["compiled"] for r in rows)


def test_two_mesh_axes_keep_every_kind():
    """Only over all devices does the compiler change a kind."""
    names = {"permute": "collective-permute"}
    for row in recorded():
        if "x" in row["mesh"]:
            kind = names.get(row["kind"], row["kind"].replace("_", "-"))
            assert kind in row["compiled"].split("+")


def test_whole_scatters_are_those_of_the_measurement():
    for row in recorded():
        if row["kind"] == "reduce_scatter" and "x" not in row["mesh"]:
            keeps = "all-reduce" not in row["compiled"].split("+")
            devices, hardware = int(row["devices"]), HARDWARE[row["hardware"]]
            assert hardware.whole_scatter_devices is not None
            assert (devices <= hardware.whole_scatter_devices) == keeps
            assert (spec(hardware, d=devices).stages(devices) == ()) == keeps


@pytest.mark.parametrize(
    ("hardware", "devices", "keeps"),
    [
        ("tpu-v5e", 8, True),
        ("tpu-v5e", 12, False),
        ("tpu-v5e", 1024, False),
        ("tpu-v2", 8, False),
        ("tpu-v7x", 8, False),
        ("h100", 16, True),
        # What the user says counts; None is a chip that was not measured.
        (dataclasses.replace(HARDWARE["tpu-v5e"], whole_scatter_devices=16), 16, True),
        (dataclasses.replace(HARDWARE["tpu-v5e"], whole_scatter_devices=None), 16, False),
        (dataclasses.replace(HARDWARE["tpu-v5e"], whole_scatter_devices=None), 8, True),
    ],
)
def test_the_nearest_slice_is_taken(hardware, devices, keeps):
    assert bool(spec(hardware, d=devices).stages(devices)) != keeps


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
    assert [arrangement(shape, dim, 4, itemsize, is_tpu=tpu) for tpu in (True, False)] == [
        expected,
        "as it is",
    ]


def test_each_stage_has_its_arrangement():
    mesh = MeshSpec(axes=(("d", 16),), hardware=HARDWARE["tpu-v5e"])
    assert [mesh.arrangements((4096, 2048), 1, n, 2) for n in (16, 4)] == [
        ("as it is", "blocks first"),
        ("as it is",),
    ]


# ---- axis names ----------------------------------------------------------------------------------
# Which names of mesh axes are refused, and why.


OUTSIDE_ASCII, BACKSLASH = "α", "a\\d"
ENDING = [(OUTSIDE_ASCII, 1), (OUTSIDE_ASCII, 8), (BACKSLASH, 8)]


@pytest.mark.parametrize("name", ["a b", "x:y", "a,b", "k=1", "(d)", "", "a\tb", "[0]", "#"])
def test_names_that_no_text_can_have(name):
    for mesh in (
        jax.sharding.AbstractMesh((1, 1), (name, "c")),
        jax.sharding.Mesh([[jax.devices()[0]]], (name, "c")),
    ):
        refused("has no blanks", lambda mesh=mesh: sbp.jit(jnp.sin, mesh).plan(np.ones(8)))
    refused("has no blanks", sbp.make_mesh, (1, 1), (name, "c"))


@pytest.mark.parametrize(("name", "n"), ENDING)
@pytest.mark.skipif(not ENDS_ON_AXIS_NAMES, reason="this JAX runs with such names")
def test_names_with_which_jax_ends_the_process(name, n):
    refused("this version of JAX crashes", sbp.make_mesh, (n,), (name,))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), (name,))
    refused("this version of JAX crashes", lambda: sbp.jit(jnp.sin, mesh).plan(np.ones(8)))
    sbp.jit(jnp.sin, jax.sharding.AbstractMesh((8,), (name,))).plan(np.ones(8))
    sbp.make_mesh((1,), (BACKSLASH,))


# ---- slices --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
    id: int
    slice_index: int | None
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    process_index: int = 0
    coords: tuple[int, int, int] | None = None
    core_on_chip: int = 0


def sliced(shape, names, slices):
    """A mesh of chips with these indices of slices."""
    chips = [Chip(n, k) for n, k in enumerate(np.ravel(slices))]
    return mesh_spec(jax.sharding.Mesh(np.array(chips, object).reshape(shape), names))


def test_an_axis_across_slices_has_the_network_between_them():
    # One gather of shards of 1 MB between two slices takes the latency and 1 MB at 25 Gbit/s.
    outer = sliced((2, 16), ("a", "b"), np.repeat([0, 1], 16))
    inner = sliced((16, 2), ("b", "a"), np.tile([0, 1], 16))
    for mesh, position in ((outer, 0), (inner, 1)):
        link = mesh.collective("all_gather", (position,))
        assert (link.seconds, link.seconds_per_byte) == pytest.approx(
            (mesh.hardware.latency_seconds + 20e-6, 8 / 25e9)
        )
    whole = sliced((2, 16), ("a", "b"), np.zeros(32, int))
    assert outer.collective("all_gather", (1,)) == inner.collective("all_gather", (0,))
    assert outer.collective("all_gather", (1,)).seconds_per_byte < 8 / 25e9 / 10
    assert whole.hardware == sliced((2, 16), ("a", "b"), [None] * 32).hardware
    assert whole.hardware == HARDWARE["tpu-v5e"]


def test_the_report_says_how_many_slices_there_are():
    chips = np.array([Chip(n, n // 2) for n in range(4)], object)
    plan = sbp.jit(jnp.sin, jax.sharding.Mesh(chips, ("d",))).plan(
        jax.ShapeDtypeStruct((8,), "float32")
    )
    assert "on mesh d=4: 4 devices in 2 slices, hardware tpu-v5e" in plan.report().text()


def test_an_axis_in_part_across_slices():
    axis = sliced((32,), ("d",), np.repeat([0, 1], 16)).collective("all_gather", (0,))
    halves = np.repeat([0, 1], 16)
    assert axis == sliced((2, 16), ("a", "b"), halves).collective("all_gather", (0, 1))
    assert axis == sliced((32,), ("d",), np.repeat([1, 0], 16)).collective("all_gather", (0,))
    shuffled = sliced((32,), ("d",), np.tile([0, 1], 16)).collective("all_gather", (0,))
    assert shuffled.seconds_per_byte == pytest.approx(8 / 25e9)
    uneven = sliced((2, 16), ("a", "b"), np.repeat([0, 1], [8, 24])).collective("all_gather", (1,))
    assert uneven.seconds_per_byte == pytest.approx(8 / 25e9)


# ---- the order of devices ------------------------------------------------------------------------


def farthest(places, side):
    """The mean number of links between two chips of a group, in the group where it is largest."""

    def links(a, b):
        steps = [abs(i - j) for i, j in zip(a, b, strict=True)]
        return sum(min(d, side - d) if side == 16 else d for d in steps)

    means = [np.mean([links(a, b) for a in group for b in group]) for group in places]
    return max(means)


@pytest.mark.parametrize("side", [4, 16])
def test_collectives_take_longer_where_devices_are_apart(side):
    chips = np.array([Chip(n, 0, coords=(n % side, n // side, 0)) for n in range(side**2)], object)
    near = mesh_spec(jax.sharding.Mesh(chips.reshape(side, side), ("a", "b")))
    assert not near.detours
    shuffled = np.random.default_rng(0).permutation(chips).reshape(side, side)
    with pytest.warns(
        sbp.SbpWarning, match="device-order: the mesh keeps .* times along `b` .gathering"
    ):
        far = mesh_spec(jax.sharding.Mesh(shuffled, ("a", "b")))
    for axis, groups in ((0, shuffled.T), (1, shuffled)):
        own, least = (
            farthest([[c.coords for c in group] for group in every], side)
            for every in (groups, chips.reshape(side, side))
        )
        times = [m.collective("all_gather", (axis,)).seconds_per_byte for m in (far, near)]
        assert times[0] / times[1] == pytest.approx(own / least)
    assert far.collective("all_reduce", (0, 1)) == near.collective("all_reduce", (0, 1))


def test_devices_that_fill_no_box():
    chips = [Chip(n, 0, coords=(n, n // 2, 0)) for n in range(3)]
    with pytest.warns(sbp.SbpWarning, match="do not fill a box of the torus"):
        assert not mesh_spec(jax.sharding.Mesh(np.array(chips, object), ("a",))).detours
