"""The places of what a plan sends are right where loops begin and end."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp
from sbp.plan.traffic import sends
from sbp.report.flows import program_flows
from sbp.report.report import annotated_lines
from sbp.report.timeline import causes, schedule
from sbp.report.wording import bytes_text

MESH = AbstractMesh((2, 4), ("data", "model"))
LAYERS = 6


shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)


def layer(x, pair):
    w_in, w_out = pair
    h = jax.nn.gelu(x @ w_in)
    return h @ w_out, None


loss = lambda weights, x: jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def descent(weights, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def recurrent(w, xs):
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros_like(xs[0]), xs)
    return jnp.mean(h**2)


def recurrent_descent(w, xs):
    g = jax.grad(recurrent)(w, xs)
    return w - 0.1 * g


@pytest.fixture(scope="module")
def plan():
    weights = shape(LAYERS, 256, 1024), shape(LAYERS, 1024, 256)
    types = (("data:S(1) model:S(2)", "data:S(2) model:S(1)"), "data:S(0)")
    made = sbp.jit(descent, MESH, in_types=types, out_types=types[0])
    return made.plan(weights, shape(64, 256))


at = lambda function, line: f":{function.__code__.co_firstlineno + line}"


def stop(plan, where, phase):
    stops = program_flows(plan.program).stops
    (found,) = [s for s in stops if s.phase == phase and s.where.endswith(where)]
    return found


def test_the_caption_says_what_one_collective_sends(plan):
    flows = program_flows(plan.program)
    found = [send for s in flows.costliest for send in s.sends]
    assert {s.kind for s in found} == {"all_reduce"} and len({s.axes for s in found}) == 2
    over = {a: sum(s.bytes for s in found if s.axes == a) for a in ("data", "model")}
    assert over["data"] > over["model"]
    total, most = (bytes_text(sent) for sent in (sum(over.values()), over["data"]))
    assert f"{total}, {most} of them by all_reduce over data" in " ".join(
        plan.report().picture().text().split()
    )


def test_collectives_over_different_axes_have_different_times(plan):
    found = [c for c in causes(schedule(plan.program)) if c.axes]
    here = [c for c in found if c.line[1].endswith(at(layer, 2)) and c.phase == "forward"]
    assert sorted((c.what, c.axes, c.runs) for c in here) == [
        ("all_reduce", ("data",), LAYERS),
        ("all_reduce", ("model",), LAYERS),
    ]


def test_a_line_runs_as_often_as_its_loop_however_many_operations_it_has(plan):
    assert stop(plan, at(layer, 2), "forward").runs == LAYERS
    assert stop(plan, at(layer, 2), "backward").runs == LAYERS


def test_what_converts_the_operand_of_a_loop_stands_at_the_loop(plan):
    (before,) = [s for s in sends(plan.program) if not s.regions]
    assert before.runs == 1 and before.node is not None and before.node.op == "scan"
    (sent,) = stop(plan, at(loss, 0), "forward").sends
    assert (sent.kind, sent.axes, sent.runs) == (before.kind, before.axes, 1)
    assert all(s.runs == LAYERS for s in stop(plan, at(layer, 2), "forward").sends)


def test_the_reduction_of_a_gradient_after_a_loop_belongs_to_the_backward_pass():
    f = sbp.jit(recurrent_descent, MESH, in_types=("B", "data:S(1)"), out_types="B")
    plan = f.plan(shape(64, 64), shape(16, 32, 64))
    (after,) = [s for s in sends(plan.program) if s.reduces and not s.regions]
    assert after.reader is not None and not after.reader.backward
    assert after.phase == "backward" and after.runs == 1
    assert {phase for _, phase in program_flows(plan.program).sums(lambda s: s.phase)} == {
        "backward"
    }


def test_the_picture_and_the_source_name_the_same_line(plan):
    most = max(annotated_lines(plan.program), key=lambda a: a.bytes_per_device)
    (name,) = {s.name for s in program_flows(plan.program).costliest}
    assert name == f"{most.file}:{most.line}"
    assert f"the line {program_flows(plan.program).costliest[0].where}" in " ".join(
        plan.report().picture().text().split()
    )
