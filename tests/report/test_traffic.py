"""The picture of bytes shows what the plan sends, by mesh axis, phase and place."""

from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp
from sbp.errors import SbpError
from sbp.report.flows import Grouping, ProgramFlows, program_flows
from sbp.report.flows import traffic as chosen
from sbp.report.svg import NAMESPACE
from sbp.report.traffic_picture import MOST_PLACES, matrices

MESH = AbstractMesh((2, 4), ("data", "model"))
WEIGHT = 256 * 1024 * 4
LAYERS = 3


shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)


layer = lambda x, w_in, w_out: jax.nn.relu(x @ w_in) @ w_out


def loss(weights, x):
    for number, (w_in, w_out) in enumerate(weights):
        with jax.named_scope(f"layer_{number}"):
            x = layer(x, w_in, w_out)
    with jax.named_scope("loss"):
        return jnp.mean(x * x)


def step(weights, x):
    grads = jax.grad(loss)(weights, x)
    with jax.named_scope("sgd"):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


WEIGHTS = [(shape(256, 1024), shape(1024, 256))] * LAYERS
TYPES = ([("model:S(1)", "model:S(0)")] * LAYERS, "data:S(0)")


@pytest.fixture(scope="module")
def plan():
    made = sbp.jit(step, MESH, in_types=TYPES, out_types=TYPES[0], boxing="reduce")
    return made.plan(WEIGHTS, shape(64, 256))


def scanned(weights, x):
    body = lambda x, pair: (layer(x, *pair), None)

    return jax.lax.scan(body, x, weights)[0].sum()


@pytest.fixture(scope="module")
def scan():
    stacked = (shape(6, 256, 1024), shape(6, 1024, 256))
    types = (("data:S(1) model:S(2)", "data:S(2) model:S(1)"), "data:S(0)")
    made = sbp.jit(jax.grad(scanned), MESH, in_types=types, out_types=types[0])
    return made.plan(stacked, shape(64, 256))


def traffic(program, grouping: Grouping | None = None) -> ProgramFlows:
    return chosen(program) if grouping is None else program_flows(program, grouping)


by_moment = lambda found: found.sums(lambda stop: stop.phase)


def listed(program):
    """Bytes that the plan's conversions list, by their mesh axes, times their trips."""
    found = {}
    for planned in program.boxes():
        for one in planned.box.steps:
            names = ", ".join(program.mesh.names[k] for k in one.mesh_axes)
            found[names] = found.get(names, 0.0) + one.bytes_sent * planned.trips
    return {names: bytes_ for names, bytes_ in found.items() if bytes_}


@pytest.mark.parametrize("which", ["plan", "scan"])
@pytest.mark.parametrize("grouping", [None, "line", "function", "scope"])
def test_sums_are_those_of_the_plan(which, grouping, request):
    program = request.getfixturevalue(which).program
    found = traffic(program, grouping)
    assert found.bytes == pytest.approx(program.cost.bytes_per_device, rel=1e-12)
    by_axes = {}
    for (axes, _), bytes_ in by_moment(found).items():
        by_axes[axes] = by_axes.get(axes, 0.0) + bytes_
    assert by_axes == pytest.approx(listed(program), rel=1e-12)
    for matrix in matrices((found,)):
        assert sum(matrix.plans[0].values()) == pytest.approx(found.bytes, rel=1e-12)
        assert {r for r, _ in matrix.plans[0]} == set(matrix.rows)
        assert {c for _, c in matrix.plans[0]} == set(matrix.columns)


def test_gradients_are_summed_over_data_once_per_weight(plan):
    """An all-reduce over two devices sends the whole of its operand once: a quarter of a weight."""
    assert by_moment(traffic(plan.program))["data", "backward"] == pytest.approx(
        2 * LAYERS * WEIGHT / 4
    )


def test_bytes_of_the_backward_pass_are_of_what_its_operations_read_and_of_gradients(plan):
    read = sum(
        one.bytes_sent * planned.trips
        for planned in plan.program.boxes()
        if any(n is not None and n.backward for n in (planned.box.reader, planned.box.maker))
        for one in planned.box.steps
    )
    sums = by_moment(traffic(plan.program))
    assert read > 0
    assert sum(b for (_, m), b in sums.items() if m == "backward") == pytest.approx(read)


def test_two_plans_stand_side_by_side(plan):
    other = sbp.jit(step, MESH, in_types=("B", "data:S(0)")).plan(WEIGHTS, shape(64, 256))
    (svg,) = plan.report().bytes(other.report()).svg()
    words = [t.text for t in ElementTree.fromstring(svg).iter(f"{{{NAMESPACE}}}text")]
    assert "this plan" in words and "the other plan" in words
    both = traffic(plan.program), traffic(other.program)
    for matrix in matrices(both):
        for sums, one in zip(matrix.plans, both, strict=True):
            assert sum(sums.values()) == pytest.approx(one.bytes, rel=1e-12)


def test_the_drawing_has_each_cell_of_the_table(plan):
    shown = plan.report().bytes()
    root = ElementTree.fromstring(shown.svg()[0])
    titles = [t.text or "" for t in root.iter(f"{{{NAMESPACE}}}title")]
    for matrix in matrices((traffic(plan.program),)):
        for row in matrix.rows:
            for column in matrix.columns:
                assert any(t.startswith(f"{row}, {column}: ") for t in titles)
    for box in root.iter(f"{{{NAMESPACE}}}rect"):
        right = float(box.attrib["x"]) + float(box.attrib["width"])
        assert right <= float(root.attrib["width"]), "a cell is cut"
    for width in (80, 200):
        assert [line for line in shown.lines(width) if len(line) > width] == []


def test_many_places_are_added_up_in_one_row():
    def many(x, w):
        for k in range(MOST_PLACES + 4):
            with jax.named_scope("s" + chr(ord("a") + k)):
                x = jnp.tanh(x @ w)
        return x

    made = sbp.jit(many, MESH, in_types=("model:S(1)", "model:S(0)"), boxing="reduce")
    found = traffic(made.plan(shape(64, 64), shape(64, 64)).program)
    _, by_place = matrices((found,))
    assert len(found.places) > MOST_PLACES
    assert len(by_place.rows) == MOST_PLACES + 1 and "other place" in by_place.rows[-1]
    assert sum(by_place.plans[0].values()) == pytest.approx(found.bytes, rel=1e-12)


def test_a_plan_that_sends_nothing_says_so():
    made = sbp.jit(jnp.tanh, MESH, in_types=("data:S(0)",)).plan(shape(64, 64))
    assert "no device sends anything" in made.report().bytes().text()


def test_what_cannot_be_drawn_is_refused(plan):
    with pytest.raises(SbpError, match="other must be a Report"):
        plan.report().bytes(plan)
