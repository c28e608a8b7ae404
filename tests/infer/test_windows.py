"""Types that are chosen on some mesh axes at a time, as on more than three axes; and plans of the
types that are chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.infer import choose as choosing, request as requests, space as spaces
from sbp.infer.space import TypeSpace
from sbp.machine.mesh import mesh_spec
from sbp.report.timeline import Schedule
from tests.infer.test_check import certified, shape, traced
from tests.same import assert_same_results


def loss(w, x):
    h = jax.nn.gelu(x @ w["up"]) @ w["down"]
    return jnp.mean((h - h.max(-1, keepdims=True)) ** 2)


def step(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return value, jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(1.0, norm), w, grads)


def arguments(rows=64, width=32):
    return {"up": shape(width, 4 * width), "down": shape(4 * width, width)}, shape(rows, width)


def jointly(monkeypatch, axes):
    """Enumerates the rows of nodes on so many mesh axes together."""
    for module in (choosing, requests):
        monkeypatch.setattr(module, "JOINT_AXES", axes)


@pytest.mark.parametrize("boxing", ["auto", "reduce"])
@pytest.mark.parametrize("pinned", ["B", "a:S(0) b:S(0)", "b:S(1) d:S(0)"])
def test_four_axes_are_near_the_joint_choice(monkeypatch, pinned, boxing):
    mesh = jax.sharding.AbstractMesh((2, 2, 2, 2), tuple("abcd"))

    request = lambda: traced(step, arguments(), mesh, [None, None, pinned], boxing=boxing)
    windows = certified(request())
    assert windows.lower_bound == 0
    jointly(monkeypatch, 4)
    assert windows.seconds <= 1.05 * certified(request()).seconds


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("rows", [64, 21])
@pytest.mark.filterwarnings("ignore:uneven-boundary")
def test_values_of_types_that_are_chosen_in_windows(monkeypatch, rows, axes):
    jointly(monkeypatch, axes)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda a: rng.normal(size=a.shape).astype("float32"), arguments(rows))
    f = sbp.jit(step, sbp.make_mesh((2, 2, 2), tuple("abc")), in_types=(None, "a:S(0) c:S(1)"))
    assert_same_results(step(*args), f(*args), rtol=2e-5, atol=2e-5)


def test_three_axes_that_are_too_large_together(monkeypatch):
    mesh = jax.sharding.AbstractMesh((2, 2, 2), tuple("abc"))
    joint = certified(traced(step, arguments(), mesh))
    monkeypatch.setattr(choosing, "JOINT_ENTRIES", 0)
    windows = certified(traced(step, arguments(), mesh))
    assert 0 == windows.lower_bound < joint.seconds <= windows.seconds <= 1.05 * joint.seconds


def test_five_axes_are_used():
    def planned(*sizes):
        names = ("data", "fsdp", "tensor", "expert", "sequence")[: len(sizes)]
        f = sbp.jit(
            step, jax.sharding.AbstractMesh(sizes, names), in_types=(None, "data:S(0) fsdp:S(0)")
        )
        return f.plan(*arguments(4096, 1024)).program

    five = planned(4, 4, 2, 2, 2)
    assert five.cost.seconds < 0.5 * planned(4, 4).cost.seconds
    assert Schedule(five).seconds == pytest.approx(five.cost.seconds, rel=1e-3)


def test_both_searches_of_conversions_find_the_same_seconds(monkeypatch):
    mesh = mesh_spec(jax.sharding.AbstractMesh((2, 2, 2), tuple("abc")))
    seconds = lambda: TypeSpace((64, 16, 4), 4, mesh, frozenset({"sum", "max"})).seconds()
    found = seconds()
    monkeypatch.setattr(spaces, "LARGE", 0)
    np.testing.assert_allclose(seconds(), found, rtol=1e-12)


# ---- the plan of the chosen types ----------------------------------------------------------------


def test_a_conversion_obeys_the_budgets_of_its_first_reader():
    """The forward pass may not send what the backward pass reads, so it scatters the sum, and the
    backward pass gathers the result."""

    @jax.custom_vjp
    def squared(y):
        return sbp.split(y, 0, "d") ** 2

    squared.defvjp(lambda y: (squared(y), y), lambda y, ct: (2 * ct * sbp.replicate(y, "d"),))

    def both(x, w):
        out, pull = jax.vjp(lambda w: squared(x @ w), w)
        return out, pull(jnp.ones_like(out))[0]

    args = np.random.default_rng(0).normal(size=(2, 16, 16)).astype("float32")
    f = sbp.jit(
        both,
        sbp.make_mesh((8,), ("d",)),
        in_types=("d:S(1)", "d:S(0)"),
        budgets=[
            sbp.forbid("all_reduce", where="forward"),
            sbp.forbid("all_gather", where="forward"),
        ],
    )
    assert_same_results(both(*args), f(*args), rtol=2e-5, atol=2e-5)
    program = f.plan(*args).program
    assert [box.box.steps[0].kind for box in program.boxes()] == ["reduce_scatter", "all_gather"]
    assert Schedule(program).seconds == pytest.approx(program.cost.seconds, rel=1e-6)
