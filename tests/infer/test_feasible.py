"""What has a typing gets one: on several mesh axes, under policies and budgets that keep most
conversions out."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import sbp


def accumulate(w, batches):
    """Gradients of micro-batches, summed in a loop."""

    def loss(w, x):
        return ((jax.nn.relu(x @ w["a"]) @ w["b"] - x) ** 2).mean()

    def turn(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

    return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, w), batches)[0]


def attend(w, x):
    def loss(w):
        q, k, v = (x @ w[name] for name in "qkv")
        return (jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v).sum()

    return jax.lax.fori_loop(
        0, 3, lambda _, w: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w)), w
    )


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {
    "accumulate": (accumulate, ({"a": f32(16, 32), "b": f32(32, 16)}, f32(4, 8, 16))),
    "accumulate, large": (
        accumulate,
        ({"a": f32(1024, 4096), "b": f32(4096, 1024)}, f32(8, 512, 1024)),
    ),
    "attend": (attend, ({n: f32(16, 16) for n in "qkv"}, f32(4, 8, 16))),
}
ASKED: dict[str, dict[str, Any]] = {
    "explicit": {"boxing": "explicit"},
    "reduce": {"boxing": "reduce"},
    "mixed": {"boxing": {"x": "explicit", "y": "reduce"}},
    "loop": {"budgets": [sbp.forbid(where="loop")]},
    "everywhere": {"budgets": [sbp.forbid()]},
}
MESHES = [AbstractMesh((2, 4), ("x", "y")), AbstractMesh((2, 2, 2), ("x", "y", "z"))]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.axis_sizes)))
def test_what_needs_no_collective_has_a_plan(mesh, program, asked):
    """All of them do with every value whole on every device."""
    fn, args = PROGRAMS[program]
    report = sbp.jit(fn, mesh, hardware="tpu-v5e", **ASKED[asked]).check(*args)
    assert report.ok, report.text()


@pytest.mark.parametrize("hardware", ["cpu", "h100", "tpu-v5e"])
@pytest.mark.parametrize("rows", [13, 16, 1023, 8191])
def test_a_budget_makes_nothing_cheaper(rows, hardware):
    """A dim split over two mesh axes is gathered over both at once: no detour is shorter."""

    def fn(x):
        return jnp.sin(sbp.annotate(x, x=sbp.S(0), y=sbp.S(0)))

    def seconds(*budgets):
        f = sbp.jit(fn, MESHES[0], in_types="B", out_types="B", hardware=hardware, budgets=budgets)
        plan = f.plan(f32(rows, 4))
        assert plan.program.typing.optimal
        return plan.cost.seconds

    assert seconds() <= seconds(sbp.forbid("all_gather"))
