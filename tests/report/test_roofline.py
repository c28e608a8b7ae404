"""What limits a program adds up to the plan's time, and its FLOPs are those counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import sbp
from sbp.report.timeline import limits

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS, D, H, LAYERS = 512, 256, 1024, 3


shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)


def layer(x, pair):
    w_in, w_out = pair
    with jax.named_scope("block"):
        return jax.nn.relu(x @ w_in) @ w_out, None


loss = lambda weights, x: jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


remat_loss = lambda weights, x: jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)


def train(of):
    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(of)(weights, x))

    return step


WEIGHTS = (shape(LAYERS, D, H), shape(LAYERS, H, D))
TYPES = (("model:S(2)", "model:S(1)"), "data:S(0)")
FORWARD = LAYERS * 2 * 2 * ROWS * D * H
"""Two products of each layer, two operations for each of their terms."""


def planned(fn, mesh=MESH, **options):
    made = sbp.jit(fn, mesh, in_types=TYPES, hardware="h100", **options)
    return made.plan(WEIGHTS, shape(ROWS, D))


@pytest.fixture(scope="module")
def plans():
    return {
        "forward": planned(loss),
        "train": planned(train(loss)),
        "remat": planned(train(remat_loss)),
    }


@pytest.mark.parametrize("name", ["forward", "train", "remat"])
def test_the_seconds_are_those_of_the_plan(plans, name):
    # Of a gradient of a scan, the plan's time is 0.04% longer than its instructions together.
    found = limits(plans[name].program)
    assert sum(found.seconds.values()) == pytest.approx(plans[name].program.cost.seconds, rel=1e-3)


def test_flops_are_those_counted_by_hand(plans):
    assert limits(plans["forward"].program).flops == FORWARD
    # A backward pass has two products for each one of the forward pass.
    found = limits(plans["train"].program)
    by_phase = {
        p: sum(w.flops for w in found.works if w.phase == p) for p in ("forward", "backward")
    }
    assert by_phase == {"forward": FORWARD, "backward": 2 * FORWARD}


def test_what_rematerialisation_repeats_does_not_count(plans):
    train, remat = limits(plans["train"].program), limits(plans["remat"].program)
    assert remat.flops == train.flops and train.repeated == 0
    assert 0 < remat.repeated <= FORWARD


def test_utilisation_is_flops_over_peak(plans):
    program = plans["train"].program
    assert limits(program).utilisation == pytest.approx(
        3 * FORWARD / (8 * sbp.HARDWARE["h100"].flops_per_second * program.cost.seconds), rel=1e-6
    )


matmul = lambda x, w: x @ w


def bound(rows, inner, columns, mesh, types, dtype=jnp.bfloat16):
    made = sbp.jit(matmul, mesh, in_types=types[:2], out_types=types[2], hardware="h100")
    plan = made.plan(shape(rows, inner, dtype=dtype), shape(inner, columns, dtype=dtype))
    seconds = limits(plan.program).seconds
    return max(seconds, key=lambda k: seconds[k])


def test_the_bound_is_what_the_program_is_made_for():
    line = AbstractMesh((8,), ("x",))
    whole = ("x:S(0)", "x:B", "x:S(0)")
    assert bound(65536, 8192, 8192, line, whole) == "compute"
    assert bound(4096, 64, 64, line, whole) == "memory"
    assert bound(512, 8192, 512, line, ("x:S(1)", "x:S(0)", "x:B")) == "link x"


def test_the_report_says_that_time_is_modelled(plans):
    text = plans["train"].report().roofline().text()
    assert "nothing was measured" in " ".join(text.split()) and "hardware h100" in text
    assert "block" in text and "limits: 4.83 GFLOP per call" in text


def test_a_region_by_hand_is_said_not_to_be_counted():
    def region(x):
        return jax.lax.psum(x @ x.T, "model")

    split, whole = jax.sharding.PartitionSpec(None, "model"), jax.sharding.PartitionSpec()

    def step(x):
        inner = jax.shard_map(region, mesh=MESH, in_specs=split, out_specs=whole)
        return inner(x) @ x

    text = " ".join(str(sbp.jit(step, MESH).plan(shape(64, 64)).report().roofline()).split())
    assert "1 region written by hand: FLOPs and time are not counted" in text
