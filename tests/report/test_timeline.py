"""The picture of time shows all of the plan's modelled time, and each collective in its lane."""

import re
from collections import defaultdict
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import sbp
from sbp.errors import SbpError
from sbp.report.svg import NAMESPACE
from sbp.report.timeline import causes, lane_seconds, schedule

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
D, H = 2048, 8192


shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)


def block(x, pair):
    w_in, w_out = pair
    return x + jax.nn.gelu(x @ w_in) @ w_out, None


def scanned(weights, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(block), x, weights)[0] ** 2)


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


def train(loss):
    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    return step


WEIGHTS = (shape(12, D, H), shape(12, H, D))
GATHERED = ("data:S(1) model:S(2)", "model:S(1) data:S(2)")
SPLIT = ("model:S(2)", "model:S(1)")
PROGRAMS = {
    "scanned": (train(scanned), GATHERED),
    "unrolled": (train(unrolled), SPLIT),
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
    found = schedule(program)
    # Of a gradient of a scan, the plan's time is 0.04% longer than its instructions together.
    assert found.seconds == pytest.approx(program.cost.seconds, rel=1e-3)
    assert sum(i.waited for i in found.intervals) == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_overlaps_but_exchanges_beside_products(plans, name):
    found = schedule(plans[name].program)
    end = 0.0
    for one in found.intervals:
        if one.seconds == one.waited:
            assert one.start >= end - 1e-12
            end = one.start + one.seconds
        else:
            assert one.axes and one.start + one.seconds - one.waited <= end + 1e-12
            end += one.waited
    assert end == pytest.approx(found.seconds)


@pytest.mark.parametrize("name", ["scanned", "unrolled", "forward"])
def test_each_conversion_is_in_the_lane_of_its_axes(plans, name):
    program = plans[name].program
    expected = defaultdict(float)
    for planned in program.boxes():
        for step in planned.box.steps:
            if step.bytes_sent:
                axes = "link " + ", ".join(program.mesh.names[k] for k in step.mesh_axes)
                expected[axes] += planned.trips * step.seconds
    lanes = lane_seconds(schedule(program))
    inside = list(program.kernels())
    for axes, seconds in expected.items():
        total = sum(lanes[axes].values())
        assert total == pytest.approx(seconds) or (inside and total > seconds)


def test_loops_are_marked_with_their_trips(plans):
    assert [one.loop.trips for one in schedule(plans["scanned"].program).loops] == [12, 12]
    assert plans["scanned"].report().timeline().svg()[0].count("all 12 runs of scan") >= 2
    assert "How often a while loop runs is assumed" in words(plans["while"].report().timeline())


words = lambda shown: " ".join(shown.text().split())


def test_the_text_has_the_seconds_of_the_picture(plans):
    program = plans["unrolled"].program
    report = plans["unrolled"].report()
    text = words(report.timeline())
    total = schedule(program).seconds
    assert f"the modelled step in time: {1e3 * total:.3g} ms" in text
    for lane, phases in lane_seconds(schedule(program)).items():
        row = f"{lane} .* {1e3 * sum(phases.values()):.3g} ms"
        assert re.search(row, report.timeline().text()), row


def test_the_collective_that_takes_longest_is_red(plans):
    svg = ElementTree.fromstring(plans["unrolled"].report().timeline().svg()[0])
    rects = [r for r in svg.iter(f"{{{NAMESPACE}}}rect") if r.get("fill") == "#dc2626"]
    titles = [t.text or "" for r in rects for t in r.iter(f"{{{NAMESPACE}}}title")]
    assert titles and all(t.startswith(("all_", "reduce_", "short")) for t in titles)
    caption = words(plans["unrolled"].report().timeline())
    share, longest = caption.split("The longest collective, ")[1].split(" for ")[0].split("%: ")
    assert any(t.startswith(longest.split()[0]) for t in titles)
    found = schedule(plans["unrolled"].program)
    most = max(c.waited for c in causes(found) if c.axes)
    assert share == f"{100 * most / found.seconds:.0f}"


def test_short_operations_share_boxes():
    def many(x):
        for _ in range(2000):
            x = jnp.sin(x)
        return x

    report = sbp.jit(many, MESH, in_types="data:S(0)").plan(shape(4096)).report()
    found = report.timeline().svg()[0]
    assert "short operations" in found and found.count("<rect") < 700


def test_a_mesh_axis_may_be_named_as_the_lane_of_the_device():
    mesh = AbstractMesh((4,), ("compute",))
    made = sbp.jit(lambda x, w: x @ w, mesh, in_types=("compute:S(1)", "compute:S(0)"))
    program = made.plan(shape(D, H), shape(H, D)).program
    sums = {k: sum(v.values()) for k, v in lane_seconds(schedule(program)).items()}
    assert set(sums) == {"compute", "link compute"}
    assert sum(sums.values()) == pytest.approx(program.cost.seconds)


def test_branches_are_said_to_share_a_run(plans):
    said = "Each branch of a conditional has an equal part of a run"
    assert said in words(plans["branches"].report().timeline())
    assert said not in words(plans["scanned"].report().timeline())


def test_a_region_by_hand_is_said_to_have_no_time():
    spec = jax.sharding.PartitionSpec("data")

    def step(x):
        return jax.shard_map(jnp.sin, mesh=MESH, in_specs=spec, out_specs=spec)(x)

    assert "written by hand: only the time of reading and writing is modelled" in words(
        sbp.jit(step, MESH).plan(shape(64)).report().timeline()
    )


def test_a_program_that_does_nothing_has_no_time():
    report = sbp.jit(lambda x: x, MESH, in_types="data:S(0)").plan(shape(64)).report()
    assert "no operation of it has a modelled time" in words(report.timeline())


def test_a_loop_without_trips_takes_no_time():
    def fn(x, weights):
        total, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return total.sum()

    def planned(trips):
        f = sbp.jit(fn, MESH, in_types=("data:S(0)", "B"))
        return f.plan(shape(4096, D), shape(trips, D, D)).program

    none, one = planned(0), planned(1)
    assert none.cost.seconds < 0.5 * one.cost.seconds
    assert schedule(none).seconds == pytest.approx(none.cost.seconds, rel=1e-3)


def test_what_has_no_plan_has_no_pictures():
    wrong = lambda x, w: sbp.split(x, 1, "model") @ sbp.split(w, 1, "model")

    report = sbp.jit(wrong, MESH, boxing="explicit").check(shape(8, 8), shape(8, 8))
    for show in (report.timeline, report.memory):
        with pytest.raises(SbpError, match="there is no plan"):
            show()
