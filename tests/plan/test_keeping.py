"""Types are chosen with what gradients keep from the forward pass: no types that someone pins by
hand give a cheaper plan."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp.plan.fit import best_program
from sbp.plan.saving import repeated_values, repeats
from tests.cases import shape as f32

MESH = jax.sharding.AbstractMesh((8,), ("d",))


def layer(x, w):
    up, down = w
    return x + jax.nn.softmax(jax.nn.gelu(x @ up) @ down, -1)


def scanned(weights, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, weights)[0]


def unrolled(weights, x):
    for n in range(3):
        x = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))(
            x, jax.tree.map(lambda w, n=n: w[n], weights)
        )
    return x


def step(model):
    def fn(weights, x):
        gradient = jax.grad(lambda w: (model(w, x) ** 2).mean())(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)

    return fn


ARGUMENTS = (f32(3, 1024, 4096), f32(3, 4096, 1024)), f32(256, 1024)


def plan(model, hardware, in_types=None, mesh=MESH):
    return sbp.jit(
        step(model),
        mesh,
        hardware=hardware,
        donate_argnums=0,
        in_types=in_types,
        memory_limit=2**40,  # every reuse that saves time is taken
    ).plan(*ARGUMENTS)


@pytest.mark.parametrize("hardware", ["tpu-v5p", "h100"])
@pytest.mark.parametrize("model", [scanned, unrolled], ids=lambda f: f.__name__)
def test_no_pinned_plan_is_cheaper(model, hardware):
    free = plan(model, hardware)
    typing = free.program.typing
    assert typing.bounds_reuse and typing.saved_seconds > 0
    for up, down, x in itertools.product(
        ("B", "S(1)", "S(2)"), ("B", "S(1)", "S(2)"), ("B", "S(0)", "S(1)")
    ):
        pinned = plan(model, hardware, ((f"d:{up}", f"d:{down}"), f"d:{x}"))
        assert typing.lower_bound <= pinned.cost.seconds * (1 + 1e-9), (up, down, x)
        assert free.cost.seconds <= pinned.cost.seconds * (1 + 1e-3), (up, down, x)


IN_STAGES = dataclasses.replace(sbp.HARDWARE["tpu-v6e"], scatters_whole_mesh=False)
"""Hardware on which the conversions that are kept take most of the time."""


@pytest.mark.parametrize(
    ("model", "hardware", "share"),
    [(scanned, IN_STAGES, 0.9), (unrolled, "h100", 0.85)],
    ids=["scanned", "unrolled"],
)
def test_keeping_is_part_of_the_choice(model, hardware, share):
    """Without the reuse of forward conversions, other types are chosen, and the plan costs more."""
    best = plan(model, hardware).program
    other = best_program(dataclasses.replace(best.request, reuse=False))
    assert other is not None and not other.typing.bounds_reuse
    assert "not counting conversions that" in sbp.Report(program=other).text()
    assert best.cost.seconds <= share * other.cost.seconds


@pytest.mark.parametrize("model", [scanned, unrolled], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "mesh", [MESH, jax.sharding.AbstractMesh((2, 4), ("d", "m"))], ids=["8", "2x4"]
)
def test_what_is_kept_was_foreseen(model, mesh, monkeypatch):
    """The bound waives the conversions of `twins` alone: all that is saved has to be among them."""
    seen: list[int] = []

    def watch(typing, block):
        found = repeats(typing, block)
        assert {r.value for r in found} <= repeated_values(typing.graph)[0]
        seen.extend(r.value for r in found)
        return found

    monkeypatch.setattr("sbp.plan.fit.repeats", watch)
    plan(model, "h100", mesh=mesh)
    assert seen


def test_twins_are_counted():
    assert not repeated_values(sbp.jit(scanned, MESH).trace(*ARGUMENTS).request.graph)[1]
    again, times = repeated_values(sbp.jit(step(scanned), MESH).trace(*ARGUMENTS).request.graph)
    assert set(times.values()) == {2}
    assert len(times) > len(again.intersection(times)) > 0
