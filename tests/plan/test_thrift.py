"""Without a memory limit, loops hold less where that is worth the time; the report says what the
fastest plan would take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import sbp
from sbp.plan.fit import FREED, WORTH, held_for_loops
from sbp.plan.saved import SavedPlan

TURNS = 4


def step(w, batch):
    """Adds up the gradients of microbatches."""

    def loss(w, x):
        for a in w:
            x = jnp.tanh(x @ a)
        return (x**2).sum()

    def turn(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

    total, _ = lax.scan(turn, jax.tree.map(jnp.zeros_like, w), batch)
    return jax.tree.map(lambda a, g: a - 1e-4 * g, w, total)


@functools.cache
def plan(width=2048, rows=16384, memory_limit=None, hardware="tpu-v5e", turns=TURNS):
    f = sbp.jit(
        step,
        jax.sharding.AbstractMesh((8,), ("d",)),
        in_types=("d:S(0)", "d:S(1)"),
        out_types="d:S(0)",
        donate_argnums=0,
        hardware=hardware,
        memory_limit=memory_limit,
    )
    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 6
    return f.plan(weights, jax.ShapeDtypeStruct((turns, rows, width), jnp.float32))


LARGE = {"width": 4096, "rows": 65536}
ALL = 16e9
"""A memory limit that every plan meets."""


def inside(plan):
    """The kinds of the collectives that run in each turn."""
    return {s.kind for p in plan.program.boxes() if p.trips == TURNS for s in p.box.steps}


def test_gradients_are_scattered_in_each_turn():
    thrifty, fastest = plan(**LARGE), plan(**LARGE, memory_limit=ALL)
    assert inside(thrifty) == {"reduce_scatter"} and not inside(fastest)
    assert thrifty.program.faster == fastest.cost
    time = thrifty.cost.seconds / fastest.cost.seconds
    memory = thrifty.cost.peak_memory_bytes / fastest.cost.peak_memory_bytes
    assert memory <= 1 - FREED and 1 < time <= memory**-WORTH
    assert held_for_loops(thrifty.program) < held_for_loops(fastest.program)


def test_time_that_memory_is_not_worth_is_not_taken():
    """With few rows in each turn, sums in each turn take half of the time again."""
    assert held_for_loops(plan(rows=4096).program) > FREED * plan(rows=4096).cost.peak_memory_bytes
    assert plan(rows=4096).program.faster is None


def test_a_small_share_of_the_device_is_left_alone():
    large = dataclasses.replace(sbp.HARDWARE["tpu-v5e"], hbm_bytes=2.0**40)
    assert plan(**LARGE, hardware=large).program.faster is None


def test_the_report_has_the_fastest_plan():
    said = "sbp chose this one because it needs less memory"
    assert said in plan(**LARGE).report().text(400)
    assert said not in plan(**LARGE, memory_limit=ALL).report().text(400)


def test_a_saved_plan_keeps_it():
    program = plan(**LARGE).program
    read = SavedPlan.loads(SavedPlan.of(program).dumps()).program_for(program.request)
    assert read.faster == program.faster and read.cost == program.cost


def test_values():
    """On a device whose links and memory are fast, and that has little memory."""
    fast = dataclasses.replace(
        sbp.HARDWARE["tpu-v5e"],
        hbm_bytes=2**20,
        hbm_bytes_per_second=1e13,
        link_bytes_per_second=1e15,
        latency_seconds=0.0,
        hop_seconds=1e-9,
    )
    f = sbp.jit(
        step,
        sbp.make_mesh((8,), ("d",)),
        in_types=("d:S(0)", "d:S(1)"),
        out_types="d:S(0)",
        hardware=fast,
    )
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(6)]
    batch = rng.normal(size=(TURNS, 512, 64)).astype(np.float32)
    made = f.plan(weights, batch)
    assert made.program.faster is not None
    for got, want in zip(made(weights, batch), jax.jit(step)(weights, batch), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-4)
