"""The picture of memory shows the plan's memory: its peak, and each class with bytes counted by
hand."""

from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp
from sbp.report.memory import COLUMNS, live_bytes
from sbp.report.svg import NAMESPACE

MESH = AbstractMesh((2, 4), ("data", "model"))
LAYERS, D, H, ROWS = 12, 2048, 8192, 8192
MIB = 2**20


shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)


def block(x, pair):
    w_in, w_out = pair
    return x + jax.nn.gelu(x @ w_in) @ w_out, None


loss = lambda weights, x: jnp.mean(jax.lax.scan(jax.checkpoint(block), x, weights)[0] ** 2)


def step(weights, moments, x):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(weights, x))
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments


WEIGHTS = (shape(LAYERS, D, H), shape(LAYERS, H, D))
TENSOR = ("model:S(2)", "model:S(1)")
GATHERED = ("data:S(1) model:S(2)", "model:S(1) data:S(2)")
STATE = 2 * LAYERS * D * H * 4
"""Bytes of the weights, and of the moments."""


def planned(types=TENSOR, *, donated=(0, 1), memory_limit=None):
    made = sbp.jit(
        step,
        MESH,
        in_types=(types, types, "data:S(0)"),
        out_types=(types, types),
        donate_argnums=donated,
        memory_limit=memory_limit,
    )
    return made.plan(WEIGHTS, WEIGHTS, shape(ROWS, D))


@pytest.fixture(scope="module")
def plans():
    return {"tensor": planned(), "gathered": planned(GATHERED), "kept": planned(donated=())}


@pytest.mark.parametrize("name", ["tensor", "gathered", "kept"])
def test_the_peak_is_that_of_the_plan(plans, name):
    found, cost = live_bytes(plans[name].program), plans[name].cost
    assert found.peak.total == pytest.approx(cost.peak_memory_bytes, rel=1e-9)
    assert max(m.total for m in found.moments) == found.peak.total


@pytest.mark.parametrize("name", ["tensor", "gathered", "kept"])
def test_what_is_alive_is_what_the_peak_has(plans, name):
    found = live_bytes(plans[name].program)
    by_class: dict[str, float] = {kind: 0.0 for kind in found.peak.bytes}
    for one, count in found.held:
        by_class[one.kind] += count * one.bytes_per_device
    for kind, size in found.peak.bytes.items():
        if kind == "temporaries":  # also what operations need while they run
            assert by_class[kind] <= size
        elif kind not in ("gaps", "results"):
            assert by_class[kind] == pytest.approx(size)


def test_arguments_are_counted_by_hand(plans):
    for name, parts in (("tensor", 4), ("gathered", 8)):
        for moment in live_bytes(plans[name].program).moments:
            assert moment.bytes["weights"] == STATE / parts
            assert moment.bytes["optimiser"] == STATE / parts
            assert moment.bytes["other arguments"] == ROWS / 2 * D * 4


def test_results_without_donation_take_as_much_again(plans):
    assert "results" not in live_bytes(plans["tensor"].program).peak.bytes
    assert live_bytes(plans["kept"].program).peak.bytes["results"] == 2 * STATE / 4


def test_the_backward_pass_has_the_activations_of_all_layers(plans):
    # Rematerialisation keeps what enters each layer; tokens are split over both axes between them.
    found = live_bytes(plans["tensor"].program).peak
    assert found.phase == "backward"
    assert found.bytes["activations"] == LAYERS * ROWS / 8 * D * 4
    # Their gradients are added up in whole stacks, split over both axes.
    assert found.bytes["gradients"] == pytest.approx(STATE / 8)


def test_gathered_weights_are_copies(plans):
    moments = live_bytes(plans["gathered"].program).moments
    assert max(m.bytes.get("copies of weights", 0.0) for m in moments) >= D * H / 8 * 4


def test_the_limit_is_a_line_where_it_is_near(plans):
    def limits(plan):
        svg = ElementTree.fromstring(plan.report().memory().svg()[0])
        titles = [t.text or "" for t in svg.iter(f"{{{NAMESPACE}}}title")]
        return [t for t in titles if t.startswith("limit")]

    far, near = plans["tensor"], planned(memory_limit=2 * 1024 * MIB)
    assert limits(far) == [] and limits(near) == ["limit 2.0 GiB"]
    assert "limit 16.0 GiB, above" in far.report().memory().svg()[0]
    assert "limit 2.0 GiB, above" not in near.report().memory().svg()[0]
    text = words(near.report().memory())
    share = near.cost.peak_memory_bytes / (2 * 1024 * MIB)
    assert f"{share:.1%} of memory_limit, 2.0 GiB" in text


words = lambda shown: " ".join(shown.text().split())


def test_the_drawing_has_an_area_for_each_class(plans):
    found = live_bytes(plans["gathered"].program)
    svg = ElementTree.fromstring(plans["gathered"].report().memory().svg()[0])
    areas = list(svg.iter(f"{{{NAMESPACE}}}polygon"))
    seen = {kind for m in found.moments for kind, size in m.bytes.items() if size}
    named = {(a.findtext(f"{{{NAMESPACE}}}title") or "").split(":")[0] for a in areas}
    assert named == seen
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
    found = live_bytes(plan.program)
    assert len(found.moments) == COLUMNS < 400
    assert found.peak.total == pytest.approx(plan.cost.peak_memory_bytes)


def test_a_program_that_does_nothing_holds_its_arguments():
    plan = sbp.jit(lambda x: x, MESH, in_types="data:S(0)", donate_argnums=0).plan(shape(64))
    assert live_bytes(plan.program).peak.total == plan.cost.peak_memory_bytes == 32 * 4
    assert "at most 128.0 B" in words(plan.report().memory())


def test_data_have_time_and_memory(plans):
    data = plans["tensor"].report().to_json()["plan"]
    total = sum(s for phases in data["seconds_by_lane"].values() for s in phases.values())
    assert total == pytest.approx(data["modelled_seconds"], rel=1e-3)
    peak = data["peak_memory_bytes_per_device"]
    assert sum(data["memory_at_peak"].values()) == pytest.approx(peak)
    assert data["limits"]["flops"] == 3 * LAYERS * 2 * 2 * ROWS * D * H


def test_tensors_of_layers_are_one_row():
    def stacked(weights, x):
        for pair in weights:
            x, _ = block(x, pair)
        return jnp.mean(x**2)

    def apply(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(stacked)(weights, x))

    weights = [(shape(D, H), shape(H, D))] * LAYERS
    types = [("model:S(1)", "model:S(0)")] * LAYERS
    made = sbp.jit(apply, MESH, in_types=(types, "data:S(0)"), out_types=types, donate_argnums=0)
    plan = made.plan(weights, shape(ROWS, D))
    held = [(one, n) for one, n in live_bytes(plan.program).held if one.kind == "weights"]
    assert {one.name for one, _ in held} == {"weights[*][0]", "weights[*][1]"}
    assert sum(n for _, n in held) == 2 * LAYERS
    assert sum(n * one.bytes_per_device for one, n in held) == STATE / 4
    text = plan.report().text()
    assert "25 inputs" in text and f"weights[*][1] ({LAYERS}) (donated)" in text
