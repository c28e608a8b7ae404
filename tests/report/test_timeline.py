"""The picture of time shows all modelled time of a plan, with each collective in its lane. The
picture of memory shows the peak by class. The limits of a program add up to the time of its plan.
The tests count FLOPs and bytes by hand.
"""

import json
import re
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.report.device_bytes import COLUMNS, LiveBytes
from sbp.report.parts import NAMESPACE
from sbp.report.timeline import Schedule, causes, lane_seconds, limits
from tests.cases import descent, shape

MESH = jax.sharding.AbstractMesh(
    (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
LAYERS, D, H, TOKENS = 12, 2048, 8192, 8192


def block(x, pair):
    w_in, w_out = pair
    return x + jax.nn.gelu(x @ w_in) @ w_out, None


scanned = lambda weights, x: jnp.mean(jax.lax.scan(jax.checkpoint(block), x, weights)[0] ** 2)


def unrolled(weights, x):
    for number in range(12):
        x, _ = block(x, jax.tree.map(lambda w, n=number: w[n], weights))
    return jnp.mean(x**2)


def branches(weights, x):
    w_in, w_out = weights
    h = x @ w_in[0]
    return jax.lax.cond(h[0, 0] > 0, lambda: h @ w_out[0], lambda: jnp.sin(h @ w_out[1])).sum()


def repeated(weights, x):
    w_in, w_out = weights
    return jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x @ w_in[0] @ w_out[0], x).sum()


WEIGHTS = (shape(LAYERS, D, H), shape(LAYERS, H, D))
GATHERED = ("data:S(1) model:S(2)", "model:S(1) data:S(2)")
SPLIT = ("model:S(2)", "model:S(1)")
PROGRAMS = {
    "scanned": (descent(scanned), GATHERED),
    "unrolled": (descent(unrolled), SPLIT),
    "branches": (branches, SPLIT),
    "while": (repeated, SPLIT),
    "forward": (scanned, GATHERED),
}


@pytest.fixture(scope="module")
def plans():
    return {
        name: sbp.jit(fn, MESH, in_types=(types, "data:S(0)")).plan(WEIGHTS, shape(4096, D))
        for name, (fn, types) in PROGRAMS.items()
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_step_waits_for_what_the_plan_takes(plans, name):
    program = plans[name].program
    found = Schedule(program)
    # Of a gradient of a scan, the plan's time is 0.04% longer than its instructions together.
    assert found.seconds == pytest.approx(program.cost.seconds, rel=1e-3)
    assert sum(i.waited for i in found.intervals) == pytest.approx(found.seconds, rel=1e-9)
    end = 0.0  # nothing overlaps but exchanges beside products
    for one in found.intervals:
        if one.seconds == one.waited:
            assert one.start >= end - 1e-12
            end = one.start + one.seconds
        else:
            assert one.axes and one.start + one.seconds - one.waited <= end + 1e-12
            end += one.waited
    assert end == pytest.approx(found.seconds)


@pytest.mark.parametrize("name", ["scanned", "unrolled"])
def test_a_trace_has_the_intervals_of_the_step(plans, name, tmp_path):
    plans[name].report().trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert next(iter(lanes.values())) == "compute"
    done = [e for e in events if e["ph"] == "X"]
    seconds = Schedule(plans[name].program).seconds
    assert (
        sum(e["args"]["waited_us"] for e in done),
        max(e["ts"] + e["dur"] for e in done),
    ) == pytest.approx((1e6 * seconds, 1e6 * seconds))
    gathered = [e for e in done if "all_gather" in e["name"]]
    assert gathered or name != "scanned"
    assert all(lanes[e["tid"]].startswith("link") for e in gathered)


@pytest.mark.parametrize("name", ["scanned", "unrolled", "forward"])
def test_each_conversion_is_in_the_lane_of_its_axes(plans, name):
    program = plans[name].program
    expected = defaultdict(float)
    for planned in program.boxes():
        for step in planned.box.steps:
            if step.bytes_sent:
                axes = "link " + ", ".join(program.mesh.names[k] for k in step.mesh_axes)
                expected[axes] += planned.trips * step.seconds
    lanes = lane_seconds(Schedule(program))
    inside = list(program.kernels())
    for axes, seconds in expected.items():
        total = sum(lanes[axes].values())
        assert total == pytest.approx(seconds) or (inside and total > seconds)


words = lambda shown: " ".join(shown.text().split())


def test_the_text_has_the_seconds_of_the_picture(plans):
    program = plans["unrolled"].program
    report = plans["unrolled"].report()
    assert f"the modelled step over time: {1e3 * Schedule(program).seconds:.3g} ms" in words(
        report.timeline()
    )
    rows = [
        f"{lane} .* {1e3 * sum(phases.values()):.3g} ms"
        for lane, phases in lane_seconds(Schedule(program)).items()
    ]
    assert not [row for row in rows if not re.search(row, report.timeline().text())]


def test_the_collective_that_takes_longest_is_red(plans):
    svg = ElementTree.fromstring(plans["unrolled"].report().timeline().svg()[0])
    rects = [r for r in svg.iter(f"{{{NAMESPACE}}}rect") if r.get("fill") == "#dc2626"]
    titles = [t.text or "" for r in rects for t in r.iter(f"{{{NAMESPACE}}}title")]
    assert titles and all(t.startswith(("all_", "reduce_", "short")) for t in titles)
    caption = words(plans["unrolled"].report().timeline())
    share, longest = (
        caption.split("The longest collective takes ")[1].split(" for ")[0].split("%: ")
    )
    assert any(t.startswith(longest.split()[0]) for t in titles)
    found = Schedule(plans["unrolled"].program)
    most = max(c.waited for c in causes(found) if c.axes)
    assert share == f"{100 * most / found.seconds:.0f}"


def test_short_operations_share_boxes():
    def many(x):
        for _ in range(2000):
            x = jnp.sin(x)
        return x

    found = sbp.jit(many, MESH, in_types="data:S(0)").plan(shape(4096)).report().timeline().svg()[0]
    assert "short operations" in found and found.count("<rect") < 700


def test_a_mesh_axis_may_be_named_as_the_lane_of_the_device():
    made = sbp.jit(
        lambda x, w: x @ w,
        jax.sharding.AbstractMesh((4,), ("compute",)),
        in_types=("compute:S(1)", "compute:S(0)"),
    )
    program = made.plan(shape(D, H), shape(H, D)).program
    sums = {k: sum(v.values()) for k, v in lane_seconds(Schedule(program)).items()}
    assert (set(sums), sum(sums.values())) == (
        {"compute", "link compute"},
        pytest.approx(program.cost.seconds),
    )


def test_trips_that_are_assumed_are_said(plans):
    said = "sbp does not know the trip count of a while loop, and assumes 8."
    assert said in words(plans["while"].report().timeline())
    assert said not in words(plans["scanned"].report().timeline())


def test_branches_are_said_to_share_a_run(plans):
    said = "sbp counts each branch of a conditional as equally likely"
    assert said in words(plans["branches"].report().timeline())
    assert said not in words(plans["scanned"].report().timeline())


def test_a_loop_without_trips_takes_no_time():
    def fn(x, weights):
        total, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return total.sum()

    f = sbp.jit(fn, MESH, in_types=("data:S(0)", "B"))
    none, one = (f.plan(shape(4096, D), shape(trips, D, D)).program for trips in (0, 1))
    assert none.cost.seconds < 0.5 * one.cost.seconds
    assert Schedule(none).seconds == pytest.approx(none.cost.seconds, rel=1e-3)


# ---- what limits a program ----------------------------------------------------------------------


def named_layer(x, pair):
    w_in, w_out = pair
    with jax.named_scope("block"):
        return jax.nn.relu(x @ w_in) @ w_out, None


layers_loss = lambda weights, x: jnp.mean(jax.lax.scan(named_layer, x, weights)[0] ** 2)


FORWARD = 3 * 2 * 2 * 512 * 256 * 1024
"""Two products of each layer, two operations for each of their terms."""


@pytest.fixture(scope="module")
def h100_plans():
    made = {
        "forward": layers_loss,
        "train": descent(layers_loss),
        "remat": descent(
            lambda weights, x: jnp.mean(
                jax.lax.scan(jax.checkpoint(named_layer), x, weights)[0] ** 2
            )
        ),
    }
    weights, x = (shape(3, 256, 1024), shape(3, 1024, 256)), shape(512, 256)
    return {
        name: sbp.jit(fn, MESH, in_types=(SPLIT, "data:S(0)"), hardware="h100").plan(weights, x)
        for name, fn in made.items()
    }


@pytest.mark.parametrize("name", ["forward", "train", "remat"])
def test_the_seconds_are_those_of_the_plan(h100_plans, name):
    # Of a gradient of a scan, the plan's time is 0.04% longer than its instructions together.
    program = h100_plans[name].program
    assert sum(limits(program).seconds.values()) == pytest.approx(program.cost.seconds, rel=1e-3)


def test_flops_are_those_counted_by_hand(h100_plans):
    """Those that rematerialisation repeats do not count. Utilisation is their share of the peak."""
    forward, kept, remat = (limits(h100_plans[n].program) for n in ("forward", "train", "remat"))
    # A backward pass has two products for each one of the forward pass.
    by_phase = {
        p: sum(w.flops for w in kept.works if w.phase == p) for p in ("forward", "backward")
    }
    assert (forward.flops, by_phase) == (FORWARD, {"forward": FORWARD, "backward": 2 * FORWARD})
    assert remat.flops == kept.flops and kept.repeated == 0 and 0 < remat.repeated <= FORWARD
    peak = 8 * sbp.HARDWARE["h100"].flops_per_second * h100_plans["train"].cost.seconds
    assert kept.utilisation == pytest.approx(3 * FORWARD / peak, rel=1e-6)


matmul = lambda x, w: x @ w


def bound(rows, inner, columns, mesh, types, dtype=jnp.bfloat16):
    plan = sbp.jit(matmul, mesh, in_types=types[:2], out_types=types[2], hardware="h100").plan(
        shape(rows, inner, dtype=dtype), shape(inner, columns, dtype=dtype)
    )
    seconds = limits(plan.program).seconds
    return max(seconds, key=lambda k: seconds[k])


def test_the_bound_is_what_the_program_is_made_for():
    line = jax.sharding.AbstractMesh((8,), ("x",))
    whole = ("x:S(0)", "x:B", "x:S(0)")
    assert bound(65536, 8192, 8192, line, whole) == "compute"
    assert bound(4096, 64, 64, line, whole) == "memory"
    assert bound(512, 8192, 512, line, ("x:S(1)", "x:S(0)", "x:B")) == "link x"


def test_the_report_says_that_time_is_modelled(h100_plans):
    text = words(h100_plans["train"].report().roofline())
    said = "nothing was measured", "hardware h100", "block", "limits: 4.83 GFLOP per call"
    assert all(part in text for part in said)


def test_a_region_by_hand_is_modelled_like_the_same_operations():
    """A product of shards and an all-reduce, in a loop of three turns."""
    x, w = shape(64, 4096), shape(4096, 64)
    split, whole = jax.sharding.PartitionSpec(None, "model"), jax.sharding.PartitionSpec()
    region = lambda x, w: jax.lax.psum(x @ w, "model")
    ins = (split, jax.sharding.PartitionSpec("model"))
    by_hand = jax.shard_map(region, mesh=MESH, in_specs=ins, out_specs=whole)

    def plans(product):
        def fn(x, w):
            turn = lambda total, _: (total + product(x * total.sum(), w), None)
            return jax.lax.scan(turn, jnp.ones((64, 64)), None, length=3)[0]

        types = ("model:S(1)", "model:S(0)")
        return sbp.jit(fn, MESH, in_types=types, out_types="B", boxing="reduce").plan(x, w)

    mine, theirs = plans(by_hand), plans(lambda x, w: x @ w)
    assert mine.cost.bytes_per_device == theirs.cost.bytes_per_device > 0
    np.testing.assert_allclose(mine.cost.seconds, theirs.cost.seconds, rtol=0.05)
    assert limits(mine.program).flops == limits(theirs.program).flops == 3 * 2 * 64 * 4096 * 64
    assert (
        lane_seconds(Schedule(mine.program)).keys() == lane_seconds(Schedule(theirs.program)).keys()
    )
    # A region that is itself the program has no line; its collective has one.
    report = sbp.jit(by_hand, MESH).plan(x, w).report()
    made = 'made by psum `jax.lax.psum(x @ w, "model")` at tests/report/test_timeline.py:'
    assert made in words(report) and "(no source)" not in words(report.timeline())


# ---- memory -------------------------------------------------------------------------------------

STATE = 2 * LAYERS * D * H * 4
"""Bytes of the weights, and of the moments."""


def momentum(weights, moments, x):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(scanned)(weights, x))
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments


def updated(types=SPLIT, *, donated=(0, 1), memory_limit=None):
    made = sbp.jit(
        momentum,
        MESH,
        in_types=(types, types, "data:S(0)"),
        out_types=(types, types),
        donate_argnums=donated,
        memory_limit=memory_limit,
    )
    return made.plan(WEIGHTS, WEIGHTS, shape(TOKENS, D))


@pytest.fixture(scope="module")
def memory_plans():
    return {"tensor": updated(), "gathered": updated(GATHERED), "kept": updated(donated=())}


@pytest.mark.parametrize("name", ["tensor", "gathered", "kept"])
def test_the_peak_is_that_of_the_plan(memory_plans, name):
    found, cost = LiveBytes(memory_plans[name].program), memory_plans[name].cost
    assert found.peak.total == pytest.approx(cost.peak_memory_bytes, rel=1e-9)
    assert max(m.total for m in found.moments) == found.peak.total
    by_class: dict[str, float] = {kind: 0.0 for kind in found.peak.bytes}
    for one, count in found.held:
        by_class[one.kind] += count * one.bytes_per_device
    for kind, size in found.peak.bytes.items():
        if kind == "temporaries":  # also what operations need while they run
            assert by_class[kind] <= size
        elif kind not in ("gaps", "results"):
            assert by_class[kind] == pytest.approx(size)


def test_memory_is_counted_by_hand(memory_plans):
    assert all(
        moment.bytes["weights"] == moment.bytes["optimiser"] == STATE / parts
        and moment.bytes["other arguments"] == TOKENS / 2 * D * 4
        for name, parts in (("tensor", 4), ("gathered", 8))
        for moment in LiveBytes(memory_plans[name].program).moments
    )
    # Results without donation take as much again.
    found, kept = (LiveBytes(memory_plans[name].program).peak for name in ("tensor", "kept"))
    assert "results" not in found.bytes and kept.bytes["results"] == 2 * STATE / 4
    # Rematerialisation keeps what enters each layer; tokens are split over both axes between them.
    assert found.phase == "backward" and found.bytes["activations"] == LAYERS * TOKENS / 8 * D * 4
    # Their gradients are added up in whole stacks, split over both axes.
    assert found.bytes["gradients"] == pytest.approx(STATE / 8)
    # Gathered weights are copies.
    moments = LiveBytes(memory_plans["gathered"].program).moments
    assert max(m.bytes.get("copies of weights", 0.0) for m in moments) >= D * H / 8 * 4


def test_the_limit_is_a_line_where_it_is_near(memory_plans):
    far, near = memory_plans["tensor"], updated(memory_limit=2**31)
    (far_svg,), (near_svg,) = (plan.report().memory().svg() for plan in (far, near))
    assert [re.findall("<title>(limit[^<]*)", svg) for svg in (far_svg, near_svg)] == [
        [],
        ["limit 2.0 GiB"],
    ]
    assert "limit 16.0 GiB, above" in far_svg and "limit 2.0 GiB, above" not in near_svg
    share = near.cost.peak_memory_bytes / (2**31)
    assert f"{share:.1%} of memory_limit, 2.0 GiB" in words(near.report().memory())


def test_the_drawing_has_an_area_for_each_class(memory_plans):
    found = LiveBytes(memory_plans["gathered"].program)
    svg = ElementTree.fromstring(memory_plans["gathered"].report().memory().svg()[0])
    areas = list(svg.iter(f"{{{NAMESPACE}}}polygon"))
    seen = {kind for m in found.moments for kind, size in m.bytes.items() if size}
    assert {(a.findtext(f"{{{NAMESPACE}}}title") or "").split(":")[0] for a in areas} == seen
    # The areas of all classes together are as high as the peak at its moment.
    heights = [[float(p.split(",")[1]) for p in (a.get("points") or "").split()] for a in areas]
    top, bottom = min(min(h) for h in heights), max(max(h) for h in heights)
    assert (bottom - top) == pytest.approx(180 / 1.1, abs=0.02)


def test_a_picture_of_many_moments_has_the_fullest():
    def many(x):
        for number in range(400):
            x = x @ x if number == 250 else jnp.cumsum(x, 0)
        return x

    plan = sbp.jit(many, MESH, in_types="data:B").plan(shape(512, 512))
    found = LiveBytes(plan.program)
    assert len(found.moments) == COLUMNS < 400
    assert found.peak.total == pytest.approx(plan.cost.peak_memory_bytes)


def test_a_program_that_does_nothing_holds_its_arguments_and_has_no_time():
    plan = sbp.jit(lambda x: x, MESH, in_types="data:S(0)", donate_argnums=0).plan(shape(64))
    assert LiveBytes(plan.program).peak.total == plan.cost.peak_memory_bytes == 32 * 4
    assert "at most 128.0 B" in words(plan.report().memory())
    assert "no operation of it has a modelled time" in words(plan.report().timeline())


def test_data_have_time_and_memory(memory_plans):
    data = memory_plans["tensor"].report().to_json()["plan"]
    total = sum(s for phases in data["seconds_by_lane"].values() for s in phases.values())
    assert total == pytest.approx(data["modelled_seconds"], rel=1e-3)
    assert sum(data["memory_at_peak"].values()) == pytest.approx(
        data["peak_memory_bytes_per_device"]
    )
    assert data["limits"]["flops"] == 3 * LAYERS * 2 * 2 * TOKENS * D * H


def test_tensors_of_layers_are_one_row():
    def stacked(weights, x):
        for pair in weights:
            x, _ = block(x, pair)
        return jnp.mean(x**2)

    weights = [(shape(D, H), shape(H, D))] * LAYERS
    types = [("model:S(1)", "model:S(0)")] * LAYERS
    plan = sbp.jit(
        descent(stacked), MESH, in_types=(types, "data:S(0)"), out_types=types, donate_argnums=0
    ).plan(weights, shape(TOKENS, D))
    held = [(one, n) for one, n in LiveBytes(plan.program).held if one.kind == "weights"]
    assert {one.name for one, _ in held} == {"weights[*][0]", "weights[*][1]"}
    assert (sum(n for _, n in held), sum(n * one.bytes_per_device for one, n in held)) == (
        2 * LAYERS,
        STATE / 4,
    )
    text = plan.report().text()
    assert "25 inputs" in text and f"weights[*][1] ({LAYERS}) (donated)" in text


@pytest.mark.parametrize("rate", [np.float32(1e12), float("inf")])
def test_rates_that_json_and_tables_cannot_write(rate):
    names = ("flops_per_second", "hbm_bytes_per_second", "hbm_bytes", "link_bytes_per_second")
    figures: dict[str, Any] = dict.fromkeys(names, rate)
    hardware = sbp.Hardware(name="fast", **figures)
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    plan = sbp.jit(lambda x: x @ x, mesh, in_types="x:S(0)", hardware=hardware)
    report = plan.plan(jax.ShapeDtypeStruct((8, 8), "float32")).report()
    assert json.dumps(report.to_json()) and "FLOP" in str(report.roofline())
