"""The time of collectives on a torus, between nodes and on slow axes: routed messages, and sums by
hand."""

import itertools
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp
from sbp.machine.network import lay_out
from sbp.machine.table import HARDWARE
from tests.machine.specs import GATHERS, KINDS, spec

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


TORI = [
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
]


@pytest.mark.parametrize(("name", "sizes"), TORI, ids=str)
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
    assert each["all_to_all"][1] / each["all_to_all"][0] == pytest.approx(2)
    assert each["all_to_all"][2] / each["all_to_all"][1] == pytest.approx(2)
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
    in_node = 2 * 7 / 8 * size / 450e9
    between = 2 * 1 / 2 * size / 8 / 50e9
    taken = mesh.collective("all_reduce", (0,)).of(2 * 15 / 16 * size)
    assert taken == pytest.approx(in_node + between, rel=0.01)
    assert (
        mesh.collective("all_reduce", (0,)).seconds
        > spec("h100", d=8).collective("all_reduce", (0,)).seconds
    )


def test_inner_axes_fill_a_node():
    mesh = spec("h100", data=16, model=8)
    assert mesh.collective("all_gather", (1,)).seconds_per_byte == pytest.approx(1 / 450e9)
    assert mesh.collective("all_gather", (0,)).seconds_per_byte == pytest.approx(1 / 50e9)


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
            AbstractMesh((2, 8), ("dcn", "d")),
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
    assert staged.seconds_per_byte == pytest.approx(factor * once.seconds_per_byte)
    assert staged.seconds == pytest.approx(2 * once.seconds)
